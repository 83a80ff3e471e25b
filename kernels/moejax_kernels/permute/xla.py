"""The way to the routed rows and back, as gathers in both directions: neither pass nor its transpose scatters."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def permute(x_TD, plan):
    return _rows(x_TD, plan.source_R)


def _permute_save(x_TD, plan):
    return permute(x_TD, plan), plan


def _permute_grads(plan, dx_RD):
    return _weighted_rows(dx_RD, plan, None), None


permute.defvjp(_permute_save, _permute_grads)


@jax.custom_vjp
def unpermute(y_RD, plan, probs_TK):
    return _weighted_rows(y_RD, plan, probs_TK)


def _unpermute_save(y_RD, plan, probs_TK):
    return unpermute(y_RD, plan, probs_TK), (y_RD, plan, probs_TK)


def _unpermute_grads(saved, dy_TD):
    y_RD, plan, probs_TK = saved
    if 0 in (*y_RD.shape, *dy_TD.shape):
        return jnp.zeros_like(y_RD), None, jnp.zeros_like(probs_TK)
    inside = jnp.promote_types(y_RD.dtype, jnp.float32)
    source_R1, row_R1 = plan.source_R[:, None], jnp.arange(y_RD.shape[0])[:, None]
    mine_RK = (source_R1 >= 0) & (plan.slot_TK[plan.source_R] == row_R1)
    prob_R1 = jnp.sum(jnp.where(mine_RK, probs_TK[plan.source_R], 0), axis=1, keepdims=True).astype(inside)
    dy_RD = _rows(dy_TD, plan.source_R).astype(inside)  # before its weight
    dprob_R1 = jnp.sum(y_RD.astype(inside) * dy_RD, axis=1, keepdims=True)
    dprobs_TK = _rows(dprob_R1, plan.slot_TK.reshape(-1)).reshape(plan.slot_TK.shape)
    return (prob_R1 * dy_RD).astype(y_RD.dtype), None, dprobs_TK.astype(probs_TK.dtype)


unpermute.defvjp(_unpermute_save, _unpermute_grads)


def _rows(array_RD, at_N):
    """Zeros where at_N is negative: of no rows at all nothing could be gathered."""
    if array_RD.shape[0] == 0:
        return jnp.zeros((at_N.shape[0], array_RD.shape[1]), array_RD.dtype)
    return jnp.where((at_N >= 0)[:, None], array_RD[at_N], 0)


def _weighted_rows(y_RD, plan, probs_TK):
    """Sum over K, one gather at a time: [T, K, D] never exists."""
    inside = jnp.promote_types(y_RD.dtype, jnp.float32)
    total_TD = jnp.zeros((plan.slot_TK.shape[0], y_RD.shape[1]), inside)
    for k in range(plan.slot_TK.shape[1]):
        slot_T = plan.slot_TK[:, k]
        y_TD = _rows(y_RD, slot_T).astype(inside)
        total_TD += y_TD if probs_TK is None else jnp.where(slot_T < 0, 0, probs_TK[:, k])[:, None].astype(inside) * y_TD
    return total_TD.astype(y_RD.dtype)
