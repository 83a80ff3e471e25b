"""Definition of the ranks: how many earlier rows are of the same group."""

import jax.numpy as jnp


def group_ranks(ids_R, num_groups: int):
    row_R = jnp.arange(ids_R.size)
    real_R = (ids_R >= 0) & (ids_R < num_groups)
    same_RR = (ids_R[:, None] == ids_R) & (row_R[:, None] > row_R)
    rank_R = jnp.where(real_R, jnp.sum(same_RR, 1, dtype=jnp.int32), -1)
    return rank_R, jnp.sum(ids_R == jnp.arange(num_groups)[:, None], 1, dtype=jnp.int32)
