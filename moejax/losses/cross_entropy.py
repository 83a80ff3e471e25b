"""Next-token cross-entropy whose logits never exist as a whole: a few tokens and a piece of the vocabulary at a time."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from moejax_kernels.implementation import Implementation
from moejax_kernels.varying import vary_alike

from moejax.losses import vocabulary
from moejax.losses.vocabulary import Vocabulary

IGNORED = -100
"""A target that counts nowhere, whatever its weight."""
LEAST_BYTES = 32 * 2**20
"""Logits and their gradients may fill as much at a time in any case; half of the hidden states' gradient where that is more."""
FEW_TOKENS = 1024
"""With fewer at a time, the passes over the whole head cost more than making the logits a second time."""
FEW_COLUMNS = 1024
"""With fewer at a time, the passes over the hidden states' gradient would."""


class CrossEntropy(NamedTuple):
    """Sums over tokens, float32 scalars (float64 if the hidden states are). Divide by the weights of the whole global batch."""

    loss_sum: jax.Array
    """nll_sum + z_coef * z_sum: what is differentiated."""
    nll_sum: jax.Array
    """Weighted negative log-likelihoods, in nats. A report: no gradient was formed for it, and asking for one gives NaN."""
    z_sum: jax.Array
    """Weighted squared logsumexp of the logits. A report too."""
    weight_sum: jax.Array
    """Sum of the weights."""


def cross_entropy(
    hidden_BLD,
    unembed_DV,
    targets_BL,
    weights_BL,
    *,
    z_coef=0.0,
    logit_cap: float = 0.0,
    chunk_tokens: int = 0,
    chunk_vocab: int = 0,
    gradients: Literal["forward", "recompute"] = "forward",
    vocab_axis: str | None = None,
    width_axes: tuple[str, ...] = (),
    tied: bool = False,
    implementation: Implementation = "xla",
) -> CrossEntropy:
    """Sums of the next-token loss, in a scan over chunks of L, and inside each over pieces of the vocabulary.

    Products with the head in a step: three if the vocabulary is one piece and gradients are formed in the forward sweep; else four, since a
    gradient needs the logsumexp of all pieces. Hidden states or a head that nobody differentiates (frozen ones) get no gradient and cost a
    product less. B is not cut: B * chunk_tokens * chunk_vocab logits and their gradients exist at a time.

    Args:
      hidden_BLD: final hidden states; matmuls run in their dtype and accumulate in float32.
      unembed_DV: output projection in any float dtype, cast piece by piece; its gradient is summed in float32, or wider if it is.
      targets_BL: integers; IGNORED (-100) leaves a token out whatever its weight. Another that is no token makes the sums NaN.
      weights_BL: float weight of each token; 0 leaves it out exactly, whatever its target: of the sums also if its hidden state is not
        finite, of the gradients if it is (0 times NaN would enter the head's).
      z_coef: coefficient of the z-loss, a number or a scalar array.
      logit_cap: logits become cap * tanh(logits / cap), for all that is made of them; 0: they stay.
      chunk_tokens, chunk_vocab: positions of each row per chunk, and columns per piece, dividing or not. 0: see `chunks`.
      gradients: "forward" forms the gradients of loss_sum beside it and holds them in float32; the backward pass only scales them.
        "recompute" keeps the inputs and a logsumexp per token, and makes the logits again in the backward pass.
      vocab_axis: inside shard_map, the mesh axis that splits V; unembed_DV is then this device's part, while hidden states and targets are
        the same along it. Each device streams its part; logsumexps and target logits meet chunk by chunk, the hidden states' gradients
        where shard_map or `pcast` sums them.
      width_axes: inside shard_map over rows, those of the mesh axes that split D of the head too. The sums are those of all their devices.
        Pieces are gathered in the hidden states' dtype where they are used, gradients scattered in float32; one piece is gathered once.
      tied: unembed_DV is the transpose of an embedding [V, D]; no transposed copy of it, or of its gradient, is made.
      implementation: of `logit_sums` and `logit_gradients`. "triton_gpu" writes no float32 logits, and always takes four products.

    Source: gradients in the forward sweep as in Liger Kernel, Hsu et al. 2024 (arXiv 2410.10989); streaming over the vocabulary as in
    Cut Cross-Entropy, Wijmans et al. 2024 (arXiv 2411.09009).
    """
    if gradients not in ("forward", "recompute"):
        raise ValueError(f"cross_entropy: gradients={gradients!r} must be 'forward' or 'recompute'.")
    wide = jnp.promote_types(hidden_BLD.dtype, jnp.float32)
    z_coef, targets_BL = jnp.asarray(z_coef, wide), jnp.asarray(targets_BL).astype(jnp.int32)
    weights_BL = jnp.where(targets_BL == IGNORED, 0, jnp.asarray(weights_BL).astype(wide))
    tokens, piece = chunks(hidden_BLD, unembed_DV, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)
    in_pieces = piece < unembed_DV.shape[1]
    how = Vocabulary(piece, logit_cap, vocab_axis, width_axes if in_pieces else (), tied, implementation)
    if width_axes and not in_pieces:
        unembed_DV = jax.lax.all_gather(unembed_DV, width_axes, axis=0, tiled=True)
    head = unembed_DV.T if tied else unembed_DV
    statics = _Statics(tokens, how, gradients, (hidden_BLD.dtype, unembed_DV.dtype))
    sums = _sums(statics, *vary_alike(hidden_BLD, head, targets_BL, weights_BL, z_coef))
    # devices on one axis hold parts of the same tokens' loss, on the others different tokens; all have the same cotangent, as their sum has
    loss_sum, nll_sum, z_sum = jax.lax.psum(sums, (vocab_axis, *width_axes) if vocab_axis else width_axes)
    return CrossEntropy(loss_sum, nll_sum, z_sum, jax.lax.psum(weights_BL.sum(), width_axes))


