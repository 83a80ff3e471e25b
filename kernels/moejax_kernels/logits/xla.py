"""Logits by one matmul in the inputs' dtype with float32 accumulation; XLA fuses what is made of them."""

import jax.numpy as jnp

from moejax_kernels.logits import reference


def logits(hidden_TD, weight_DV, *, logit_cap):
    """[..., V] at least float32, soft-capped."""
    wide = jnp.promote_types(hidden_TD.dtype, jnp.float32)
    return reference.capped(jnp.einsum("...d,dv->...v", hidden_TD, weight_DV, preferred_element_type=wide), logit_cap)


def logit_sums(hidden_TD, weight_DV, targets_T, skip, *, logit_cap):
    logits_TV = logits(hidden_TD, weight_DV, logit_cap=logit_cap)
    counted_T = (targets_T >= (0 if skip is None else skip)) & (targets_T < logits_TV.shape[-1])
    at_T1 = jnp.where(counted_T, targets_T, 0)[..., None]
    target_T = jnp.where(counted_T, jnp.take_along_axis(logits_TV, at_T1, -1)[..., 0], 0)
    return reference.sums_of(logits_TV, targets_T, skip)._replace(target_T=target_T)  # a gather for the masked sum over all columns


def logit_gradients(hidden_TD, weight_DV, targets_T, lse_T, slope_T, weights_T, skip, *, logit_cap):
    logits_TV = logits(hidden_TD, weight_DV, logit_cap=logit_cap)
    return reference.gradients_of(logits_TV, targets_T, lse_T, slope_T, weights_T, skip, logit_cap=logit_cap).astype(hidden_TD.dtype)
