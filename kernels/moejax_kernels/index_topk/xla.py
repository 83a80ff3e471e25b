"""The index's choice over blocks of queries and tiles of keys, with a running list of the best."""

from typing import Any

import jax
import jax.numpy as jnp

from moejax_kernels.index_topk.reference import index_scores
from moejax_kernels.query_blocks import num_queries, over_queries
from moejax_kernels.visibility import visible, visible_at

TILE = 8192
"""Keys of one tile. On CPU one top_k of 8192 costs less than four of 2048 that carry 512 winners along."""


def index_topk(index_q_BLJC, index_k_BSC, index_w_BLJ, *, topk, segments=None, key_end_BS=None):
    index_q_BLJC, index_k_BSC, index_w_BLJ = jax.lax.stop_gradient((index_q_BLJC, index_k_BSC, index_w_BLJ))
    num_rows, num_keys = index_k_BSC.shape[:2]
    num_heads = index_w_BLJ.shape[2]
    tile = min(TILE, num_keys)
    num_tiles = -(-num_keys // tile)
    padding = ((0, 0), (0, num_tiles * tile - num_keys))
    index_k_BSC = jnp.pad(index_k_BSC, (*padding, (0, 0)))
    if key_end_BS is not None:
        key_end_BS = jnp.pad(key_end_BS, padding, constant_values=-1)
    num_best = min(topk, num_keys)

    def block(query_Q, index_q_BQJC, index_w_BQJ):
        def add_tile(number, best: Any):
            key_K = number * tile + jnp.arange(tile, dtype=jnp.int32)
            index_k_BKC = jax.lax.dynamic_slice_in_dim(index_k_BSC, number * tile, tile, axis=1)
            if key_end_BS is None:
                allowed_BQK = visible(segments, query_Q, key_K)
            else:
                allowed_BQK = visible_at(segments, query_Q, jax.lax.dynamic_slice_in_dim(key_end_BS, number * tile, tile, axis=1)[:, None])
            scores_BQK = jnp.where(allowed_BQK, index_scores(index_q_BQJC, index_k_BKC, index_w_BQJ), -jnp.inf)
            ids_BQK = jnp.broadcast_to(jnp.where(allowed_BQK, key_K, -1), scores_BQK.shape)
            return _merge(best[0], best[1], scores_BQK, ids_BQK, num_best)

        shape = (*index_q_BQJC.shape[:2], 0)
        inside = jnp.promote_types(index_q_BQJC.dtype, jnp.float32)
        best: Any = add_tile(0, (jnp.zeros(shape, inside), jnp.zeros(shape, jnp.int32)))
        if num_tiles > 1:
            best = tuple(
                jnp.pad(array, ((0, 0), (0, 0), (0, num_best - array.shape[2])), constant_values=fill)
                for array, fill in zip(best, (-jnp.inf, -1), strict=True)
            )
            best = jax.lax.fori_loop(1, num_tiles, add_tile, best)
        return best[1]

    ids_BLK = over_queries(block, index_q_BLJC, index_w_BLJ, block=num_queries(index_q_BLJC.shape[1], num_rows * num_heads * tile))
    return jnp.pad(ids_BLK, ((0, 0), (0, 0), (0, topk - num_best)), constant_values=-1)


def _merge(best_BQK, ids_BQK, scores_BQS, tile_ids_BQS, num_best):
    """The best of both. The list comes first and holds lower positions, so that of equal scores the lower one wins."""
    scores = jnp.concatenate([best_BQK, scores_BQS], axis=2)
    ids = jnp.concatenate([ids_BQK, tile_ids_BQS], axis=2)
    best, at = jax.lax.top_k(scores, min(num_best, scores.shape[2]))
    return best, jnp.take_along_axis(ids, at, axis=2)
