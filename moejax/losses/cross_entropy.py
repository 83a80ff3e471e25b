"""Next-token cross-entropy whose logits never exist as a whole."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class CrossEntropy(NamedTuple):
    """Sums over tokens, float32 scalars (float64 if the hidden states are). Divide by the weights of the whole global batch."""

    loss_sum: jax.Array
    """nll_sum + z_coef * z_sum: what is differentiated."""
    nll_sum: jax.Array
    """Weighted negative log-likelihoods, in nats."""
    z_sum: jax.Array
    """Weighted squared logsumexp of the logits."""
    weight_sum: jax.Array
    """Sum of the weights."""


def cross_entropy(hidden_BLD, unembed_DV, targets_BL, weights_BL, *, z_coef: float = 0.0, chunk_tokens: int) -> CrossEntropy:
    """Sums of the next-token loss, chunked along L in a scan; each chunk's logits are made again in the backward pass.

    Only L is cut: B stays as it is spread over devices. At most B * chunk_tokens * V logits exist at a time.
    Under plain jit on a mesh each chunk gathers the head and reduces its gradient; inside shard_map over rows, with the head marked
    as varying and the sums psummed, both happen once.

    Args:
      hidden_BLD: final hidden states; matmuls run in their dtype and accumulate in float32.
      unembed_DV: output projection in any float dtype; its gradient is summed over chunks in that dtype.
      targets_BL: integers; any value where the weight is 0.
      weights_BL: float weight of each token; 0 leaves it out of values and gradients, exactly.
      z_coef: coefficient of the z-loss.
      chunk_tokens: positions of each row per chunk; L need not be a multiple.
    """
    dtype = jnp.promote_types(hidden_BLD.dtype, jnp.float32)

    @jax.checkpoint
    def chunk_sums(hidden_BCD, targets_BC, weights_BC):
        logits_BCV = _project(hidden_BCD, unembed_DV)
        lse_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        # A masked sum and not a gather: its gradient is no scatter, and -100 picks nothing.
        is_target_BCV = jnp.arange(logits_BCV.shape[-1]) == targets_BC[..., None]
        target_logit_BC = jnp.where(is_target_BCV, logits_BCV, 0).sum(-1)
        return jnp.stack([jnp.sum(weights_BC * (lse_BC - target_logit_BC)), jnp.sum(weights_BC * lse_BC**2)])

    chunk = min(chunk_tokens, hidden_BLD.shape[1])
    chunks = tuple(_cut(array, chunk) for array in (hidden_BLD, targets_BL, weights_BL.astype(dtype)))
    _, sums_N2 = jax.lax.scan(lambda _, chunk: (None, chunk_sums(*chunk)), None, chunks)
    nll_sum, z_sum = sums_N2.sum(0)
    return CrossEntropy(nll_sum + z_coef * z_sum, nll_sum, z_sum, weights_BL.astype(dtype).sum())


def _cut(array_BL, chunk: int):
    """[B, L, ...] -> [L / chunk, B, chunk, ...], padded with zeros."""
    num = -(-array_BL.shape[1] // chunk)
    padding = [(0, 0), (0, num * chunk - array_BL.shape[1])] + [(0, 0)] * (array_BL.ndim - 2)
    padded_BL = jnp.pad(array_BL, padding)
    return jnp.moveaxis(padded_BL.reshape(array_BL.shape[0], num, chunk, *array_BL.shape[2:]), 1, 0)


@jax.custom_vjp
def _project(hidden_BCD, unembed_DV):
    dtype = jnp.promote_types(hidden_BCD.dtype, jnp.float32)
    return jnp.einsum("bcd,dv->bcv", hidden_BCD, unembed_DV.astype(hidden_BCD.dtype), preferred_element_type=dtype)


def _project_save(hidden_BCD, unembed_DV):
    return _project(hidden_BCD, unembed_DV), (hidden_BCD, unembed_DV)


def _project_grads(saved, dlogits_BCV):
    # Autodiff would multiply float32 by bfloat16, which runs as a float32 matmul: round the cotangent first.
    hidden_BCD, unembed_DV = saved
    dtype = dlogits_BCV.dtype
    dlogits_BCV = dlogits_BCV.astype(hidden_BCD.dtype)
    dhidden_BCD = jnp.einsum("bcv,dv->bcd", dlogits_BCV, unembed_DV.astype(hidden_BCD.dtype), preferred_element_type=dtype)
    dunembed_DV = jnp.einsum("bcd,bcv->dv", hidden_BCD, dlogits_BCV, preferred_element_type=dtype)
    return dhidden_BCD.astype(hidden_BCD.dtype), dunembed_DV.astype(unembed_DV.dtype)


_project.defvjp(_project_save, _project_grads)
