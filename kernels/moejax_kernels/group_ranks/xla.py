"""Ranks by counting: a histogram for each block of rows, prefix sums over blocks, and comparisons inside a block alone."""

import jax.numpy as jnp

BLOCK = 64
"""Rows that are compared with each other; the histograms take 4*E*R/BLOCK bytes."""


def group_ranks(ids_R, num_groups: int):
    num_rows = ids_R.size
    ids_R = jnp.where((ids_R >= 0) & (ids_R < num_groups), ids_R, num_groups)
    ids_Nb = jnp.pad(ids_R, (0, -num_rows % BLOCK), constant_values=num_groups).reshape(-1, BLOCK)
    num_blocks = ids_Nb.shape[0]
    block_N1 = jnp.arange(num_blocks)[:, None]
    counts_NE = jnp.zeros((num_blocks, num_groups), jnp.int32).at[block_N1, ids_Nb].add(1, mode="drop")
    end_NE = jnp.cumsum(counts_NE, 0, dtype=jnp.int32)
    earlier_bb = jnp.tri(BLOCK, k=-1, dtype=bool)
    inside_Nb = jnp.sum((ids_Nb[:, :, None] == ids_Nb[:, None, :]) & earlier_bb, -1, dtype=jnp.int32)
    before_Nb = (end_NE - counts_NE).at[block_N1, ids_Nb].get(mode="fill", fill_value=0)
    rank_R = jnp.where(ids_Nb < num_groups, before_Nb + inside_Nb, -1).reshape(-1)[:num_rows]
    return rank_R, end_NE[-1] if num_blocks else jnp.zeros(num_groups, jnp.int32)
