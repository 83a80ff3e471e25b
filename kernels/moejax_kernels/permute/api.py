"""Tokens to routed rows and back."""

import jax.numpy as jnp

from moejax_kernels import gpu
from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.permute import reference, xla
from moejax_kernels.permute.plan import RowPlan
from moejax_kernels.shapes import check

TRITON = "moejax_kernels.permute.triton_gpu"
PERMUTE = {"triton_gpu": later(TRITON, "permute"), "xla": xla.permute, "reference": reference.permute}
UNPERMUTE = {"triton_gpu": later(TRITON, "unpermute"), "xla": xla.unpermute, "reference": reference.unpermute}


def permute(x_TD, plan: RowPlan, *, implementation: Implementation | None = None):
    """Copies of tokens in the order of the routed rows: row r is x_TD[plan.source_R[r]].

    Args:
      x_TD: float array, one row per token.
      plan: which token fills which row.
      implementation: "reference", "xla", "triton_gpu", or None for the fastest that runs here. A name never falls back.

    Returns:
      x_RD, dtype of x; empty rows are exactly 0. Moves 2*R*D*itemsize bytes forward, (R + T)*D*itemsize backward, without a scatter.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      UnsupportedError: the named implementation cannot run these arrays on this device; the message says why.

    Source: the token permutation of Megatron Core's MoE layer (`moe_utils.permute`), as a gather in both directions.
    """
    check("permute", integer=("source_R", "slot_TK"), x_TD=x_TD, source_R=plan.source_R, slot_TK=plan.slot_TK)
    return choose("permute", implementation, PERMUTE, why_not={"triton_gpu": _why_no_triton(x_TD=x_TD)})(x_TD, plan)


def unpermute(y_RD, plan: RowPlan, probs_TK, *, implementation: Implementation | None = None):
    """Each token's weighted sum of its routed rows: y_TD[t] = sum_k probs_TK[t, k] * y_RD[plan.slot_TK[t, k]].

    Args:
      y_RD: float array of routed rows.
      plan: which token fills which row.
      probs_TK: float weight of each choice; what it holds for a slot of -1 does not matter.
      implementation: "reference", "xla", "triton_gpu", or None for the fastest that runs here. A name never falls back.

    Returns:
      y_TD, dtype of y, accumulated in float32 (float64 for float64); a token without rows gives exactly 0. Gradients for y_RD and
      probs_TK. Moves (R + T)*D*itemsize bytes forward, (2*R + T)*D*itemsize backward.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      UnsupportedError: the named implementation cannot run these arrays on this device; the message says why.

    Source: as for permute (`moe_utils.unpermute`).
    """
    check("unpermute", integer=("source_R", "slot_TK"), y_RD=y_RD, source_R=plan.source_R, slot_TK=plan.slot_TK, probs_TK=probs_TK)
    why_not = {"triton_gpu": _why_no_triton(y_RD=y_RD, probs_TK=probs_TK)}
    return choose("unpermute", implementation, UNPERMUTE, why_not=why_not)(y_RD, plan, probs_TK)


def _why_no_triton(**arrays) -> str | None:
    """As the end of a sentence; None where it runs."""
    for name, array in arrays.items():
        if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"sums in float32 and takes float32, bfloat16 or float16, got {name} in {array.dtype}. Pass implementation='xla'."
    return gpu.why_no_triton()
