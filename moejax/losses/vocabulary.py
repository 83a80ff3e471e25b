"""Logits of some tokens, one piece of the vocabulary after the other: what they sum to, and the products that their gradients enter."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from moejax_kernels.varying import vary_alike


class Vocabulary(NamedTuple):
    """How logits are made, known when a step is compiled."""

    piece: int
    """Columns of the head that are multiplied at a time, at most those that it has here."""
    logit_cap: float = 0.0
    """Logits are cap * tanh(product / cap); 0: the product."""
    axis: str | None = None
    """Mesh axis over which the head's columns are spread, inside shard_map; each device streams its own."""
    width_axes: tuple[str, ...] = ()
    """Mesh axes over which the head's rows are spread; each piece is gathered, and its gradient scattered."""


class Seen(NamedTuple):
    """What all logits of some tokens tell, the same on all devices of the vocabulary's axis."""

    lse_BC: jax.Array
    target_BC: jax.Array
    """The target's logit; 0 where the target is no token."""
    logits_BCV: jax.Array | None
    """Kept where there is one piece alone."""


class _Piece(NamedTuple):
    weight_DV: jax.Array
    """In the hidden states' dtype: of a wider head one piece at a time is cast."""
    start: jax.Array
    """Its first column on this device."""
    is_target_BCV: jax.Array
    is_new_V: jax.Array | None
    """The last piece begins early to be as wide as the others; columns that were seen before count no more. None: all are new."""


def read(how: Vocabulary, hidden_BCD, unembed_DV, targets_BC) -> Seen:
    """One product with the head: the logsumexp of each token's logits, streamed with a running maximum, and its target's logit."""
    wide = jnp.promote_types(hidden_BCD.dtype, jnp.float32)

    def look(carry, i):
        peak_BC, total_BC, target_BC = carry
        piece = _piece(how, i, hidden_BCD.dtype, unembed_DV, targets_BC)
        logits_BCV = _logits(how, hidden_BCD, piece)
        target_BC += jnp.sum(jnp.where(piece.is_target_BCV, logits_BCV, 0), -1)  # a masked sum and not a gather: -100 picks nothing
        counted_BCV = logits_BCV if piece.is_new_V is None else jnp.where(piece.is_new_V, logits_BCV, -jnp.inf)
        higher_BC = jnp.maximum(peak_BC, counted_BCV.max(-1))
        total_BC = total_BC * jnp.exp(peak_BC - higher_BC) + jnp.sum(jnp.exp(counted_BCV - higher_BC[..., None]), -1)
        return (higher_BC, total_BC, target_BC), logits_BCV

    zeros_BC = jnp.zeros(hidden_BCD.shape[:2], wide)
    start, _ = vary_alike((zeros_BC - jnp.inf, zeros_BC, zeros_BC), (hidden_BCD, unembed_DV, targets_BC))
    if _num_pieces(how, unembed_DV) == 1:
        (peak_BC, total_BC, target_BC), logits_BCV = look(start, 0)
    else:
        (peak_BC, total_BC, target_BC), logits_BCV = _over_pieces(how, unembed_DV, lambda carry, i: look(carry, i)[0], start), None
    if how.axis:
        highest_BC = jax.lax.pmax(peak_BC, how.axis)
        total_BC = jax.lax.psum(total_BC * jnp.exp(peak_BC - highest_BC), how.axis)
        peak_BC, target_BC = highest_BC, jax.lax.psum(target_BC, how.axis)
    return Seen(peak_BC + jnp.log(total_BC), target_BC, logits_BCV)


