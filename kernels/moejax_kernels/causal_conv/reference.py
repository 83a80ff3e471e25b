"""The definition of the short convolution: each tap is the token before the last one in its document."""

import jax
import jax.numpy as jnp

from moejax_kernels.segments import Segments

TAPS = 4
ACTIVATIONS = {"silu": jax.nn.silu, None: lambda x: x}


def causal_conv(x_BLD, weight_D4, *, segments=None, history_B3D=None, activation="silu"):
    """`y_t = activation(sum_n weight[:, 3 - n] x_(n-th token before t in its document))`; what lies before a document reads 0."""
    B, L, D = x_BLD.shape
    segments = Segments.whole(B, L) if segments is None else segments
    history_B3D = jnp.zeros((B, TAPS - 1, D), x_BLD.dtype) if history_B3D is None else history_B3D.astype(x_BLD.dtype)
    slots_BPD = jnp.concatenate([jnp.zeros((B, 1, D), x_BLD.dtype), history_B3D, x_BLD], axis=1)
    at_L, real_BL, before_BP = jnp.arange(L), jnp.asarray(segments.ids_BL) >= 0, before_slots(segments)

    def chain(slot_BQ):
        """Inputs of the tokens in these slots and of the three before each, the latest first."""
        for _ in range(TAPS):
            yield jnp.take_along_axis(slots_BPD, slot_BQ[..., None], axis=1)
            slot_BQ = jnp.take_along_axis(before_BP, slot_BQ, axis=1)

    dtype = jnp.promote_types(jnp.result_type(x_BLD, weight_D4), jnp.float32)
    weight_D4 = weight_D4.astype(dtype)
    sum_BLD = sum(
        weight_D4[:, TAPS - 1 - n] * tap_BLD.astype(dtype) for n, tap_BLD in enumerate(chain(jnp.broadcast_to(at_L + TAPS, (B, L))))
    )
    y_BLD = jnp.where(real_BL[..., None], ACTIVATIONS[activation](sum_BLD), 0).astype(x_BLD.dtype)
    last_B1 = jnp.where(real_BL, at_L + TAPS, TAPS - 1).max(axis=1, keepdims=True)
    return y_BLD, jnp.concatenate(list(chain(last_B1))[TAPS - 2 :: -1], axis=1)


def before_slots(segments: Segments):
    """int32 [B, P]: slot of the token before each slot's in its document. Slot 0 is nothing, 1 to 3 are the history, then come L tokens."""
    real_BL, previous_BL = jnp.asarray(segments.ids_BL) >= 0, jnp.asarray(segments.previous_BL)
    B, L = real_BL.shape
    before_BL = jnp.where(previous_BL >= 0, previous_BL + TAPS, jnp.where(real_BL & (jnp.arange(L) == 0), TAPS - 1, 0))
    return jnp.concatenate([jnp.broadcast_to(jnp.array([0, 0, 1, 2]), (B, TAPS)), before_BL], axis=1)
