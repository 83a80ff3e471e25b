"""A context shard's effect on the recurrent state, which is affine: the op itself, run from the identity beside the zero state."""

import jax
import jax.numpy as jnp

from moejax_kernels import delta_inputs


def summary(run, k_BLGC, v_BLHM, g, beta_BLH, *, segments, **options):
    """(transition_BHCC, state_BHCM). C value channels of nothing are appended, and the state that enters them is the identity."""
    dtype = delta_inputs.inside(k_BLGC, v_BLHM, g, beta_BLH)
    (B, L, H, M), C = v_BLHM.shape, k_BLGC.shape[3]
    none_BLHC, nothing_BHCM = jnp.zeros((B, L, H, C), v_BLHM.dtype), jnp.zeros((B, H, C, M), dtype)
    enters = jnp.concatenate([jnp.broadcast_to(jnp.eye(C, dtype=dtype), (B, H, C, C)), nothing_BHCM], axis=-1)
    v = jnp.concatenate([none_BLHC, v_BLHM], axis=-1)
    _, leaves = run(jnp.zeros_like(k_BLGC), k_BLGC, v, g, beta_BLH, segments=segments, initial_state_BHCM=enters, scale=1.0, **options)
    return leaves[..., :C], leaves[..., C:]


def why_not_triton(k_BLGC, v_BLHM, g, beta_BLH) -> str | None:
    """Why the Triton kernels cannot run `summary`, as the end of a sentence; None if they can."""
    value_dim = v_BLHM.shape[3] + k_BLGC.shape[3]
    wider = jax.ShapeDtypeStruct((*v_BLHM.shape[:3], value_dim), v_BLHM.dtype)
    return delta_inputs.why_not_triton(k_BLGC, k_BLGC, wider, g, beta_BLH)