def gradients(how: Vocabulary, hidden_BCD, unembed_DV, targets_BC, seen: Seen, slope_BC, weights_BC, *, dunembed_DV, of_hidden: bool):
    """Gradients of a loss whose gradient to the logits is slope * softmax - weights * (1 at the target).

    Two products with the head, and one more where the logits were not kept.

    Args:
      dunembed_DV: what the head's gradient is added to, at least float32; None: it is not asked for.
      of_hidden: whether the hidden states' is.

    Returns:
      dhidden_BCD at least float32, from this device's columns alone, or None; and dunembed_DV.
    """
    wide = slope_BC.dtype
    like = vary_alike(jnp.zeros((), wide), hidden_BCD, unembed_DV, slope_BC)[0]
    dhidden_BCD = jnp.zeros(hidden_BCD.shape, wide) + like if of_hidden else None

    def add(carry, i):
        dhidden_BCD, dunembed_DV = carry
        piece = _piece(how, i, hidden_BCD.dtype, unembed_DV, targets_BC)
        logits_BCV = _logits(how, hidden_BCD, piece) if seen.logits_BCV is None else seen.logits_BCV
        probs_BCV = jnp.exp(logits_BCV - seen.lse_BC[..., None])
        dlogits_BCV = slope_BC[..., None] * probs_BCV - jnp.where(piece.is_target_BCV, weights_BC[..., None], 0)
        if how.logit_cap:
            dlogits_BCV *= 1 - (logits_BCV / how.logit_cap) ** 2
        if piece.is_new_V is not None:
            dlogits_BCV = jnp.where(piece.is_new_V, dlogits_BCV, 0)
        dlogits_BCV = dlogits_BCV.astype(hidden_BCD.dtype)
        if dhidden_BCD is not None:
            dhidden_BCD += jnp.einsum("bcv,dv->bcd", dlogits_BCV, piece.weight_DV, preferred_element_type=wide)
        if dunembed_DV is not None:
            more_DV = jnp.einsum("bcd,bcv->dv", hidden_BCD, dlogits_BCV, preferred_element_type=dunembed_DV.dtype)
            if how.width_axes:
                more_DV = jax.lax.psum_scatter(more_DV, how.width_axes, scatter_dimension=0, tiled=True)
            sum_DV = jax.lax.dynamic_slice_in_dim(dunembed_DV, piece.start, how.piece, 1) + more_DV
            dunembed_DV = jax.lax.dynamic_update_slice_in_dim(dunembed_DV, sum_DV, piece.start, 1)
        return dhidden_BCD, dunembed_DV

    return _over_pieces(how, unembed_DV, add, (dhidden_BCD, dunembed_DV))


def _num_pieces(how: Vocabulary, unembed_DV) -> int:
    return -(-unembed_DV.shape[1] // how.piece)


def _over_pieces(how: Vocabulary, unembed_DV, function, carry):
    """The carry after `function(carry, i)` of each piece."""
    num_pieces = _num_pieces(how, unembed_DV)
    if num_pieces == 1:
        return function(carry, 0)
    return jax.lax.scan(lambda carry, i: (function(carry, i), None), carry, jnp.arange(num_pieces))[0]


def _piece(how: Vocabulary, i, dtype, unembed_DV, targets_BC) -> _Piece:
    num_columns = unembed_DV.shape[1]
    start = jnp.minimum(i * how.piece, num_columns - how.piece)
    weight_DV = jax.lax.dynamic_slice_in_dim(unembed_DV, start, how.piece, 1).astype(dtype)
    if how.width_axes:
        weight_DV = jax.lax.all_gather(weight_DV, how.width_axes, axis=0, tiled=True)
    columns_V = start + jnp.arange(how.piece)
    is_new_V = columns_V >= i * how.piece if num_columns % how.piece else None
    first = jax.lax.axis_index(how.axis) * num_columns if how.axis else 0
    is_target_BCV = columns_V + first == targets_BC[..., None]
    if is_new_V is not None:
        is_target_BCV &= is_new_V
    return _Piece(weight_DV, start, is_target_BCV, is_new_V)


def _logits(how: Vocabulary, hidden_BCD, piece: _Piece):
    wide = jnp.promote_types(hidden_BCD.dtype, jnp.float32)
    logits_BCV = jnp.einsum("bcd,dv->bcv", hidden_BCD, piece.weight_DV, preferred_element_type=wide)
    return capped(logits_BCV, how.logit_cap)


def capped(logits, logit_cap: float):
    """Soft-capped logits, cap * tanh(logits / cap); 0: as they are. Source: Gemma 2, arXiv 2408.00118, section 2."""
    return logit_cap * jnp.tanh(logits / logit_cap) if logit_cap else logits
