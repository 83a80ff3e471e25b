"""Logits of some tokens, one piece of the vocabulary after the other: what they sum to, and the products that their gradients enter."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from moejax_kernels import logit_gradients, logit_sums
from moejax_kernels.implementation import Implementation
from moejax_kernels.logits import reference, xla
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
    tied: bool = False
    """The head is an embedding [V, D] and not [D, V]: pieces are cut from it as it lies, since a transposed copy would be as large."""
    implementation: Implementation = "xla"
    """Of logit_sums and logit_gradients."""

    @property
    def dim(self) -> int:
        """The head's dim of columns; the other one is D."""
        return 0 if self.tied else 1


class Seen(NamedTuple):
    """What all logits of some tokens tell, the same on all devices of the vocabulary's axis."""

    lse_BC: jax.Array
    target_BC: Any
    """The target's logit; 0 where the target is no token."""
    logits_BCV: jax.Array | None
    """Kept where there is one piece alone and XLA makes it, so that nobody makes them twice."""


class _Piece(NamedTuple):
    weight_DV: jax.Array
    """In the hidden states' dtype: of a wider head one piece at a time is cast."""
    start: jax.Array
    """Its first column on this device."""
    targets_BC: jax.Array
    """Numbered from its first column."""
    skip: jax.Array | None
    """The last piece begins early to be as wide as the others; so many columns were seen before and count no more. None: all are new."""


def read(how: Vocabulary, hidden_BCD, head, targets_BC) -> Seen:
    """One product with the head: the logsumexp of each token's logits, streamed with a running maximum, and its target's logit."""
    keep = _num_pieces(how, head) == 1 and how.implementation == "xla"
    logits_BCV = None

    def look(carry, i):
        nonlocal logits_BCV
        peak_BC, total_BC, target_BC = carry
        piece = _piece(how, i, hidden_BCD.dtype, head, targets_BC)
        if keep:
            logits_BCV = xla.logits(hidden_BCD, piece.weight_DV, logit_cap=how.logit_cap)
            more = reference.sums_of(logits_BCV, piece.targets_BC, None)
        else:
            options = {"skip": piece.skip, "logit_cap": how.logit_cap, "implementation": how.implementation}
            more = logit_sums(hidden_BCD, piece.weight_DV, piece.targets_BC, **options)
        higher_BC = jnp.maximum(peak_BC, more.peak_T)
        total_BC = total_BC * jnp.exp(peak_BC - higher_BC) + more.total_T * jnp.exp(more.peak_T - higher_BC)
        return higher_BC, total_BC, target_BC + more.target_T

    zeros_BC = jnp.zeros(hidden_BCD.shape[:2], jnp.promote_types(hidden_BCD.dtype, jnp.float32))
    start, _ = vary_alike((zeros_BC - jnp.inf, zeros_BC, zeros_BC), (hidden_BCD, head, targets_BC))
    peak_BC, total_BC, target_BC = _over_pieces(how, head, look, start)
    if how.axis:
        highest_BC = jax.lax.pmax(peak_BC, how.axis)
        total_BC = jax.lax.psum(total_BC * jnp.exp(peak_BC - highest_BC), how.axis)
        peak_BC, target_BC = highest_BC, jax.lax.psum(target_BC, how.axis)
    return Seen(peak_BC + jnp.log(total_BC), target_BC, logits_BCV)


def gradients(how: Vocabulary, hidden_BCD, head, targets_BC, seen: Seen, slope_BC, weights_BC, *, dhead, of_hidden: bool):
    """Gradients of a loss whose gradient to the logits is slope * softmax - weights * (1 at the target).

    Two products with the head, and one more where the logits were not kept.

    Args:
      dhead: what the head's gradient is added to, at least float32; None: it is not asked for.
      of_hidden: whether the hidden states' is.

    Returns:
      dhidden_BCD at least float32, from this device's columns alone, or None; and dhead.
    """
    wide = slope_BC.dtype
    zeros_BCD = jnp.zeros(hidden_BCD.shape, wide) if of_hidden else None
    start, _ = vary_alike((zeros_BCD, dhead), (hidden_BCD, head, slope_BC))

    def add(carry, i):
        dhidden_BCD, dhead = carry
        piece = _piece(how, i, hidden_BCD.dtype, head, targets_BC)
        of_tokens = (piece.targets_BC, seen.lse_BC, slope_BC, weights_BC)
        if seen.logits_BCV is None:
            options = {"skip": piece.skip, "logit_cap": how.logit_cap, "implementation": how.implementation}
            dlogits_BCV = logit_gradients(hidden_BCD, piece.weight_DV, *of_tokens, **options)
        else:
            dlogits_BCV = reference.gradients_of(seen.logits_BCV, *of_tokens, None, logit_cap=how.logit_cap).astype(hidden_BCD.dtype)
        if dhidden_BCD is not None:
            dhidden_BCD += jnp.einsum("bcv,dv->bcd", dlogits_BCV, piece.weight_DV, preferred_element_type=wide)
        if dhead is not None:
            product = "bcd,bcv->vd" if how.tied else "bcd,bcv->dv"
            more = jnp.einsum(product, hidden_BCD, dlogits_BCV, preferred_element_type=dhead.dtype)
            if how.width_axes:
                more = jax.lax.psum_scatter(more, how.width_axes, scatter_dimension=1 - how.dim, tiled=True)
            more += jax.lax.dynamic_slice_in_dim(dhead, piece.start, how.piece, how.dim)
            dhead = jax.lax.dynamic_update_slice_in_dim(dhead, more, piece.start, how.dim)
        return dhidden_BCD, dhead

    return _over_pieces(how, head, add, start)


def _num_pieces(how: Vocabulary, head) -> int:
    return -(-head.shape[how.dim] // how.piece)


def _over_pieces(how: Vocabulary, head, function, carry):
    """The carry after `function(carry, i)` of each piece."""
    num_pieces = _num_pieces(how, head)
    if num_pieces == 1:
        return function(carry, 0)
    return jax.lax.scan(lambda carry, i: (function(carry, i), None), carry, jnp.arange(num_pieces))[0]


def _piece(how: Vocabulary, i, dtype, head, targets_BC) -> _Piece:
    num_columns = head.shape[how.dim]
    start = jnp.minimum(i * how.piece, num_columns - how.piece)
    weight = jax.lax.dynamic_slice_in_dim(head, start, how.piece, how.dim).astype(dtype)
    if how.width_axes:
        weight = jax.lax.all_gather(weight, how.width_axes, axis=1 - how.dim, tiled=True)
    first = start + (jax.lax.axis_index(how.axis) * num_columns if how.axis else 0)
    skip = i * how.piece - start if num_columns % how.piece else None
    return _Piece(weight.T if how.tied else weight, start, targets_BC - first, skip)
