"""KDA in chunks of 16 tokens, in plain XLA operations."""

import jax.numpy as jnp
import numpy as np

from moejax_kernels import delta_scan
from moejax_kernels.delta_chunks import AT, CAUSAL, CHUNK, LEVELS, SPLIT, UPPER

FAST_FORM_LOG_DECAY = -5.0
"""8 steps of it are 40 nats: exp of both signs, and the product of two rows, stay inside float32."""
MIDDLE = CHUNK // 2

# Which tokens' g add up, [to this row, from that one]: to a half's border, from the chunk's start, to the chunk's end.
TO_SPLIT = {
    half: np.where(
        UPPER[half][:, None], CAUSAL & (AT[:, None] // half == AT[None] // half), ~CAUSAL & (AT[:, None] // half == AT[None] // half)
    )
    for half in LEVELS
}
SUMS = np.concatenate([*TO_SPLIT.values(), CAUSAL, ~CAUSAL])


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

    Every exponent is a sum of g, never a difference of sums: a strong decay costs no accuracy elsewhere.
    """
    del borders
    sums_tt = jnp.broadcast_to(jnp.asarray(SUMS, g_tC.dtype), (*g_tC.shape[:3], *SUMS.shape))
    *levels, from_start_tC, to_end_tC = jnp.split(jnp.exp(sums_tt @ g_tC), len(LEVELS) + 2, axis=-2)
    kk_tt, qk_tt = 0, jnp.where(np.eye(CHUNK, dtype=bool), (q_tC * k_tC).sum(-1, keepdims=True), 0)
    for half, decay_tC in zip(LEVELS, levels, strict=True):
        upper_tC = _halves(decay_tC, half, 1)
        both_tC = jnp.concatenate([_halves(k_tC, half, 1) * upper_tC, _halves(q_tC, half, 1) * upper_tC], axis=-2)
        pairs_tt = both_tC @ (_halves(k_tC, half, 0) * _halves(decay_tC, half, 0)).swapaxes(-1, -2)
        kk, qk = jnp.split(pairs_tt, 2, axis=-2)
        kk_tt, qk_tt = kk_tt + _place(kk, half), qk_tt + _place(qk, half)
    return kk_tt, qk_tt, from_start_tC, to_end_tC


def _halves(x_tC, half: int, upper: int):
    """The 8 tokens of a chunk's lower or upper halves."""
    *lead, t, C = x_tC.shape
    return x_tC.reshape(*lead, t // (2 * half), 2, half, C)[..., upper, :, :].reshape(*lead, t // 2, C)


def _place(pairs, half: int):
    """Pairs [.., 8 of the upper halves, 8 of the lower] at their places in [.., t, t], zeros elsewhere."""
    *lead, rows, _ = pairs.shape
    num = rows // half
    mask = SPLIT[half].reshape(num, 2, half, num, 2, half)
    return jnp.where(mask, pairs.reshape(*lead, num, 1, half, num, 1, half), 0).reshape(*lead, CHUNK, CHUNK)
