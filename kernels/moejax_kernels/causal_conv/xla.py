"""The short convolution as four shifted products, in plain XLA operations. Saves its inputs alone: the taps are cheaper to redo."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax_kernels.causal_conv.reference import ACTIVATIONS, TAPS, before_slots


def causal_conv(x_BLD, weight_D4, *, segments=None, history_B3D=None, activation="silu"):
    """As `reference.causal_conv`."""
    return jax.checkpoint(functools.partial(_convolve, activation=activation))(x_BLD, weight_D4, segments, history_B3D)


def _convolve(x_BLD, weight_D4, segments, history_B3D, *, activation):
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
    if segments is not None and segments.index_BL is not None:
        sum_BLD += _from_parents(tape_BPD, weight_D4, segments)
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
    if segments.index_BL is not None:
        slots = _chain(before_slots(segments), last_B1 + TAPS)
        return jnp.concatenate([_at_slots(tape_BPD, slot_B1) for slot_B1 in slots[::-1]], axis=1)
    start_B1 = jnp.where(last_B1 < 0, 0, jnp.take_along_axis(jnp.asarray(segments.starts_BL), jnp.maximum(last_B1, 0), axis=1))
    back_3 = jnp.arange(TAPS - 1)[::-1]
    kept_B3D = jnp.take_along_axis(tape_BPD, (last_B1 + TAPS - 1 - back_3)[..., None], axis=1)
    return jnp.where(_reaches(start_B1, last_B1, back_3)[..., None], kept_B3D, 0)


def _reaches(start, at, n):
    """Does the n-th token to the left belong to this token's segment? What is left of the row belongs to the first one."""
    return (at - n >= start) | (start == 0)


def _from_parents(tape_BPD, weight_D4, segments):
    """What the first three tokens of each segment that has a parent take from before it: [B, L, D], zeros elsewhere."""
    previous_BL = jnp.asarray(segments.previous_BL)
    (B, L), row_B1 = previous_BL.shape, np.arange(previous_BL.shape[0])[:, None]
    start_BU = jnp.minimum(jnp.asarray(segments.first_BU), L - 1)
    length_BU = jnp.where(previous_BL[row_B1, start_BU] >= 0, segments.sizes(), 0)  # nothing to do for a document's first segment
    back_BUD = inputs_before(tape_BPD, segments)
    sum_BLD = jnp.zeros((B, L, tape_BPD.shape[2]), weight_D4.dtype)
    for n in range(TAPS - 1):  # the n-th token of the segment, and its taps that lie before
        taps_BUD = sum(weight_D4[:, TAPS - 1 - tap] * back_BUD[tap - n - 1].astype(weight_D4.dtype) for tap in range(n + 1, TAPS))
        at_BU = jnp.where(n < length_BU, start_BU + n, L)
        sum_BLD = sum_BLD.at[row_B1, at_BU].add(taps_BUD, mode="drop")
    return sum_BLD


def inputs_before(tape_BPD, segments):
    """[B, U, D] three times: inputs of the last token before each segment of a tree, of the second last, of the third last; else 0."""
    before_BP, L = before_slots(segments), segments.ids_BL.shape[1]
    start_BU = jnp.minimum(jnp.asarray(segments.first_BU), L - 1)
    slots = _chain(before_BP, jnp.take_along_axis(before_BP, start_BU + TAPS, axis=1))
    return [_at_slots(tape_BPD, slot_BU) for slot_BU in slots]


def _chain(before_BP, slot_BU):
    """These slots, then those of the token before, then of the one before that."""
    slots = [slot_BU]
    while len(slots) < TAPS - 1:
        slots.append(jnp.take_along_axis(before_BP, slots[-1], axis=1))
    return slots


def _at_slots(tape_BPD, slot_BU):
    """Inputs in these slots [B, U, D]; slot 0 holds zeros."""
    return jnp.where((slot_BU > 0)[..., None], jnp.take_along_axis(tape_BPD, jnp.maximum(slot_BU - 1, 0)[..., None], axis=1), 0)
