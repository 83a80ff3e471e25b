"""Gated DeltaNet in chunks of 16 tokens, in plain XLA operations."""

import jax.numpy as jnp
import numpy as np

from moejax_kernels import delta_scan
from moejax_kernels.delta_chunks import AT, CAUSAL, CHUNK, Decays, Factors

# Which tokens' g add up: for the pair (i, j) those after j up to i, then from the chunk's start, then to its end.
PAIRS = (AT[:, None, None] >= AT) & (AT[None, :, None] < AT)
SUMS = np.concatenate([PAIRS.reshape(-1, CHUNK), CAUSAL, ~CAUSAL])


def gated_delta(q_BLGC, k_BLGC, v_BLHM, g_BLH, beta_BLH, *, segments, initial_state_BHCM, scale):
    """As `reference.gated_delta`."""
    return delta_scan.chunked(
        DECAYS,
        q_BLGC,
        k_BLGC,
        v_BLHM,
        g_BLH[..., None],
        beta_BLH,
        segments=segments,
        initial_state_BHCM=initial_state_BHCM,
        scale=scale,
    )


def factors(g_t1, borders) -> Factors:
    """A decay per head stands outside the sum over channels. Exponents are sums of g, never differences of sums."""
    del borders
    decay = jnp.exp(jnp.squeeze(g_t1, -1) @ jnp.asarray(SUMS.T, g_t1.dtype))
    pairs, from_start_t, to_end_t = jnp.split(decay, [CHUNK**2, CHUNK**2 + CHUNK], axis=-1)
    return Factors(from_start_t[..., None], to_end_t[..., None], pairs.reshape(*pairs.shape[:-1], CHUNK, CHUNK))


def pairs(factors: Factors, q_tC, k_tC):
    turned_Ct = k_tC.swapaxes(-1, -2)
    return k_tC @ turned_Ct * factors.of_pairs, q_tC @ turned_Ct * factors.of_pairs


def pair_grads(factors: Factors, q_tC, k_tC, dkk_tt, dqk_tt):
    dkk_tt, dqk_tt = dkk_tt * factors.of_pairs, dqk_tt * factors.of_pairs
    dk_later_tC, dk_earlier_tC = dkk_tt @ k_tC, dkk_tt.swapaxes(-1, -2) @ k_tC + dqk_tt.swapaxes(-1, -2) @ q_tC
    return dqk_tt @ k_tC, dk_later_tC + dk_earlier_tC, dk_later_tC - dk_earlier_tC


DECAYS = Decays(factors, pairs, pair_grads)
