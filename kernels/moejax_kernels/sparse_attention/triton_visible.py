"""Who sees whom, inside Triton kernels: `visibility` on tiles of positions."""

import jax.numpy as jnp

from moejax_kernels import triton_launch  # isort: skip (points Triton at its assembler: before triton)

import triton
import triton.language as tl

del triton_launch
NO_SEGMENTS, DOCUMENTS, TREES = 0, 1, 2


def operands(segments, stand_in):
    """What a kernel needs to know of segments.

    Args:
      segments: Segments or None.
      stand_in: an int32 array, passed where there is nothing to pass.

    Returns:
      Operands (ids_BL, index_BL, ancestor_BUU as int8, number of segments U), and the constexpr SEGMENTS.
    """
    if segments is None:
        return (stand_in, stand_in, stand_in, 0), NO_SEGMENTS
    ids_BL = jnp.asarray(segments.ids_BL)
    if segments.ancestor_BUU is None:
        return (ids_BL, stand_in, stand_in, 0), DOCUMENTS
    ancestor_BUU = jnp.asarray(segments.ancestor_BUU).astype(jnp.int8)
    return (ids_BL, jnp.asarray(segments.index_BL), ancestor_BUU, ancestor_BUU.shape[1]), TREES


@triton.jit
def sees(query, key, row, L, ids_ptr, index_ptr, ancestor_ptr, U, SEGMENTS: tl.constexpr):
    """May the tokens at `query` see those at `key`? Shapes broadcast; keys outside of [0, L) are nobody, queries lie inside.

    `row`, int64, is the sequence in the batch.
    """
    seen = (key >= 0) & (key <= query)
    if SEGMENTS > 0:
        real_key = (key >= 0) & (key < L)
        own = tl.load(ids_ptr + row * L + query)
        other = tl.load(ids_ptr + row * L + key, mask=real_key, other=-1)
        seen = seen & (tl.minimum(own, other) >= 0)
        if SEGMENTS == 1:
            seen = seen & (own == other)
        else:
            own_index = tl.load(index_ptr + row * L + query)
            other_index = tl.load(index_ptr + row * L + key, mask=real_key, other=0)
            related = tl.load(ancestor_ptr + (row * U + own_index) * U + other_index, mask=seen, other=0)
            seen = seen & (related != 0)
    return seen
