"""KDA in chunks of 16 tokens, in plain XLA operations."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax_kernels import delta_scan
from moejax_kernels.delta_chunks import CAUSAL, CHUNK, LEVELS, SPLIT

FAST_FORM_LOG_DECAY = -5.0
"""8 steps of it are 40 nats: exp of both signs, and the product of two rows, stay inside float32."""
MIDDLE = CHUNK // 2


def kda(q_BLGC, k_BLGC, v_BLHM, g_BLHC, beta_BLH, *, segments, initial_state_BHCM, scale, min_log_decay):
    """As `reference.kda`. `min_log_decay >= -5` picks the cheaper way to the decays; a g below it then overflows."""
    fast = min_log_decay is not None and min_log_decay >= FAST_FORM_LOG_DECAY
    return delta_scan.chunked(
        bounded_decays if fast else any_decays,
        q_BLGC,
        k_BLGC,
        v_BLHM,
        g_BLHC,
        beta_BLH,
        segments=segments,
        initial_state_BHCM=initial_state_BHCM,
        scale=scale,
    )


def bounded_decays(q_tC, k_tC, g_tC, borders):
    """One matmul for all pairs: both factors are measured from the chunk's middle row.

    Sums begin anew at each document, so that the rounding of one document knows nothing of another.
    """
    sum_tt = jnp.where(borders.same_NB1tt & CAUSAL, jnp.ones((), g_tC.dtype), 0)
    sum_tC = jnp.broadcast_to(sum_tt, (*g_tC.shape[:3], CHUNK, CHUNK)) @ g_tC
    middle_tC = jnp.where(borders.same_NB1tt[..., MIDDLE, :, None], sum_tC[..., MIDDLE : MIDDLE + 1, :], 0)
    up_tC = jnp.exp(sum_tC - middle_tC)
    down_Ct = (k_tC * jnp.exp(middle_tC - sum_tC)).swapaxes(-1, -2)
    to_end_tC = jnp.exp(jnp.where(borders.leaves_NB1t1, sum_tC[..., -1:, :] - sum_tC, 0))
    return (k_tC * up_tC) @ down_Ct, (q_tC * up_tC) @ down_Ct, jnp.exp(sum_tC), to_end_tC


def any_decays(q_tC, k_tC, g_tC, borders):
    """Right for any finite g <= 0: each level measures its pairs from the border between their halves, so that no factor exceeds 1.

    A factor is a product of exp(g) over the tokens between, built by doubling: nothing is divided, so that a strong decay costs no
    accuracy elsewhere.
    """
    del borders
    return _any_decays(q_tC, k_tC, g_tC)


@jax.custom_vjp
def _any_decays(q_tC, k_tC, g_tC):
    return _save_decays(q_tC, k_tC, g_tC)[0]


def _save_decays(q_tC, k_tC, g_tC):
    levels, from_start_tC, to_end_tC = _products(jnp.exp(g_tC))
    kk_tt, qk_tt = 0, jnp.where(np.eye(CHUNK, dtype=bool), (q_tC * k_tC).sum(-1, keepdims=True), 0)
    for half, decays in zip(LEVELS, levels, strict=True):
        both_tC, lower_tC = _factors(q_tC, k_tC, decays, half)
        kk, qk = jnp.split(both_tC @ lower_tC.swapaxes(-1, -2), 2, axis=-2)
        kk_tt, qk_tt = kk_tt + _place(kk, half), qk_tt + _place(qk, half)
    return (kk_tt, qk_tt, from_start_tC, to_end_tC), (q_tC, k_tC, levels, from_start_tC, to_end_tC)


def _decay_grads(saved, cotangents):
    """Of a factor's logarithm first: all g that the factor holds share that gradient, and only sums are left."""
    q_tC, k_tC, levels, from_start_tC, to_end_tC = saved
    dkk_tt, dqk_tt, dfrom_start_tC, dto_end_tC = cotangents
    diagonal_t1 = jnp.where(np.eye(CHUNK, dtype=bool), dqk_tt, 0).sum(-1, keepdims=True)
    dq_tC, dk_tC = diagonal_t1 * k_tC, diagonal_t1 * q_tC
    dprefix_tC, dsuffix_tC = dfrom_start_tC * from_start_tC, dto_end_tC * to_end_tC
    for half, decays in reversed(list(zip(LEVELS, levels, strict=True))):
        prefix, suffix = decays
        both_tC, lower_tC = _factors(q_tC, k_tC, decays, half)
        dpairs = jnp.concatenate([_pairs(dkk_tt, half), _pairs(dqk_tt, half)], axis=-2)
        dboth_tC, dlower_tC = dpairs @ lower_tC, dpairs.swapaxes(-1, -2) @ both_tC
        dk_upper, dq_upper, dk_log, dq_log = (
            x_tC.reshape(prefix.shape) for both in (dboth_tC, dboth_tC * both_tC) for x_tC in jnp.split(both, 2, axis=-2)
        )
        dk_lower, dlower_log = (x_tC.reshape(suffix.shape) for x_tC in (dlower_tC, dlower_tC * lower_tC))
        dq_tC += _join(jnp.zeros_like(dq_upper), dq_upper * prefix)
        dk_tC += _join(dk_lower * suffix, dk_upper * prefix)

        (low_prefix, up_prefix), (low_suffix, up_suffix) = _halves(dprefix_tC, half), _halves(dsuffix_tC, half)
        is_last = np.arange(half)[:, None] == half - 1
        low_whole, up_whole = (jnp.where(is_last, x.sum(-2, keepdims=True), 0) for x in (up_prefix, low_suffix))
        dprefix_tC = _join(low_prefix + low_whole, up_prefix + up_whole + dk_log + dq_log)
        dsuffix_tC = _join(low_suffix + dlower_log, up_suffix)
    return dq_tC, dk_tC, dprefix_tC


