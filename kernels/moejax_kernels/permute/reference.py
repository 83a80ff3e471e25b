"""Definition of the way to the routed rows and back."""

import jax.numpy as jnp


def permute(x_TD, plan):
    return _rows(x_TD, plan.source_R)


def unpermute(y_RD, plan, probs_TK):
    inside = jnp.promote_types(y_RD.dtype, jnp.float32)
    probs_TK1 = jnp.where(plan.slot_TK >= 0, probs_TK, 0).astype(inside)[:, :, None]
    return jnp.sum(probs_TK1 * _rows(y_RD, plan.slot_TK).astype(inside), axis=1).astype(y_RD.dtype)


def _rows(array_RD, at):
    """Rows by number; -1 is a row of zeros."""
    return jnp.concatenate([jnp.zeros_like(array_RD, shape=(1, array_RD.shape[1])), array_RD])[at + 1]
