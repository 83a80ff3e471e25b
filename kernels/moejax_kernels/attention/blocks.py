"""Work on blocks of queries, so that what grows with queries times keys never exists as a whole."""

import jax
import jax.numpy as jnp

BLOCK = 256
"""Queries of one block."""
WHOLE = 512
"""Rows up to this length are one block."""


def over_queries(function, *arrays, block: int | None = None):
    """`function(query_Q, *blocks)` for blocks of consecutive queries, with results put together; backward redoes each block.

    Args:
      function: from row positions int32 [Q] and the arrays' blocks [B, Q, ...] to an array or tree [B, Q, ...]. In the last block,
        positions may lie beyond the row, where arrays are 0; what is returned for them is left out.
      arrays: [B, L, ...].
    """
    if arrays[0].shape[1] <= WHOLE:
        return function(jnp.arange(arrays[0].shape[1], dtype=jnp.int32), *arrays)
    again = jax.checkpoint(function)
    return scan_queries(lambda _, *block_arrays: (None, again(*block_arrays)), None, *arrays, block=block)[1]


def scan_queries(function, carry, *arrays, block: int | None = None):
    """`carry, out = function(carry, query_Q, *blocks)` from block to block; else as over_queries. Returns carry and all outs."""
    num_rows, length = arrays[0].shape[:2]
    block = min(block or BLOCK, length)
    num_blocks = -(-length // block)

    def cut(array):
        array = jnp.pad(array, ((0, 0), (0, num_blocks * block - length)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(num_rows, num_blocks, block, *array.shape[2:]), 1, 0)

    def join(out):
        return jnp.moveaxis(out, 0, 1).reshape(num_rows, -1, *out.shape[3:])[:, :length]

    def one_block(carry, start_and_blocks):
        start, *blocks = start_and_blocks
        return function(carry, start + jnp.arange(block, dtype=jnp.int32), *blocks)

    starts = block * jnp.arange(num_blocks, dtype=jnp.int32)
    carry, outs = jax.lax.scan(one_block, carry, (starts, *map(cut, arrays)))
    return carry, jax.tree.map(join, outs)
