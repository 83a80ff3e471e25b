"""Gated MLPs of groups of rows."""

import functools

import jax
import jax.numpy as jnp

from moejax_kernels.gated_activation import api as activations
from moejax_kernels.grouped_matmul import api as products
from moejax_kernels.grouped_mlp import composed, reference, xla
from moejax_kernels.implementation import Implementation, choose
from moejax_kernels.shapes import check

IMPLEMENTATIONS = {
    "mosaic_gpu": functools.partial(composed.grouped_mlp, matmul="mosaic_gpu"),
    "triton_gpu": functools.partial(composed.grouped_mlp, matmul="triton_gpu"),
    "xla": xla.grouped_mlp,
    "reference": reference.grouped_mlp,
}


def grouped_mlp(
    x_RD,
    gate_EDF,
    up_EDF,
    down_EFD,
    group_sizes_E,
    *,
    kind: activations.Kind = "swiglu",
    limit=None,
    beta=None,
    linear_beta=None,
    implementation: Implementation | None = None,
):
    """The experts of a mixture: `gated_activation(x gate, x up) down` of each row, with the weights of the row's group.

    Args:
      x_RD: float rows sorted by group, as grouped_matmul takes them; those beyond the sum of the sizes are padding.
      gate_EDF, up_EDF, down_EFD: one matrix per group, in x's dtype or a wider one (a master weight: its gradient is not rounded).
      group_sizes_E: integers >= 0 whose sum is at most R.
      kind, limit, beta, linear_beta: the activation, see gated_activation.
      implementation: "reference", "xla", "triton_gpu", "mosaic_gpu" (their grouped matmul with the Triton activation), or None for the
        fastest that runs here. A name never falls back.

    Returns:
      y_RD, dtype of x. Equals grouped_matmul and gated_activation put together, the same products rounded at the same places; padding
      rows are exactly 0 and get gradient 0. Saves its inputs and the results of gate and up (2*R*F*itemsize bytes) for backward.
      "xla" moves (2*R*D + 2*R*F + 3*E*D*F)*itemsize bytes forward where a block's inside stays in the cache, about twice that
      backward; the GPU versions 2*R*F*itemsize more forward, for the activation's result.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or an activation's number that is missing.
      UnsupportedError: the named implementation cannot run these arrays on this device; the message says why.

    Source: SwiGLU experts as in Mixtral (arXiv 2401.04088); what is kept, as in SonicMoE.
    """
    op = "grouped_mlp"
    check(op, integer=("group_sizes_E",), x_RD=x_RD, gate_EDF=gate_EDF, up_EDF=up_EDF, down_EFD=down_EFD, group_sizes_E=group_sizes_E)
    for name, w in {"gate_EDF": gate_EDF, "up_EDF": up_EDF, "down_EFD": down_EFD}.items():
        if jnp.promote_types(x_RD.dtype, w.dtype) != w.dtype:
            raise ValueError(f"{op}: x_RD is {x_RD.dtype}, {name} is {w.dtype}. Give it the dtype of x, or a wider one.")
    activations.require_numbers(op, kind, limit=limit, beta=beta)
    why_not = {"mosaic_gpu": _why_no_mosaic(x_RD, gate_EDF, down_EFD), "triton_gpu": _why_no_triton(x_RD)}
    run = choose(op, implementation, IMPLEMENTATIONS, why_not=why_not)
    return run(x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, kind=kind, limit=limit, beta=beta, linear_beta=linear_beta)


def _why_no_mosaic(x_RD, gate_EDF, down_EFD) -> str | None:
    """As the end of a sentence; None where both products and the activation run."""
    h_RF = jax.ShapeDtypeStruct((x_RD.shape[0], down_EFD.shape[1]), x_RD.dtype)
    return products.why_no_mosaic(x_RD, gate_EDF) or products.why_no_mosaic(h_RF, down_EFD) or activations.why_no_triton(x_RD)


def _why_no_triton(x_RD) -> str | None:
    return products.why_no_triton(x_RD) or activations.why_no_triton(x_RD)
