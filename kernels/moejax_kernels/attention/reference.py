"""Definition of attention: a masked softmax over all pairs."""

import jax
import jax.numpy as jnp

from moejax_kernels.visibility import visible


def attention(q_BLHC, k_BSGC, v_BSGM, *, scale, segments=None, window=None, sinks_H=None):
    at_S = jnp.arange(k_BSGC.shape[1])
    at_L = at_S[k_BSGC.shape[1] - q_BLHC.shape[1] :]
    return attend(q_BLHC, k_BSGC, v_BSGM, visible(segments, at_L, at_S, window=window), scale=scale, sinks_H=sinks_H)


def attend(q_BQHC, k_BKGC, v_BKGM, allowed_BQK, *, scale, sinks_H=None):
    """Queries over the keys they are allowed to see. A query that sees nothing gives 0."""
    probs_BGQNK = attention_probs(q_BQHC, k_BKGC, allowed_BQK, scale=scale, sinks_H=sinks_H)
    o_BQGNM = jnp.einsum("BGQNK,BKGM->BQGNM", probs_BGQNK, v_BKGM.astype(probs_BGQNK.dtype))
    return o_BQGNM.reshape(*q_BQHC.shape[:3], -1).astype(q_BQHC.dtype)


def attention_probs(q_BQHC, k_BKGC, allowed_BQK, *, scale, sinks_H=None):
    """Softmax of scale * q.k over the allowed keys, in float32 at least. Query head h reads key head h // N, N = H // G."""
    inside = jnp.promote_types(q_BQHC.dtype, jnp.float32)
    num_rows, num_queries, num_heads, width = q_BQHC.shape
    num_key_heads = k_BKGC.shape[2]
    q_BQGNC = q_BQHC.reshape(num_rows, num_queries, num_key_heads, num_heads // num_key_heads, width).astype(inside)
    scores_BGQNK = scale * jnp.einsum("BQGNC,BKGC->BGQNK", q_BQGNC, k_BKGC.astype(inside))
    sinks_G1N1 = None if sinks_H is None else sinks_H.astype(inside).reshape(num_key_heads, 1, -1, 1)
    return masked_softmax(scores_BGQNK, allowed_BQK[:, None, :, None], sinks_G1N1)


def masked_softmax(scores, allowed, sinks=None):
    """Softmax over the last axis: exactly 0, with gradient exactly 0, where not allowed; `sinks` are one more logit without a value."""
    peak = jnp.max(scores, axis=-1, keepdims=True, where=allowed, initial=-jnp.inf)
    if sinks is not None:
        peak = jnp.maximum(peak, sinks)
    peak = jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0))
    # masked before exp, which could overflow, and after, so that the value is 0: 0 * inf has no place in the gradient
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - peak, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - peak)
    return weights / jnp.where(total > 0, total, 1)
