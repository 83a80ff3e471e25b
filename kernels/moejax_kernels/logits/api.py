"""What a loss makes of logits: sums for the logsumexp, and gradients, without the logits as a result."""

import jax.numpy as jnp

from moejax_kernels import gpu
from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.logits import reference, xla
from moejax_kernels.logits.reference import LogitSums

SUMS = {
    "xla": xla.logit_sums,
    "triton_gpu": later("moejax_kernels.logits.triton_gpu", "logit_sums"),
    "reference": reference.logit_sums,
}
GRADIENTS = {
    "xla": xla.logit_gradients,
    "triton_gpu": later("moejax_kernels.logits.triton_gpu", "logit_gradients"),
    "reference": reference.logit_gradients,
}
GPU_DTYPES = (jnp.bfloat16, jnp.float32)


def logit_sums(
    hidden_TD, weight_DV, targets_T, *, skip=None, logit_cap: float = 0.0, implementation: Implementation | None = None
) -> LogitSums:
    """Each token's largest logit, sum of exponentials and target logit over a piece of the vocabulary.

    Args:
      hidden_TD: float [..., D].
      weight_DV: columns of the output projection, in the same dtype.
      targets_T: integers [...], numbered from the first of these columns; any other value is no target here.
      skip: that many columns from the first do not count, an integer scalar; None: all do.
      logit_cap: logits are cap * tanh(product / cap); 0: the product.
      implementation: "reference", "xla", "triton_gpu" (bfloat16 and float32), or None for "xla": the product is most of the work, and that
        is a library's there; "triton_gpu" writes no float32 logits. A name never falls back.

    Returns:
      LogitSums, at least float32. It has no gradient of its own under "triton_gpu"; `logit_gradients` is made for that.

    Raises:
      ValueError: shapes or dtypes that do not fit.
      UnsupportedError: the named implementation cannot run these inputs on this device; the message says why.

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009.
    """
    _check("logit_sums", hidden_TD, weight_DV, targets_T=targets_T)
    run = choose("logit_sums", implementation, SUMS, why_not={"triton_gpu": _why_no_triton(hidden_TD)})
    return run(hidden_TD, weight_DV, targets_T, skip, logit_cap=logit_cap)


def logit_gradients(
    hidden_TD,
    weight_DV,
    targets_T,
    lse_T,
    slope_T,
    weights_T,
    *,
    skip=None,
    logit_cap: float = 0.0,
    implementation: Implementation | None = None,
):
    """slope * exp(logit - lse) - weight * (1 at the target), as a gradient of the product before the cap; 0 in columns that do not count.

    Args:
      hidden_TD, weight_DV, targets_T, skip, logit_cap, implementation: as in `logit_sums`.
      lse_T: logsumexp over the whole vocabulary.
      slope_T, weights_T: floats of each token.

    Returns:
      [..., V] in the hidden states' dtype, float32 inside, rounded once.
    """
    _check("logit_gradients", hidden_TD, weight_DV, targets_T=targets_T, lse_T=lse_T, slope_T=slope_T, weights_T=weights_T)
    run = choose("logit_gradients", implementation, GRADIENTS, why_not={"triton_gpu": _why_no_triton(hidden_TD)})
    return run(hidden_TD, weight_DV, targets_T, lse_T, slope_T, weights_T, skip, logit_cap=logit_cap)


def _check(op: str, hidden_TD, weight_DV, **of_tokens) -> None:
    if weight_DV.ndim != 2 or hidden_TD.shape[-1] != weight_DV.shape[0] or hidden_TD.dtype != weight_DV.dtype:
        raise ValueError(
            f"{op}: hidden_TD is {hidden_TD.dtype} {hidden_TD.shape}, weight_DV is {weight_DV.dtype} {weight_DV.shape}. "
            "Give both in one dtype and with one width D."
        )
    if not jnp.issubdtype(hidden_TD.dtype, jnp.floating) or 0 in weight_DV.shape:
        raise ValueError(
            f"{op}: hidden_TD is {hidden_TD.dtype} and weight_DV {weight_DV.shape}; give floats, and a D and a V of at least 1."
        )
    for name, array in of_tokens.items():
        if name == "targets_T" and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{op}: targets_T must hold integers, got {array.dtype}.")
        if array.shape != hidden_TD.shape[:-1]:
            raise ValueError(f"{op}: {name} is {array.shape}, and there is one for each token of {hidden_TD.shape[:-1]}.")


def _why_no_triton(hidden_TD) -> str | None:
    """As the end of a sentence; None where it runs."""
    if hidden_TD.dtype not in GPU_DTYPES:
        return gpu.why_no_triton() or f"needs bfloat16 or float32 inputs, got {hidden_TD.dtype}. Cast them, or pass implementation='xla'."
    return gpu.why_no_triton()
