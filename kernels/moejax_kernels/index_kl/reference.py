"""Definition of the index's loss: KL from the attention, summed over heads, to the softmax of the index scores."""

import jax
import jax.numpy as jnp

from moejax_kernels.attention.reference import attention_probs
from moejax_kernels.attention.visibility import chosen, visible
from moejax_kernels.index_topk.reference import index_scores


def index_kl(q_BLHC, k_BLGC, index_q_BLJC, index_k_BLC, index_w_BLJ, ids_BLK, *, scale, segments=None):
    length = q_BLHC.shape[1]
    at_L = jnp.arange(length)
    allowed_BLL = visible(segments, at_L, at_L)
    if ids_BLK is not None:
        allowed_BLL = allowed_BLL & chosen(ids_BLK, length)
    return divergence(q_BLHC, k_BLGC, index_q_BLJC, index_k_BLC, index_w_BLJ, allowed_BLL, scale=scale)


def divergence(q_BQHC, k_BKGC, index_q_BQJC, index_k_BKC, index_w_BQJ, allowed_BQK, *, scale):
    """KL(target || softmax(index scores)) over the allowed keys, [B, Q]; 0 where a query sees nothing."""
    q_BQHC, k_BKGC = jax.lax.stop_gradient((q_BQHC, k_BKGC))
    target_BQK = jnp.sum(attention_probs(q_BQHC, k_BKGC, allowed_BQK, scale=scale), axis=(1, 3)) / q_BQHC.shape[2]
    scores_BQK = jnp.where(allowed_BQK, index_scores(index_q_BQJC, index_k_BKC, index_w_BQJ), -jnp.inf)
    some_BQ1 = jnp.any(allowed_BQK, axis=-1, keepdims=True)
    log_index_BQK = jax.nn.log_softmax(jnp.where(some_BQ1, scores_BQK, 0), axis=-1)
    present_BQK = allowed_BQK & (target_BQK > 0)  # 0 log 0 = 0
    log_target_BQK = jnp.log(jnp.where(present_BQK, target_BQK, 1))
    return jnp.sum(jnp.where(present_BQK, target_BQK * (log_target_BQK - jnp.where(present_BQK, log_index_BQK, 0)), 0), axis=-1)