_any_decays.defvjp(_save_decays, _decay_grads)


def _products(decay_tC):
    """Per level the decays of the upper halves' tokens from their border and of the lower halves' to it; then those of the chunk.

    A prefix holds its own token's decay, a suffix does not; the last prefix of a half is the whole half's decay.
    """
    prefix_tC, suffix_tC, levels = decay_tC, jnp.ones_like(decay_tC), []
    for half in LEVELS:
        (low_prefix, up_prefix), (low_suffix, up_suffix) = _halves(prefix_tC, half), _halves(suffix_tC, half)
        levels.append((up_prefix, low_suffix))
        prefix_tC = _join(low_prefix, up_prefix * low_prefix[..., -1:, :])
        suffix_tC = _join(low_suffix * up_prefix[..., -1:, :], up_suffix)
    return levels, prefix_tC, suffix_tC


def _factors(q_tC, k_tC, decays, half: int):
    """Both sides of a level's pairs: k above q of the upper halves' 8 tokens, k of the lower halves'."""
    prefix, suffix = decays
    (low_k, up_k), (_, up_q) = _halves(k_tC, half), _halves(q_tC, half)
    flat = lambda x: x.reshape(*x.shape[:-3], CHUNK // 2, x.shape[-1])
    return jnp.concatenate([flat(up_k * prefix), flat(up_q * prefix)], axis=-2), flat(low_k * suffix)


def _halves(x_tC, half: int):
    """A chunk's lower and upper halves, [.., halves, half, C] each."""
    *lead, t, C = x_tC.shape
    x = x_tC.reshape(*lead, t // (2 * half), 2, half, C)
    return x[..., 0, :, :], x[..., 1, :, :]


def _join(lower, upper):
    """The chunk of its halves."""
    *lead, num, half, C = lower.shape
    return jnp.stack([lower, upper], axis=-3).reshape(*lead, 2 * num * half, C)


def _place(pairs, half: int):
    """Pairs [.., 8 of the upper halves, 8 of the lower] at their places in [.., t, t], zeros elsewhere."""
    num = CHUNK // (2 * half)
    mask = SPLIT[half].reshape(num, 2, half, num, 2, half)
    return jnp.where(mask, pairs.reshape(*pairs.shape[:-2], num, 1, half, num, 1, half), 0).reshape(*pairs.shape[:-2], CHUNK, CHUNK)


def _pairs(at_tt, half: int):
    """A level's pairs [.., 8 of the upper halves, 8 of the lower] from [.., t, t]."""
    num = CHUNK // (2 * half)
    own_tt = jnp.where(SPLIT[half], at_tt, 0).reshape(*at_tt.shape[:-2], num, 2, half, num, 2, half)
    return own_tt[..., :, 1, :, :, 0, :].reshape(*at_tt.shape[:-2], CHUNK // 2, CHUNK // 2)
