"""Definitions of the gated activations."""

import jax
import jax.numpy as jnp


def gated_activation(gate_RF, up_RF, *, kind, limit, beta, linear_beta):
    inside = jnp.promote_types(gate_RF.dtype, jnp.float32)
    gate, up = gate_RF.astype(inside), up_RF.astype(inside)
    if kind == "situ":
        up = linear_beta * jnp.tanh(up / linear_beta) if linear_beta else up
        return (beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * up).astype(gate_RF.dtype)
    if kind == "swiglu_clamped":
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (jax.nn.silu(gate) * up).astype(gate_RF.dtype)
