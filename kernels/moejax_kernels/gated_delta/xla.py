"""Gated DeltaNet in chunks of 16 tokens, in plain XLA operations."""

import jax.numpy as jnp
import numpy as np

from moejax_kernels import delta_scan
from moejax_kernels.delta_chunks import AT, CAUSAL, CHUNK

# Which tokens' g add up: for the pair (i, j) those after j up to i, then from the chunk's start, then to its end.
PAIRS = (AT[:, None, None] >= AT) & (AT[None, :, None] < AT)
SUMS = np.concatenate([PAIRS.reshape(-1, CHUNK), CAUSAL, ~CAUSAL])


def gated_delta(q_BLGC, k_BLGC, v_BLHM, g_BLH, beta_BLH, *, segments, initial_state_BHCM, scale):
    """As `reference.gated_delta`."""
    return delta_scan.chunked(
        decays,
        q_BLGC,
        k_BLGC,
        v_BLHM,
        g_BLH[..., None],
        beta_BLH,
        segments=segments,
        initial_state_BHCM=initial_state_BHCM,
        scale=scale,
    )


def decays(q_tC, k_tC, g_t1, borders):
    """A decay per head stands outside the sum over channels. Exponents are sums of g, never differences of sums."""
    del borders
    decay = jnp.exp(jnp.squeeze(g_t1, -1) @ jnp.asarray(SUMS.T, g_t1.dtype))
    pairs, from_start_t, to_end_t = jnp.split(decay, [CHUNK**2, CHUNK**2 + CHUNK], axis=-1)
    decay_tt = pairs.reshape(*pairs.shape[:-1], CHUNK, CHUNK)
    turned_Ct = k_tC.swapaxes(-1, -2)
    return k_tC @ turned_Ct * decay_tt, q_tC @ turned_Ct * decay_tt, from_start_t[..., None], to_end_t[..., None]
