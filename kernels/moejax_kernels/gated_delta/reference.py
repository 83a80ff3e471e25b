"""The definition of Gated DeltaNet's recurrence: one token after the other."""

from moejax_kernels import delta_reference


def gated_delta(q_BLGC, k_BLGC, v_BLHM, g_BLH, beta_BLH, *, segments=None, initial_state_BHCM=None, scale=None):
    """`S <- (I - beta k k') exp(g) S + beta k v'; o = scale S'q` per head."""
    return delta_reference.recurrence(
        q_BLGC, k_BLGC, v_BLHM, g_BLH[..., None], beta_BLH, segments=segments, initial_state_BHCM=initial_state_BHCM, scale=scale
    )
