"""Next-token cross-entropy whose logits never exist as a whole, and whose gradients are formed while they do."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from moejax_kernels.varying import vary_alike


class CrossEntropy(NamedTuple):
    """Sums over tokens, float32 scalars (float64 if the hidden states are). Divide by the weights of the whole global batch."""

    loss_sum: jax.Array
    """nll_sum + z_coef * z_sum: what is differentiated."""
    nll_sum: jax.Array
    """Weighted negative log-likelihoods, in nats; carries no gradient."""
    z_sum: jax.Array
    """Weighted squared logsumexp of the logits; carries no gradient."""
    weight_sum: jax.Array
    """Sum of the weights."""


def cross_entropy(hidden_BLD, unembed_DV, targets_BL, weights_BL, *, z_coef=0.0, chunk_tokens: int) -> CrossEntropy:
    """Sums of the next-token loss, chunked along L in a scan that forms the gradients of loss_sum as it goes.

    A step thus multiplies three times by the head and makes each logit once: the backward pass only scales what the forward pass
    left, the hidden states' gradient and the head's. Without differentiation the logits alone are made.

    Only L is cut: B stays as it is spread over devices. At most B * chunk_tokens * V logits exist at a time.
    Under plain jit on a mesh each chunk gathers the head and reduces its gradient; inside shard_map over rows, with the head marked
    as varying and the sums psummed, both happen once.

    Args:
      hidden_BLD: final hidden states; matmuls run in their dtype and accumulate in float32.
      unembed_DV: output projection in any float dtype; its gradient is summed over chunks in float32, or wider if it is.
      targets_BL: integers; any value where the weight is 0.
      weights_BL: float weight of each token; 0 leaves it out of values and gradients, exactly.
      z_coef: coefficient of the z-loss, a number or a scalar array without gradient.
      chunk_tokens: positions of each row per chunk; L need not be a multiple.

    Source: gradients in the forward sweep as in Liger Kernel, Hsu et al. 2024 (arXiv 2410.10989), section 3.2.
    """
    wide = jnp.promote_types(hidden_BLD.dtype, jnp.float32)
    z_coef = jax.lax.stop_gradient(jnp.asarray(z_coef, wide))
    weights_BL = jnp.asarray(weights_BL).astype(wide)
    loss_sum, nll_sum, z_sum = _sums(chunk_tokens, *vary_alike(hidden_BLD, unembed_DV, jnp.asarray(targets_BL), weights_BL, z_coef))
    return CrossEntropy(loss_sum, jax.lax.stop_gradient(nll_sum), jax.lax.stop_gradient(z_sum), weights_BL.sum())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(chunk_tokens, hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef):
    """loss_sum, nll_sum, z_sum; the gradient is that of the first."""
    (nll_sum, z_sum), _ = _sweep(chunk_tokens, hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef, with_gradients=False)
    return nll_sum + z_coef * z_sum, nll_sum, z_sum


def _save(chunk_tokens, hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef):
    (nll_sum, z_sum), gradients = _sweep(chunk_tokens, hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef, with_gradients=True)
    return (nll_sum + z_coef * z_sum, nll_sum, z_sum), gradients


def _grads(chunk_tokens, gradients, cotangents):
    dhidden_BLD, dunembed_DV, loss_BL = (cotangents[0].astype(x.dtype) * x for x in gradients)
    return dhidden_BLD, dunembed_DV, None, loss_BL, None


_sums.defvjp(_save, _grads)


def _sweep(chunk_tokens, hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef, *, with_gradients: bool):
    """(nll_sum, z_sum), and the gradients of the loss to hidden states, head and weights, or None."""
    wide = weights_BL.dtype
    length, chunk = hidden_BLD.shape[1], min(chunk_tokens, hidden_BLD.shape[1])
    head_DV = unembed_DV.astype(hidden_BLD.dtype)

    def one_chunk(dunembed_DV, chunk):
        hidden_BCD, targets_BC, weights_BC = chunk
        logits_BCV = jnp.einsum("bcd,dv->bcv", hidden_BCD, head_DV, preferred_element_type=wide)
        lse_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        # a masked sum and not a gather: -100 picks nothing
        is_target_BCV = jnp.arange(logits_BCV.shape[-1]) == targets_BC[..., None]
        nll_BC = lse_BC - jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0), -1)
        sums_2 = jnp.stack([jnp.sum(weights_BC * nll_BC), jnp.sum(weights_BC * lse_BC**2)])
        if not with_gradients:
            return dunembed_DV, (sums_2, None)
        slope_BC = weights_BC * (1 + 2 * z_coef * lse_BC)
        dlogits_BCV = slope_BC[..., None] * jnp.exp(logits_BCV - lse_BC[..., None]) - jnp.where(is_target_BCV, weights_BC[..., None], 0)
        dlogits_BCV = dlogits_BCV.astype(hidden_BCD.dtype)
        dhidden_BCD = jnp.einsum("bcv,dv->bcd", dlogits_BCV, head_DV, preferred_element_type=wide).astype(hidden_BCD.dtype)
        dunembed_DV += jnp.einsum("bcd,bcv->dv", hidden_BCD, dlogits_BCV, preferred_element_type=dunembed_DV.dtype)
        return dunembed_DV, (sums_2, (dhidden_BCD, nll_BC + z_coef * lse_BC**2))

    sum_dtype = jnp.promote_types(unembed_DV.dtype, wide)
    start = vary_alike(jnp.zeros(unembed_DV.shape, sum_dtype), hidden_BLD)[0] if with_gradients else None
    chunks = tuple(_cut(array, chunk) for array in (hidden_BLD, targets_BL, weights_BL))
    dunembed_DV, (sums_N2, of_chunks) = jax.lax.scan(one_chunk, start, chunks)
    if not with_gradients:
        return tuple(sums_N2.sum(0)), None
    dhidden_BLD, loss_BL = (_join(x)[:, :length] for x in of_chunks)
    return tuple(sums_N2.sum(0)), (dhidden_BLD, dunembed_DV.astype(unembed_DV.dtype), loss_BL)


def _cut(array_BL, chunk: int):
    """[B, L, ...] -> [L / chunk, B, chunk, ...], padded with zeros."""
    num = -(-array_BL.shape[1] // chunk)
    padding = [(0, 0), (0, num * chunk - array_BL.shape[1])] + [(0, 0)] * (array_BL.ndim - 2)
    padded_BL = jnp.pad(array_BL, padding)
    return jnp.moveaxis(padded_BL.reshape(array_BL.shape[0], num, chunk, *array_BL.shape[2:]), 1, 0)


def _join(array_NBC):
    """[N, B, chunk, ...] -> [B, N * chunk, ...]."""
    array_BNC = jnp.moveaxis(array_NBC, 0, 1)
    return array_BNC.reshape(array_BNC.shape[0], -1, *array_BNC.shape[3:])
