"""The gated delta rule token by token: the definition that KDA and GDN share (formulas: Yang et al. 2024, Kimi Linear 2025)."""

import jax.numpy as jnp
from jax import lax

from moejax_kernels import delta_inputs
from moejax_kernels.segments import Segments


def recurrence(q_BLGC, k_BLGC, v_BLHM, g_BLHc, beta_BLH, *, segments: Segments | None, initial_state_BHCM, scale):
    """`S <- exp(g) S; S <- S + beta k (v - S'k)'; o = scale S'q`, with c = C (a decay per channel) or 1 (per head)."""
    B, L = beta_BLH.shape[:2]
    dtype = v_BLHM.dtype
    segments = Segments.whole(B, L) if segments is None else segments
    q_BLHC, k_BLHC, v_BLHM, g_BLHc, beta_BLH, state_BHCM = delta_inputs.widen(
        q_BLGC, k_BLGC, v_BLHM, g_BLHc, beta_BLH, initial_state_BHCM, scale=scale
    )
    inputs = delta_inputs.clear_padding(segments, (q_BLHC, k_BLHC, v_BLHM, g_BLHc, beta_BLH))
    real_BL, previous_BL = jnp.asarray(segments.ids_BL) >= 0, jnp.asarray(segments.previous_BL)
    is_tree = segments.index_BL is not None
    ends_BPHCM = jnp.zeros((B, L, *state_BHCM.shape[1:]), state_BHCM.dtype) if is_tree else None

    def step(carry, at_L):
        state_BHCM, ends_BPHCM = carry
        at, real_B, previous_B, q_BHC, k_BHC, v_BHM, g_BHc, beta_BH = at_L
        if is_tree:  # the state after the parent's last token; of a token inside its segment, the state after the one to the left
            parent_BHCM = jnp.take_along_axis(ends_BPHCM, jnp.maximum(previous_B, 0)[:, None, None, None, None], axis=1)[:, 0]
            state_BHCM = jnp.where((real_B & (previous_B >= 0))[:, None, None, None], parent_BHCM, state_BHCM)
        starts_B = real_B & (previous_B < 0) & (at > 0)
        state_BHCM = jnp.where(starts_B[:, None, None, None], 0, state_BHCM)
        state_BHCM = jnp.exp(g_BHc)[..., None] * state_BHCM
        error_BHM = v_BHM - jnp.einsum("bhcm,bhc->bhm", state_BHCM, k_BHC)
        state_BHCM = state_BHCM + (beta_BH[..., None] * k_BHC)[..., None] * error_BHM[:, :, None, :]
        if is_tree:
            ends_BPHCM = ends_BPHCM.at[:, at].set(state_BHCM)
        return (state_BHCM, ends_BPHCM), jnp.einsum("bhcm,bhc->bhm", state_BHCM, q_BHC)

    by_token = [jnp.moveaxis(x, 1, 0) for x in (real_BL, previous_BL, *inputs)]
    (state_BHCM, _), o_LBHM = lax.scan(step, (state_BHCM, ends_BPHCM), (jnp.arange(L), *by_token))
    return jnp.moveaxis(o_LBHM, 0, 1).astype(dtype), state_BHCM
