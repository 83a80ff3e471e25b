"""Sparse attention over blocks of queries: gathers the chosen keys, or masks all of them where most are chosen anyway."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax_kernels import saved
from moejax_kernels.attention.reference import masked_softmax
from moejax_kernels.attention.xla import masked_attention
from moejax_kernels.query_blocks import num_queries, over_queries, scan_queries
from moejax_kernels.varying import vary_alike
from moejax_kernels.visibility import visible_at

DENSE_KEYS = 4
"""Rows with at most so many times K keys are masked, not gathered."""


def sparse_attention(q_BLHC, k_BLGC, v_BLGM, ids_BLK, *, scale, value_dim=None, segments=None):
    if not gathers(ids_BLK):
        v_BLGM = k_BLGC[..., :value_dim] if v_BLGM is None else v_BLGM
        return masked_attention(q_BLHC, k_BLGC, v_BLGM, ids_BLK, None, segments, scale=scale)
    return _gathered(*vary_alike(q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments), scale, value_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _gathered(q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, scale, value_dim):
    def block(query_Q, q_BQHC, ids_BQK):
        allowed_BQK = visible_at(segments, query_Q, ids_BQK)
        return _attend_each(q_BQHC, take((k_BLGC, v_BLGM), ids_BQK), allowed_BQK, scale, value_dim)

    return over_queries(block, q_BLHC, ids_BLK, block=_num_queries(ids_BLK, k_BLGC))


def _save(q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, scale, value_dim):
    o_BLHM = checkpoint_name(_gathered(q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, scale, value_dim), saved.ATTENTION)
    return o_BLHM, (q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments)


def _grads(scale, value_dim, kept, do_BLHM):
    q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments = kept
    inside = jnp.promote_types(q_BLHC.dtype, jnp.float32)

    def block(sums, query_Q, q_BQHC, ids_BQK, do_BQHM):
        allowed_BQK = visible_at(segments, query_Q, ids_BQK)
        attend_each = functools.partial(_attend_each, allowed_BQK=allowed_BQK, scale=scale, value_dim=value_dim)
        _, transpose = jax.vjp(attend_each, q_BQHC, take((k_BLGC, v_BLGM), ids_BQK))
        dq_BQHC, dtaken = transpose(do_BQHM)
        at = (jnp.arange(ids_BQK.shape[0])[:, None, None], jnp.where(allowed_BQK, ids_BQK, ids_BLK.shape[1]))
        return jax.tree.map(lambda sum_, d: sum_.at[at].add(d.astype(inside), mode="drop"), sums, dtaken), dq_BQHC

    sums = jax.tree.map(lambda array: vary_alike(jnp.zeros(array.shape, inside), q_BLHC)[0], (k_BLGC, v_BLGM))
    sums, dq_BLHC = scan_queries(block, sums, q_BLHC, ids_BLK, do_BLHM, block=_num_queries(ids_BLK, k_BLGC))
    return dq_BLHC, *jax.tree.map(lambda sum_, array: sum_.astype(array.dtype), sums, (k_BLGC, v_BLGM)), None, None


_gathered.defvjp(_save, _grads)


def gathers(ids_BLK) -> bool:
    """Are few enough keys chosen that gathering them costs less than looking at all?"""
    return ids_BLK.shape[1] > DENSE_KEYS * ids_BLK.shape[2]


def _num_queries(ids_BLK, k_BLGC):
    num_rows, length, num_chosen = ids_BLK.shape
    return num_queries(length, num_rows * num_chosen * k_BLGC.shape[2] * k_BLGC.shape[3])


def take(arrays, ids_BQK):
    row_B11 = jnp.arange(ids_BQK.shape[0])[:, None, None]
    return jax.tree.map(lambda array_BLGC: array_BLGC[row_B11, jnp.maximum(ids_BQK, 0)], arrays)


def _attend_each(q_BQHC, taken, allowed_BQK, scale, value_dim):
    k_BQKGC, v_BQKGM = taken
    v_BQKGM = k_BQKGC[..., :value_dim] if v_BQKGM is None else v_BQKGM
    probs_BQGNK = probs_of_each(q_BQHC, k_BQKGC, allowed_BQK, scale)
    o_BQGNM = jnp.einsum("BQGNK,BQKGM->BQGNM", probs_BQGNK, v_BQKGM.astype(probs_BQGNK.dtype))
    return o_BQGNM.reshape(*q_BQHC.shape[:3], -1).astype(q_BQHC.dtype)


def probs_of_each(q_BQHC, k_BQKGC, allowed_BQK, scale):
    """Softmax of each query over keys of its own, [B, Q, G, N, K]."""
    inside = jnp.promote_types(q_BQHC.dtype, jnp.float32)
    q_BQGNC = q_BQHC.reshape(*q_BQHC.shape[:2], k_BQKGC.shape[3], -1, q_BQHC.shape[3]).astype(inside)
    scores_BQGNK = scale * jnp.einsum("BQGNC,BQKGC->BQGNK", q_BQGNC, k_BQKGC.astype(inside))
    return masked_softmax(scores_BQGNK, allowed_BQK[:, :, None, None])
