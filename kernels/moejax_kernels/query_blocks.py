"""Work on blocks of queries, so that what grows with queries times keys never exists as a whole."""

import jax
import jax.numpy as jnp

BLOCK_NUMBERS = 2**19
"""Numbers in the largest temporary of one block, about: what stays in a cache, and is not new memory each time."""
MIN_QUERIES = 16
"""Queries of one block at least."""


def num_queries(length: int, numbers_per_query: int) -> int:
    """Queries of one block, when the largest temporary has so many numbers per query position (all sequences together)."""
    return min(length, max(MIN_QUERIES, BLOCK_NUMBERS // numbers_per_query))


def over_queries(function, *arrays, block: int):
    """`function(query_Q, *blocks)` for blocks of consecutive queries, with results put together; backward redoes each block.

    Args:
      function: from row positions int32 [Q] and the arrays' blocks [B, Q, ...] to an array or tree [B, Q, ...]. In the last block,
        positions may lie beyond the row, where arrays are 0; what is returned for them is left out.
      arrays: [B, L, ...].
      block: Q.
    """
    again = jax.checkpoint(function)
    return scan_queries(lambda _, *block_arrays: (None, again(*block_arrays)), None, *arrays, block=block)[1]


def scan_queries(function, carry, *arrays, block: int):
    """`carry, out = function(carry, query_Q, *blocks)` from block to block; else as over_queries. Returns carry and all outs."""
    num_rows, length = arrays[0].shape[:2]
    num_blocks = -(-length // block)
    if num_blocks == 1:
        return function(carry, jnp.arange(length, dtype=jnp.int32), *arrays)

    def cut(array):
        array = jnp.pad(array, ((0, 0), (0, num_blocks * block - length)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(num_rows, num_blocks, block, *array.shape[2:]), 1, 0)

    def join(out):
        return jnp.moveaxis(out, 0, 1).reshape(num_rows, -1, *out.shape[3:])[:, :length]

    def one_block(carry, start_and_blocks):
        start, *blocks = start_and_blocks
        return function(carry, start + jnp.arange(block, dtype=jnp.int32), *blocks)

    starts = block * jnp.arange(num_blocks, dtype=jnp.int32)
    carry, outs = jax.lax.scan(one_block, carry, (starts, *jax.tree.map(cut, arrays)))
    return carry, jax.tree.map(join, outs)
