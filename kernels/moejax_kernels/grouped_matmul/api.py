"""Matrix products of groups of rows."""

import jax.numpy as jnp

from moejax_kernels import gpu
from moejax_kernels.attention.shapes import check
from moejax_kernels.grouped_matmul import reference, xla
from moejax_kernels.implementation import Implementation, choose, later

IMPLEMENTATIONS = {
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
      implementation: "reference", "xla", or None for the fastest that runs here. A name never falls back.

    Returns:
      y_RF, dtype of x, accumulated in float32 (float64 for float64). Padding rows are exactly 0, whatever x holds there, and get
      gradient 0; an empty group's weight gets gradient exactly 0. The work of "xla" follows the real rows, not R or E.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
    """
    check("grouped_matmul", integer=("group_sizes_E",), x_RD=x_RD, w_EDF=w_EDF, group_sizes_E=group_sizes_E)
    if jnp.promote_types(x_RD.dtype, w_EDF.dtype) != w_EDF.dtype:
        raise ValueError(f"grouped_matmul: x_RD is {x_RD.dtype}, w_EDF is {w_EDF.dtype}. Give w the dtype of x, or a wider one.")
    why_not = {"triton_gpu": _why_no_triton(x_RD)}
    return choose("grouped_matmul", implementation, IMPLEMENTATIONS, why_not=why_not)(x_RD, w_EDF, group_sizes_E)


def _why_no_triton(x_RD) -> str | None:
    """As the end of a sentence; None where it runs."""
    if x_RD.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"accumulates in float32 and takes float32, bfloat16 or float16, got x_RD in {x_RD.dtype}. Pass implementation='xla'."
    return gpu.why_no_triton()
