"""The short convolution as four shifted products, in plain XLA operations."""

import jax.numpy as jnp

from moejax_kernels.causal_conv.reference import ACTIVATIONS, TAPS
from moejax_kernels.implementation import UnsupportedError


def causal_conv(x_BLD, weight_D4, *, segments=None, history_B3D=None, activation="silu"):
    """As `reference.causal_conv`."""
    if segments is not None and segments.index_BL is not None:
        raise UnsupportedError(
            "causal_conv: implementation='xla' takes packed documents, not segments with parents. "
            "Pass implementation='reference', or build the segments without parent."
        )
    B, L, D = x_BLD.shape
    dtype = jnp.promote_types(jnp.result_type(x_BLD, weight_D4), jnp.float32)
    weight_D4 = weight_D4.astype(dtype)
    history_B3D = jnp.zeros((B, TAPS - 1, D), x_BLD.dtype) if history_B3D is None else history_B3D.astype(x_BLD.dtype)
    tape_BPD = jnp.concatenate([history_B3D, x_BLD], axis=1)  # position t of the row stands at t + 3
    at_L = jnp.arange(L)
    sum_BLD = jnp.zeros((), dtype)
    for n in range(TAPS):
        tap_BLD = tape_BPD[:, TAPS - 1 - n : TAPS - 1 - n + L].astype(dtype)
        if segments is not None:
            tap_BLD = jnp.where(_reaches(segments.starts_BL, at_L, n)[..., None], tap_BLD, 0)
        sum_BLD += weight_D4[:, TAPS - 1 - n] * tap_BLD
    y_BLD = ACTIVATIONS[activation](sum_BLD).astype(x_BLD.dtype)
    if segments is not None:
        y_BLD = jnp.where(jnp.asarray(segments.ids_BL)[..., None] >= 0, y_BLD, 0)
    return y_BLD, history_after(x_BLD, history_B3D, segments)


def history_after(x_BLD, history_B3D, segments):
    """Inputs of the row's last three tokens that are not padding, 0 where one is not of the last one's document."""
    B, L, D = x_BLD.shape
    history_B3D = jnp.zeros((B, TAPS - 1, D), x_BLD.dtype) if history_B3D is None else history_B3D
    tape_BPD = jnp.concatenate([history_B3D, x_BLD], axis=1)  # position t of the row stands at t + 3
    if segments is None:
        return tape_BPD[:, L:]
    at_L, real_BL = jnp.arange(L), jnp.asarray(segments.ids_BL) >= 0
    last_B1 = jnp.where(real_BL, at_L, -1).max(axis=1, keepdims=True)
    start_B1 = jnp.where(last_B1 < 0, 0, jnp.take_along_axis(jnp.asarray(segments.starts_BL), jnp.maximum(last_B1, 0), axis=1))
    back_3 = jnp.arange(TAPS - 1)[::-1]
    kept_B3D = jnp.take_along_axis(tape_BPD, (last_B1 + TAPS - 1 - back_3)[..., None], axis=1)
    return jnp.where(_reaches(start_B1, last_B1, back_3)[..., None], kept_B3D, 0)


def _reaches(start, at, n):
    """Does the n-th token to the left belong to this token's document? What is left of the row belongs to the first one."""
    return (at - n >= start) | (start == 0)
