"""Next-token cross-entropy whose logits never exist as a whole, and whose gradients are formed while they do."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from moejax_kernels.varying import vary_alike


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


def cross_entropy(hidden_BLD, unembed_DV, targets_BL, weights_BL, *, z_coef=0.0, chunk_tokens: int) -> CrossEntropy:
    """Sums of the next-token loss, chunked along L in a scan that forms the gradients of loss_sum as it goes.

    A step thus multiplies three times by the head and makes each logit once: the backward pass only scales what the forward pass
    left, the hidden states' gradient and the head's. Without differentiation the logits alone are made.

    Only L is cut: B stays as it is spread over devices. At most B * chunk_tokens * V logits and their gradients exist at a time, and
    the hidden states' gradient in float32. Under plain jit on a mesh each chunk gathers the head and reduces its gradient; inside
    shard_map over rows, with the head marked as varying and the sums psummed, both happen once.

    Args:
      hidden_BLD: final hidden states; matmuls run in their dtype and accumulate in float32.
      unembed_DV: output projection in any float dtype; its gradient is summed over chunks in float32, or wider if it is.
      targets_BL: integers; any value where the weight is 0.
      weights_BL: float weight of each token; 0 leaves it out of values and gradients, exactly.
      z_coef: coefficient of the z-loss, a number or a scalar array.
      chunk_tokens: positions of each row per chunk; L need not be a multiple.

    Source: gradients in the forward sweep as in Liger Kernel, Hsu et al. 2024 (arXiv 2410.10989).
    """
    wide = jnp.promote_types(hidden_BLD.dtype, jnp.float32)
    z_coef = jnp.asarray(z_coef, wide)
    weights_BL = jnp.asarray(weights_BL).astype(wide)
    statics = _Statics(chunk_tokens, (hidden_BLD.dtype, unembed_DV.dtype))
    loss_sum, nll_sum, z_sum = _sums(statics, *vary_alike(hidden_BLD, unembed_DV, jnp.asarray(targets_BL), weights_BL, z_coef))
    return CrossEntropy(loss_sum, nll_sum, z_sum, weights_BL.sum())


class _Statics(NamedTuple):
    """What is known when a step is compiled."""

    chunk_tokens: int
    dtypes: tuple[Any, Any]
    """Of the hidden states' and the head's gradient, which are rounded once, after the incoming cotangent has scaled them."""


def _values(statics: _Statics, hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef) -> tuple[jax.Array, jax.Array, jax.Array]:
    """loss_sum, nll_sum, z_sum; the gradient is that of the first."""
    head_DV = unembed_DV.astype(hidden_BLD.dtype)
    chunks = _cut((hidden_BLD, targets_BL, weights_BL), statics.chunk_tokens)
    _, sums_N2 = jax.lax.scan(lambda _, chunk: (None, _read(chunk, head_DV).sums_2), None, chunks)
    return _with_loss(sums_N2, z_coef)


def _save(statics: _Statics, hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef):
    """The sums, and the gradients of the loss to hidden states, head, weights and z_coef."""
    head_DV = unembed_DV.astype(hidden_BLD.dtype)

    def one_chunk(dunembed_DV, chunk):
        hidden_BCD, _, weights_BC = chunk
        seen = _read(chunk, head_DV)
        slope_BC1 = (weights_BC * (1 + 2 * z_coef * seen.lse_BC))[..., None]
        probs_BCV = jnp.exp(seen.logits_BCV - seen.lse_BC[..., None])
        dlogits_BCV = (slope_BC1 * probs_BCV - jnp.where(seen.is_target_BCV, weights_BC[..., None], 0)).astype(hidden_BCD.dtype)
        dhidden_BCD = jnp.einsum("bcv,dv->bcd", dlogits_BCV, head_DV, preferred_element_type=weights_BC.dtype)
        dunembed_DV += jnp.einsum("bcd,bcv->dv", hidden_BCD, dlogits_BCV, preferred_element_type=dunembed_DV.dtype)
        return dunembed_DV, (seen.sums_2, dhidden_BCD, seen.nll_BC + z_coef * seen.lse_BC**2)

    zeros_DV = jnp.zeros(unembed_DV.shape, jnp.promote_types(unembed_DV.dtype, weights_BL.dtype))
    chunks = _cut((hidden_BLD, targets_BL, weights_BL), statics.chunk_tokens)
    dunembed_DV, (sums_N2, dhidden_NBCD, loss_NBC) = jax.lax.scan(one_chunk, vary_alike(zeros_DV, hidden_BLD)[0], chunks)
    join = lambda array_NBC: _join(array_NBC)[:, : hidden_BLD.shape[1]]
    sums = _with_loss(sums_N2, z_coef)
    return sums, (join(dhidden_NBCD), dunembed_DV, join(loss_NBC), sums[2])


def _grads(statics: _Statics, gradients, cotangents):
    of_loss, of_nll, of_z = cotangents
    scale = jnp.where((of_nll == 0) & (of_z == 0), of_loss, jnp.nan)
    *of_weights, dloss_BL, z_sum = (scale * x for x in gradients)
    dhidden_BLD, dunembed_DV = (x.astype(dtype) for x, dtype in zip(of_weights, statics.dtypes, strict=True))
    return dhidden_BLD, dunembed_DV, None, dloss_BL, z_sum


_sums = jax.custom_vjp(_values, nondiff_argnums=(0,))
_sums.defvjp(_save, _grads)


class _Seen(NamedTuple):
    """What one chunk's logits tell."""

    logits_BCV: jax.Array
    is_target_BCV: jax.Array
    lse_BC: jax.Array
    nll_BC: jax.Array
    sums_2: jax.Array
    """Weighted sums of nll and of lse**2."""


def _read(chunk, head_DV) -> _Seen:
    hidden_BCD, targets_BC, weights_BC = chunk
    logits_BCV = jnp.einsum("bcd,dv->bcv", hidden_BCD, head_DV, preferred_element_type=weights_BC.dtype)
    lse_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    # a masked sum and not a gather: -100 picks nothing
    is_target_BCV = jnp.arange(logits_BCV.shape[-1]) == targets_BC[..., None]
    nll_BC = lse_BC - jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0), -1)
    sums_2 = jnp.stack([jnp.sum(weights_BC * nll_BC), jnp.sum(weights_BC * lse_BC**2)])
    return _Seen(logits_BCV, is_target_BCV, lse_BC, nll_BC, sums_2)


def _with_loss(sums_N2, z_coef):
    nll_sum, z_sum = sums_N2.sum(0)
    return nll_sum + z_coef * z_sum, nll_sum, z_sum


def _cut(arrays, chunk_tokens: int):
    """Each [B, L, ...] -> [L / chunk, B, chunk, ...], padded with zeros."""
    length = arrays[0].shape[1]
    chunk = min(chunk_tokens, length)
    num = -(-length // chunk)

    def cut(array_BL):
        padding = [(0, 0), (0, num * chunk - length)] + [(0, 0)] * (array_BL.ndim - 2)
        padded_BL = jnp.pad(array_BL, padding)
        return jnp.moveaxis(padded_BL.reshape(array_BL.shape[0], num, chunk, *array_BL.shape[2:]), 1, 0)

    return tuple(cut(array) for array in arrays)


def _join(array_NBC):
    """[N, B, chunk, ...] -> [B, N * chunk, ...]."""
    array_BNC = jnp.moveaxis(array_NBC, 0, 1)
    return array_BNC.reshape(array_BNC.shape[0], -1, *array_BNC.shape[3:])
