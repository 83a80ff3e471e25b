"""KDA in chunks of 64 tokens, in Triton kernels."""

from moejax_kernels import delta_triton


def kda(q_BLGC, k_BLGC, v_BLHM, g_BLHC, beta_BLH, *, segments, initial_state_BHCM, scale, min_log_decay):
    """As `reference.kda`, for any g <= 0; min_log_decay only promises something about it."""
    del min_log_decay
    return delta_triton.delta_rule(
        q_BLGC, k_BLGC, v_BLHM, g_BLHC, beta_BLH, segments=segments, initial_state_BHCM=initial_state_BHCM, scale=scale
    )
