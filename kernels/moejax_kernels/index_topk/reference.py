"""Definition of the index's choice: all scores, then top-k."""

import jax
import jax.numpy as jnp

from moejax_kernels.visibility import visible, visible_at


def index_topk(index_q_BLJC, index_k_BSC, index_w_BLJ, *, topk, segments=None, key_end_BS=None):
    at_L = jnp.arange(index_q_BLJC.shape[1], dtype=jnp.int32)
    scores_BLS = index_scores(*jax.lax.stop_gradient((index_q_BLJC, index_k_BSC, index_w_BLJ)))
    allowed_BLS = visible(segments, at_L, at_L) if key_end_BS is None else visible_at(segments, at_L, key_end_BS[:, None])
    scores_BLS = jnp.where(allowed_BLS, scores_BLS, -jnp.inf)
    best_BLK, ids_BLK = jax.lax.top_k(scores_BLS, min(topk, scores_BLS.shape[2]))
    ids_BLK = jnp.where(best_BLK == -jnp.inf, -1, ids_BLK.astype(jnp.int32))
    return jnp.pad(ids_BLK, ((0, 0), (0, 0), (0, topk - ids_BLK.shape[2])), constant_values=-1)


def index_scores(index_q_BQJC, index_k_BSC, index_w_BQJ):
    """sum_j w_j relu(q_j . k), [B, Q, S], in float32 at least."""
    inside = jnp.promote_types(index_q_BQJC.dtype, jnp.float32)
    dots_BQJS = jnp.einsum("BQJC,BSC->BQJS", index_q_BQJC.astype(inside), index_k_BSC.astype(inside))
    scores_BQS = jnp.einsum("BQJ,BQJS->BQS", index_w_BQJ.astype(inside), jax.nn.relu(dots_BQJS))
    return jnp.where(scores_BQS == 0, 0, scores_BQS)  # top_k puts -0 below 0, and a negative weight of a silent head makes -0
