"""Gated DeltaNet in chunks of 64 tokens, in Triton kernels."""

from moejax_kernels import delta_triton


def gated_delta(q_BLGC, k_BLGC, v_BLHM, g_BLH, beta_BLH, *, segments, initial_state_BHCM, scale):
    """As `reference.gated_delta`."""
    return delta_triton.delta_rule(
        q_BLGC, k_BLGC, v_BLHM, g_BLH, beta_BLH, segments=segments, initial_state_BHCM=initial_state_BHCM, scale=scale
    )
