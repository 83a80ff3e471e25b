"""Attention over blocks of queries. Saves its inputs, its output and one number per query and head; backward redoes the scores."""

import functools

import jax
import jax.numpy as jnp

from moejax_kernels.attention.blocks import num_queries, scan_queries
from moejax_kernels.attention.visibility import chosen, visible
from moejax_kernels.grouped_matmul.varying import vary_alike

MIN_WINDOW_QUERIES = 64
"""Queries of one block at least where a window is shorter: they share most of their keys."""


def attention(q_BLHC, k_BLGC, v_BLGM, *, scale, segments=None, window=None, sinks_H=None):
    return masked_attention(q_BLHC, k_BLGC, v_BLGM, None, sinks_H, segments, scale=scale, window=window)


def masked_attention(q_BLHC, k_BLGC, v_BLGM, ids_BLK, sinks_H, segments, *, scale, window=None):
    """Attention over the visible keys, and of those only the ones that ids_BLK names unless it is None."""
    return _attend(*vary_alike(q_BLHC, k_BLGC, v_BLGM, ids_BLK, sinks_H, segments), scale, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(q_BLHC, k_BLGC, v_BLGM, ids_BLK, sinks_H, segments, scale, window):
    return _save(q_BLHC, k_BLGC, v_BLGM, ids_BLK, sinks_H, segments, scale, window)[0]


def _save(q_BLHC, k_BLGC, v_BLGM, ids_BLK, sinks_H, segments, scale, window):
    block, num_keys = _sizes(q_BLHC, segments, window)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.promote_types(q_BLHC.dtype, jnp.float32))

    def forward(_, query_Q, q_BQHC, ids_BQK):
        key_K, allowed_BQK = _keys(query_Q, num_keys, ids_BQK, q_BLHC.shape[1], segments, window)
        scores_BGQNK = _scores(dot, q_BQHC, _slice(k_BLGC, key_K), allowed_BQK, scale)
        peak_BGQN = jnp.max(scores_BGQNK, axis=-1)
        if sinks_H is not None:
            sinks_G1N = _grouped(sinks_H[None, None], k_BLGC).astype(peak_BGQN.dtype)[0].swapaxes(0, 1)
            peak_BGQN = jnp.maximum(peak_BGQN, sinks_G1N)
        peak_BGQN = jnp.where(jnp.isfinite(peak_BGQN), peak_BGQN, 0)
        weights_BGQNK = jnp.exp(scores_BGQNK - peak_BGQN[..., None])
        total_BGQN = jnp.sum(weights_BGQNK, axis=-1)
        if sinks_H is not None:
            total_BGQN += jnp.exp(sinks_G1N - peak_BGQN)
        total_BGQN = jnp.where(total_BGQN > 0, total_BGQN, 1)  # a query that sees nothing
        o_BGQNM = dot("BGQNK,BKGM->BGQNM", weights_BGQNK.astype(v_BLGM.dtype), _slice(v_BLGM, key_K)) / total_BGQN[..., None]
        return None, (_heads(o_BGQNM).astype(q_BLHC.dtype), _heads(peak_BGQN + jnp.log(total_BGQN)))

    _, (o_BLHM, log_total_BLH) = scan_queries(forward, None, q_BLHC, ids_BLK, block=block)
    return o_BLHM, (q_BLHC, k_BLGC, v_BLGM, ids_BLK, sinks_H, segments, o_BLHM, log_total_BLH)


