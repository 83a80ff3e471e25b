"""Definition of the way to the routed rows and back."""

import jax.numpy as jnp


def permute(x_TD, plan):
    return jnp.where((plan.source_R >= 0)[:, None], x_TD[plan.source_R], 0)


def unpermute(y_RD, plan, probs_TK):
    inside = jnp.promote_types(y_RD.dtype, jnp.float32)
    kept_TK1 = (plan.slot_TK >= 0)[:, :, None]
    y_TKD = jnp.where(kept_TK1, y_RD[plan.slot_TK], 0).astype(inside)
    return jnp.sum(jnp.where(kept_TK1, probs_TK.astype(inside)[:, :, None], 0) * y_TKD, axis=1).astype(y_RD.dtype)
