"""Matrix products of groups of rows."""

import jax.numpy as jnp

from moejax_kernels import gpu
from moejax_kernels.grouped_matmul import reference, xla
from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.shapes import check

IMPLEMENTATIONS = {
    "mosaic_gpu": later("moejax_kernels.grouped_matmul.mosaic_gpu", "grouped_matmul"),
    "triton_gpu": later("moejax_kernels.grouped_matmul.triton_gpu", "grouped_matmul"),
    "xla": xla.grouped_matmul,
    "reference": reference.grouped_matmul,
}


def grouped_matmul(x_RD, w_EDF, group_sizes_E, *, implementation: Implementation | None = None):
    """Rows sorted by group: the first group_sizes_E[0] rows times w_EDF[0], the next group_sizes_E[1] rows times w_EDF[1], and so on.

    Args:
      x_RD: float rows; those beyond the sum of the sizes are padding.
      w_EDF: one matrix per group, in x's dtype or a wider one (a master weight: cast for the product, its gradient is not rounded).
      group_sizes_E: integers >= 0 whose sum is at most R. Not checked: they exist on the device only.
      implementation: "reference", "xla", "triton_gpu", "mosaic_gpu" (Hopper), or None for the fastest that runs here. A name never falls back.

    Returns:
      y_RF, dtype of x, accumulated in float32 (float64 for float64). Padding rows are exactly 0, whatever x holds there, and get
      gradient 0; an empty group's weight gets gradient exactly 0. The work follows the real rows, not R or E ("reference" aside);
      in "xla" a group pays for whole blocks of 32 rows, and the last turn of blocks of a size for blocks that are not there. Moves
      (R*D + R*F + E*D*F)*itemsize bytes forward, twice that backward, where rows and weights meet in the cache.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      UnsupportedError: the named implementation cannot run these arrays on this device; the message says why.

    Source: the block-sparse products of MegaBlocks, Gale et al. 2022 (arXiv 2211.15841), with rows grouped instead of padded.
    """
    check("grouped_matmul", integer=("group_sizes_E",), x_RD=x_RD, w_EDF=w_EDF, group_sizes_E=group_sizes_E)
    if jnp.promote_types(x_RD.dtype, w_EDF.dtype) != w_EDF.dtype:
        raise ValueError(f"grouped_matmul: x_RD is {x_RD.dtype}, w_EDF is {w_EDF.dtype}. Give w the dtype of x, or a wider one.")
    why_not = {"mosaic_gpu": why_no_mosaic(x_RD, w_EDF), "triton_gpu": why_no_triton(x_RD)}
    return choose("grouped_matmul", implementation, IMPLEMENTATIONS, why_not=why_not)(x_RD, w_EDF, group_sizes_E)


def why_no_mosaic(x_RD, w_EDF) -> str | None:
    """As the end of a sentence; None where it runs."""
    (num_rows, width), (num_groups, _, hidden) = x_RD.shape, w_EDF.shape
    if reason := gpu.why_no_mosaic():
        return reason
    if x_RD.dtype not in (jnp.bfloat16, jnp.float16):
        return f"multiplies bfloat16 or float16, got x_RD in {x_RD.dtype}. Pass implementation='triton_gpu'."
    if width % 64 or hidden % 64 or 0 in (num_groups, width, hidden):
        return f"needs E > 0 and D and F multiples of 64, got w_EDF {w_EDF.shape}. Pad them, or pass implementation='triton_gpu'."
    if num_rows % 8 or num_rows < 64:
        return f"needs R a multiple of 8 and at least 64, got x_RD {x_RD.shape}. Pad the rows, or pass implementation='triton_gpu'."
    return None


def why_no_triton(x_RD) -> str | None:
    """As the end of a sentence; None where it runs."""
    if x_RD.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"accumulates in float32 and takes float32, bfloat16 or float16, got x_RD in {x_RD.dtype}. Pass implementation='xla'."
    return gpu.why_no_triton()
