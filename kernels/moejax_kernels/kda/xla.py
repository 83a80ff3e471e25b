"""KDA in chunks of 16 tokens, in plain XLA operations."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax_kernels import delta_scan
from moejax_kernels.delta_chunks import CAUSAL, CHUNK, LEVELS, SPLIT, UPPER, Decays, Factors

FAST_FORM_LOG_DECAY = -5.0
"""8 steps of it are 40 nats: exp of both signs, and the product of two rows, stay inside float32."""
MIDDLE = CHUNK // 2


def kda(q_BLGC, k_BLGC, v_BLHM, g_BLHC, beta_BLH, *, segments, initial_state_BHCM, scale, min_log_decay):
    """As `reference.kda`. `min_log_decay >= -5` picks the cheaper way to the decays; a g below it then overflows."""
    fast = min_log_decay is not None and min_log_decay >= FAST_FORM_LOG_DECAY
    return delta_scan.chunked(
        BOUNDED if fast else ANY,
        q_BLGC,
        k_BLGC,
        v_BLHM,
        g_BLHC,
        beta_BLH,
        segments=segments,
        initial_state_BHCM=initial_state_BHCM,
        scale=scale,
    )


def bounded_factors(g_tC, borders) -> Factors:
    """Both factors of a pair are measured from the chunk's middle row."""
    sum_tC = borders.sums(g_tC, CAUSAL) @ g_tC
    middle_tC = jnp.where(borders.same_NB1tt[..., MIDDLE, :, None], sum_tC[..., MIDDLE : MIDDLE + 1, :], 0)
    to_end_tC = jnp.exp(jnp.where(borders.leaves_NB1t1, sum_tC[..., -1:, :] - sum_tC, 0))
    return Factors(jnp.exp(sum_tC), to_end_tC, (jnp.exp(sum_tC - middle_tC), jnp.exp(middle_tC - sum_tC)))


def bounded_pairs(factors: Factors, q_tC, k_tC):
    """One matmul for all pairs."""
    later_tC, earlier_tC = factors.of_pairs
    both_tC = jnp.concatenate([k_tC * later_tC, q_tC * later_tC], axis=-2)
    return tuple(jnp.split(both_tC @ _turned(k_tC * earlier_tC), 2, axis=-2))


def bounded_pair_grads(factors: Factors, q_tC, k_tC, dkk_tt, dqk_tt):
    later_tC, earlier_tC = factors.of_pairs
    dpairs = jnp.concatenate([dkk_tt, dqk_tt], axis=-2)
    dk_tC, dq_tC = jnp.split(dpairs @ (k_tC * earlier_tC), 2, axis=-2)
    both_tC = jnp.concatenate([k_tC * later_tC, q_tC * later_tC], axis=-2)
    dk_later_tC, dk_earlier_tC = dk_tC * later_tC, earlier_tC * (_turned(dpairs) @ both_tC)
    return dq_tC * later_tC, dk_later_tC + dk_earlier_tC, dk_later_tC - dk_earlier_tC


BOUNDED = Decays(bounded_factors, bounded_pairs, bounded_pair_grads)


def factors(g_tC, borders) -> Factors:
    """Right for any finite g <= 0: each level measures its pairs from the border between their halves, so that no factor exceeds 1.

    A factor is a product of exp(g) over the tokens between, built by doubling: nothing is divided, so that a strong decay costs no
    accuracy elsewhere. A prefix holds its own token's decay, a suffix does not; the last prefix of a half is the whole half's decay.
    """
    del borders
    prefix_tC, suffix_tC, levels = jnp.exp(g_tC), jnp.ones_like(g_tC), []
    for half in LEVELS:
        (low_prefix, up_prefix), (low_suffix, up_suffix) = _halves(prefix_tC, half), _halves(suffix_tC, half)
        levels.append((up_prefix, low_suffix))
        prefix_tC = _join(low_prefix, up_prefix * low_prefix[..., -1:, :])
        suffix_tC = _join(low_suffix * up_prefix[..., -1:, :], up_suffix)
    return Factors(prefix_tC, suffix_tC, levels)


def pairs(factors: Factors, q_tC, k_tC):
    every_tt = jnp.matmul(q_tC, _turned(k_tC), precision=lax.Precision.HIGHEST)  # for its diagonal: costs less than a sum over short rows
    itself_tt = jnp.where(np.eye(CHUNK, dtype=bool), every_tt, 0)
    both_2tt = jnp.stack([jnp.zeros_like(itself_tt), itself_tt], axis=-3)
    for half, decays in zip(LEVELS, factors.of_pairs, strict=True):
        upper_tC, lower_tC = _sides(q_tC, k_tC, decays, half)
        both_2tt += _place(upper_tC @ _turned(lower_tC), half)
    return both_2tt[..., 0, :, :], both_2tt[..., 1, :, :]


def pair_grads(factors: Factors, q_tC, k_tC, dkk_tt, dqk_tt):
    dboth_2tt = jnp.stack([dkk_tt, dqk_tt], axis=-3)
    dq_tC, dk_tC, dk_signed_tC = 0, 0, 0
    for half, (prefix, suffix) in zip(LEVELS, factors.of_pairs, strict=True):
        upper_tC, lower_tC = _sides(q_tC, k_tC, (prefix, suffix), half)
        dpairs = _pairs(dboth_2tt, half)
        dk_upper, dq_upper = (x_tC.reshape(prefix.shape) for x_tC in jnp.split(dpairs @ lower_tC, 2, axis=-2))
        dk_level_tC = _join((_turned(dpairs) @ upper_tC).reshape(suffix.shape) * suffix, dk_upper * prefix)
        dq_tC += _join(jnp.zeros_like(prefix), dq_upper * prefix)
        dk_tC += dk_level_tC
        dk_signed_tC += jnp.where(UPPER[half][:, None], dk_level_tC, -dk_level_tC)
    return dq_tC, dk_tC, dk_signed_tC


ANY = Decays(factors, pairs, pair_grads)


def _sides(q_tC, k_tC, decays, half: int):
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
    """Pairs [.., 8 of the upper halves' k and 8 of their q, 8 of the lower's k] at their places in [.., 2, t, t], zeros elsewhere."""
    num, lead = CHUNK // (2 * half), pairs.shape[:-2]
    mask = SPLIT[half].reshape(num, 2, half, num, 2, half)
    return jnp.where(mask, pairs.reshape(*lead, 2, num, 1, half, num, 1, half), 0).reshape(*lead, 2, CHUNK, CHUNK)


def _pairs(at_2tt, half: int):
    """The inverse of `_place`: a level's pairs, and zeros for those of two halves that are not beside each other."""
    num, lead = CHUNK // (2 * half), at_2tt.shape[:-3]
    own_2tt = jnp.where(SPLIT[half], at_2tt, 0).reshape(*lead, 2, num, 2, half, num, 2, half)
    return own_2tt[..., 1, :, :, 0, :].reshape(*lead, CHUNK, CHUNK // 2)


def _turned(x):
    return x.swapaxes(-1, -2)