def chunks(hidden_BLD, unembed_DV, *, chunk_tokens: int = 0, chunk_vocab: int = 0) -> tuple[int, int]:
    """Positions per chunk and columns per piece. What is 0 is chosen so that logits and their gradients fit LEAST_BYTES, or half of the
    hidden states' gradient in float32 where that is more, and so does what one piece adds to the head's gradient.

    The whole vocabulary, if that leaves room for FEW_TOKENS; else as many tokens as fit with FEW_COLUMNS, and then as many columns as fit.
    """
    (rows, length, width), columns = hidden_BLD.shape, unembed_DV.shape[1]
    wide = jnp.promote_types(hidden_BLD.dtype, jnp.float32).itemsize
    room_bytes = max(LEAST_BYTES, rows * length * width * wide // 2)
    room = room_bytes // (wide + hidden_BLD.dtype.itemsize)  # logits
    most_columns = min(columns, max(room_bytes // (wide * width), FEW_COLUMNS))
    tokens, piece = min(chunk_tokens or length, length), min(chunk_vocab or columns, columns)
    few = tokens if chunk_tokens else min(-(-FEW_TOKENS // rows), length)
    if chunk_vocab == 0 and (rows * few * columns > room or columns > most_columns):
        tokens = tokens if chunk_tokens else _even(length, room // (rows * FEW_COLUMNS))
        piece = max(room // (rows * tokens), FEW_COLUMNS)
        piece = min(_even(columns, min(piece, most_columns), multiple=128), columns)
    if chunk_tokens == 0:
        tokens = _even(length, room // (rows * piece))
    return tokens, piece


def _even(size: int, largest: int, *, multiple: int = 1) -> int:
    """The size of parts of which as few as can be cover `size`, nearly alike; at least a multiple, and at most `largest` else."""
    largest = max(largest // multiple, 1) * multiple
    even = -(-size // -(-size // largest))
    return -(-even // multiple) * multiple


class _Statics(NamedTuple):
    """What is known when a step is compiled."""

    chunk_tokens: int
    how: Vocabulary
    gradients: str
    dtypes: tuple[Any, Any]
    """Of the hidden states' and the head's gradient, which are rounded once, after the incoming cotangent has scaled them."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Whose gradient is asked for."""

    hidden: bool
    head: bool


def _values(statics: _Statics, hidden_BLD, head, targets_BL, weights_BL, z_coef) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This device's loss_sum, nll_sum, z_sum; the gradient is that of the first."""

    def one_chunk(_, chunk):
        hidden_BCD, targets_BC, weights_BC = chunk
        seen = vocabulary.read(statics.how, hidden_BCD, head, targets_BC)
        return None, _parts(statics.how, seen, head, targets_BC, weights_BC, z_coef).sums_2

    _, sums_N2 = _over_tokens(statics, one_chunk, None, (hidden_BLD, targets_BL, weights_BL))
    return _with_loss(sums_N2, z_coef)


def _save(statics: _Statics, *primals):
    """The sums, and what the backward pass needs: the gradients themselves, or what they are made from."""
    hidden_BLD, head, targets_BL, weights_BL, z_coef = (primal.value for primal in primals)
    wanted = _Wanted(primals[0].perturbed, primals[1].perturbed)
    forward = statics.gradients == "forward"

    def one_chunk(dhead, chunk):
        hidden_BCD, targets_BC, weights_BC = chunk
        seen = vocabulary.read(statics.how, hidden_BCD, head, targets_BC)
        parts = _parts(statics.how, seen, head, targets_BC, weights_BC, z_coef)
        if not forward:
            return dhead, (parts, seen.lse_BC)
        dhidden_BCD, dhead = _chunk_gradients(statics, wanted, chunk, head, z_coef, seen, dhead)
        return dhead, (parts, dhidden_BCD)

    start = _zeros(head, hidden_BLD, weights_BL) if forward and wanted.head else None
    dhead, (parts, rest_NBC) = _over_tokens(statics, one_chunk, start, (hidden_BLD, targets_BL, weights_BL))
    sums = _with_loss(parts.sums_2, z_coef)
    rest_BL, loss_BL = (_join(array_NBC, hidden_BLD.shape[1]) for array_NBC in (rest_NBC, parts.loss_BC))
    if forward:
        return sums, (rest_BL, dhead, loss_BL, sums[2])
    inputs = (hidden_BLD, head, targets_BL, weights_BL, z_coef)
    return sums, (wanted, inputs, rest_BL, loss_BL, sums[2])


def _grads(statics: _Statics, saved, cotangents):
    of_loss, of_nll, of_z = (0.0 if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents)
    scale = jnp.where((of_nll == 0) & (of_z == 0), of_loss, jnp.nan)
    if statics.gradients == "forward":
        *of_weights, loss_BL, z_sum = saved
    else:
        wanted, inputs, lse_BL, loss_BL, z_sum = saved
        of_weights = _again(statics, wanted, inputs, lse_BL)
    dhidden_BLD, dhead = (None if x is None else (scale * x).astype(dtype) for x, dtype in zip(of_weights, statics.dtypes, strict=True))
    return dhidden_BLD, dhead, None, scale * loss_BL, scale * z_sum


_sums = jax.custom_vjp(_values, nondiff_argnums=(0,))
_sums.defvjp(_save, _grads, symbolic_zeros=True)


def _again(statics: _Statics, wanted: _Wanted, inputs, lse_BL):
    """Gradients of hidden states and head, from the logsumexp that the forward pass found."""
    hidden_BLD, head, targets_BL, weights_BL, z_coef = inputs

    def one_chunk(dhead, chunk):
        *chunk, lse_BC = chunk
        seen = vocabulary.Seen(lse_BC, None, None)
        dhidden_BCD, dhead = _chunk_gradients(statics, wanted, chunk, head, z_coef, seen, dhead)
        return dhead, dhidden_BCD

    start = _zeros(head, hidden_BLD, weights_BL) if wanted.head else None
    dhead, dhidden_NBCD = _over_tokens(statics, one_chunk, start, (hidden_BLD, targets_BL, weights_BL, lse_BL))
    return _join(dhidden_NBCD, hidden_BLD.shape[1]), dhead


def _chunk_gradients(statics: _Statics, wanted: _Wanted, chunk, head, z_coef, seen: vocabulary.Seen, dhead):
    """The hidden states' gradient of one chunk, and the head's with this chunk's added."""
    hidden_BCD, targets_BC, weights_BC = chunk
    slope_BC = weights_BC * (1 + 2 * z_coef * seen.lse_BC)
    return vocabulary.gradients(statics.how, hidden_BCD, head, targets_BC, seen, slope_BC, weights_BC, dhead=dhead, of_hidden=wanted.hidden)


class _Parts(NamedTuple):
    """What one chunk adds to the loss on this device."""

    sums_2: jax.Array
    """Weighted sums of nll and of lse**2."""
    loss_BC: jax.Array
    """Loss of each token before its weight."""


def _parts(how: Vocabulary, seen: vocabulary.Seen, head, targets_BC, weights_BC, z_coef) -> _Parts:
    counts_BC = weights_BC != 0
    num_columns = head.shape[how.dim] * (jax.lax.axis_size(how.axis) if how.axis else 1)
    known_BC = ~counts_BC | ((targets_BC >= 0) & (targets_BC < num_columns))
    nll_BC, square_BC = jnp.where(known_BC, seen.lse_BC - seen.target_BC, jnp.nan), seen.lse_BC**2
    if how.axis:  # all devices of the axis see the same: the first counts it
        first = jax.lax.axis_index(how.axis) == 0
        nll_BC, square_BC = jnp.where(first, nll_BC, 0), jnp.where(first, square_BC, 0)
    weighted = lambda values_BC: jnp.sum(jnp.where(counts_BC, weights_BC * values_BC, 0))  # 0 times NaN would be NaN
    return _Parts(jnp.stack([weighted(nll_BC), weighted(square_BC)]), nll_BC + z_coef * square_BC)


def _with_loss(sums_N2, z_coef):
    nll_sum, z_sum = sums_N2.sum(0)
    return nll_sum + z_coef * z_sum, nll_sum, z_sum


def _zeros(head, hidden_BLD, weights_BL):
    zeros = jnp.zeros(head.shape, jnp.promote_types(head.dtype, weights_BL.dtype))
    return vary_alike(zeros, hidden_BLD, head)[0]


def _over_tokens(statics: _Statics, function, carry, arrays):
    """`lax.scan` of `function` over chunks of L, arrays [B, L, ...] cut to [L / chunk, B, chunk, ...] and padded with zeros."""
    length = arrays[0].shape[1]
    chunk = statics.chunk_tokens
    num = -(-length // chunk)

    def cut(array_BL):
        padding = [(0, 0), (0, num * chunk - length)] + [(0, 0)] * (array_BL.ndim - 2)
        padded_BL = jnp.pad(array_BL, padding)
        return jnp.moveaxis(padded_BL.reshape(array_BL.shape[0], num, chunk, *array_BL.shape[2:]), 1, 0)

    return jax.lax.scan(function, carry, tuple(cut(array) for array in arrays))


def _join(array_NBC, length: int):
    """[N, B, chunk, ...] -> [B, length, ...]; None stays."""
    if array_NBC is None:
        return None
    array_BNC = jnp.moveaxis(array_NBC, 0, 1)
    return array_BNC.reshape(array_BNC.shape[0], -1, *array_BNC.shape[3:])[:, :length]
