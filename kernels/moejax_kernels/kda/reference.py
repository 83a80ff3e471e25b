"""The definition of KDA (Kimi Delta Attention): one token after the other."""

from moejax_kernels import delta_reference


def kda(q_BLGC, k_BLGC, v_BLHM, g_BLHC, beta_BLH, *, segments=None, initial_state_BHCM=None, scale=None, min_log_decay=None):
    """`S <- (I - beta k k') diag(exp g) S + beta k v'; o = scale S'q` per head. min_log_decay only promises something about g."""
    del min_log_decay
    return delta_reference.recurrence(
        q_BLGC, k_BLGC, v_BLHM, g_BLHC, beta_BLH, segments=segments, initial_state_BHCM=initial_state_BHCM, scale=scale
    )
