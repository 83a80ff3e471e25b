"""Definition of the index's loss: KL from the attention, summed over heads, to the softmax of the index scores."""

import jax
import jax.numpy as jnp

from moejax_kernels.attention.reference import attention_probs
from moejax_kernels.index_topk.reference import index_scores
from moejax_kernels.visibility import chosen, visible


def index_kl(q_BLHC, k_BLGC, index_q_BLJC, index_k_BLC, index_w_BLJ, ids_BLK, *, scale, segments=None):
    length = q_BLHC.shape[1]
    at_L = jnp.arange(length)
    allowed_BLL = visible(segments, at_L, at_L)
    if ids_BLK is not None:
        allowed_BLL = allowed_BLL & chosen(ids_BLK, length)
    q_BLHC, k_BLGC = jax.lax.stop_gradient((q_BLHC, k_BLGC))
    probs_BGLNL = attention_probs(q_BLHC, k_BLGC, allowed_BLL, scale=scale)
    return divergence(probs_BGLNL.mean((1, 3)), index_scores(index_q_BLJC, index_k_BLC, index_w_BLJ), allowed_BLL)


def divergence(target_BQK, scores_BQK, allowed_BQK):
    """KL(target || softmax(scores)) over the allowed keys, [B, Q]; 0 where a query sees nothing."""
    some_BQ1 = jnp.any(allowed_BQK, axis=-1, keepdims=True)
    log_index_BQK = jax.nn.log_softmax(jnp.where(allowed_BQK, scores_BQK, jnp.where(some_BQ1, -jnp.inf, 0)), axis=-1)
    present_BQK = allowed_BQK & (target_BQK > 0)  # 0 log 0 = 0
    log_ratio_BQK = jnp.log(jnp.where(present_BQK, target_BQK, 1)) - jnp.where(present_BQK, log_index_BQK, 0)
    return jnp.sum(jnp.where(present_BQK, target_BQK, 0) * log_ratio_BQK, axis=-1)