def _grads(scale, window, saved, do_BLHM):
    q_BLHC, k_BLGC, v_BLGM, ids_BLK, sinks_H, segments, o_BLHM, log_total_BLH = saved
    block, num_keys = _sizes(q_BLHC, segments, window)
    inside = log_total_BLH.dtype
    dot = functools.partial(jnp.einsum, preferred_element_type=inside)
    delta_BLH = jnp.sum(do_BLHM.astype(inside) * o_BLHM.astype(inside), axis=-1)

    def backward(sums, query_Q, q_BQHC, ids_BQK, do_BQHM, delta_BQH, log_total_BQH):
        dk_BLGC, dv_BLGM = sums
        key_K, allowed_BQK = _keys(query_Q, num_keys, ids_BQK, q_BLHC.shape[1], segments, window)
        k_BKGC, v_BKGM = _slice(k_BLGC, key_K), _slice(v_BLGM, key_K)
        q_BQGNC, do_BQGNM, delta_BQGN, log_total_BQGN = (_grouped(array, k_BLGC) for array in (q_BQHC, do_BQHM, delta_BQH, log_total_BQH))
        as_column = lambda array_BQGN: array_BQGN.swapaxes(1, 2)[..., None]
        probs_BGQNK = jnp.exp(_scores(dot, q_BQHC, k_BKGC, allowed_BQK, scale) - as_column(log_total_BQGN))
        dprobs_BGQNK = dot("BQGNM,BKGM->BGQNK", do_BQGNM, v_BKGM)
        dscores_BGQNK = (scale * probs_BGQNK * (dprobs_BGQNK - as_column(delta_BQGN))).astype(q_BLHC.dtype)
        dq_BGQNC = dot("BGQNK,BKGC->BGQNC", dscores_BGQNK, k_BKGC)
        # the small operand comes first: its transpose, not that of the scores, is what the product needs
        dk_BGCK = dot("BQGNC,BGQNK->BGCK", q_BQGNC, dscores_BGQNK)
        dv_BGMK = dot("BQGNM,BGQNK->BGMK", do_BQGNM, probs_BGQNK.astype(do_BLHM.dtype))
        sums = _add(dk_BLGC, dk_BGCK, key_K), _add(dv_BLGM, dv_BGMK, key_K)
        return sums, _heads(dq_BGQNC).astype(q_BLHC.dtype)

    zeros = vary_alike(jnp.zeros(k_BLGC.shape, inside), jnp.zeros(v_BLGM.shape, inside), do_BLHM)[:2]
    (dk_BLGC, dv_BLGM), dq_BLHC = scan_queries(backward, zeros, q_BLHC, ids_BLK, do_BLHM, delta_BLH, log_total_BLH, block=block)
    dsinks_H = None
    if sinks_H is not None:
        dsinks_H = -jnp.sum(jnp.exp(sinks_H.astype(inside) - log_total_BLH) * delta_BLH, axis=(0, 1)).astype(sinks_H.dtype)
    return dq_BLHC, dk_BLGC.astype(k_BLGC.dtype), dv_BLGM.astype(v_BLGM.dtype), None, dsinks_H, None


_attend.defvjp(_save, _grads)


def _sizes(q_BLHC, segments, window) -> tuple[int, int]:
    """Queries of one block, and keys that they may see."""
    num_rows, length, num_heads, _ = q_BLHC.shape
    if window is None or (segments is not None and segments.ancestor_BUU is not None):  # in a tree the parent may lie far to the left
        return num_queries(length, num_rows * num_heads * length), length
    block = min(num_queries(length, num_rows * num_heads * min(length, 2 * window)), max(window, MIN_WINDOW_QUERIES))
    return block, min(length, block + window - 1)


def _keys(query_Q, num_keys, ids_BQK, length, segments, window):
    """Positions of the keys that a block looks at, and which query may see which: [1 or B, Q, keys]."""
    start = jnp.clip(query_Q[-1] + 1 - num_keys, 0, length - num_keys)
    key_K = start + jnp.arange(num_keys, dtype=jnp.int32)
    allowed_BQK = visible(segments, query_Q, key_K, window=window)
    if ids_BQK is None:
        return key_K, allowed_BQK
    return key_K, allowed_BQK & jax.lax.dynamic_slice_in_dim(chosen(ids_BQK, length), start, num_keys, axis=2)


def _scores(dot, q_BQHC, k_BKGC, allowed_BQK, scale):
    scores_BGQNK = scale * dot("BQGNC,BKGC->BGQNK", _grouped(q_BQHC, k_BKGC), k_BKGC)
    return jnp.where(allowed_BQK[:, None, :, None], scores_BGQNK, -jnp.inf)  # exp makes an exact 0 of it


def _slice(array_BLGC, key_K):
    return jax.lax.dynamic_slice_in_dim(array_BLGC, key_K[0], key_K.size, axis=1)


def _add(sum_BLGC, d_BGCK, key_K):
    d_BKGC = jnp.moveaxis(d_BGCK, 3, 1) + _slice(sum_BLGC, key_K)
    return jax.lax.dynamic_update_slice_in_dim(sum_BLGC, d_BKGC, key_K[0], axis=1)


def _grouped(array_BQH, k_BLGC):
    """[B, Q, H, ...] -> [B, Q, G, N, ...]: N query heads share a key head."""
    num_key_heads = k_BLGC.shape[2]
    return array_BQH.reshape(*array_BQH.shape[:2], num_key_heads, array_BQH.shape[2] // num_key_heads, *array_BQH.shape[3:])


def _heads(array_BGQN):
    """[B, G, Q, N, ...] -> [B, Q, H, ...]."""
    array_BQGN = array_BGQN.swapaxes(1, 2)
    return array_BQGN.reshape(*array_BQGN.shape[:2], -1, *array_BQGN.shape[4:])
