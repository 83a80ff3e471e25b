"""Gated activations of MLPs."""

from typing import Literal

import jax.numpy as jnp

from moejax_kernels import gpu
from moejax_kernels.gated_activation import reference, xla
from moejax_kernels.implementation import Implementation, choose, later

Kind = Literal["swiglu", "swiglu_clamped", "situ"]
NEEDS = {"swiglu": (), "swiglu_clamped": ("limit",), "situ": ("beta",)}
IMPLEMENTATIONS = {
    "triton_gpu": later("moejax_kernels.gated_activation.triton_gpu", "gated_activation"),
    "xla": xla.gated_activation,
    "reference": reference.gated_activation,
}
GPU_DTYPES = (jnp.bfloat16, jnp.float32)


def gated_activation(
    gate_RF, up_RF, *, kind: Kind = "swiglu", limit=None, beta=None, linear_beta=None, implementation: Implementation | None = None
):
    """What stands between the two matmuls of a gated MLP.

    - swiglu: `silu(gate) * up`
    - swiglu_clamped: the same of `min(gate, limit)` and `clip(up, -limit, limit)`
    - situ: `beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)`; linear_beta None or 0: plain `up`

    Args:
      gate_RF, up_RF: float arrays of one shape [..., F] and dtype.
      limit, beta, linear_beta: positive numbers, as the kind needs them.
      implementation: "reference", "xla", "triton_gpu" (bfloat16 and float32), or None for the fastest that runs here. A name never falls back.

    Returns:
      Array like `gate_RF`; float32 inside (float64 for float64), rounded once. Saves its two inputs alone for backward.
      "triton_gpu" moves 3*R*F*itemsize bytes forward in one launch, 5*R*F*itemsize backward in one.

    Raises:
      ValueError: an unknown kind, a number that the kind needs is missing or not positive, shapes or dtypes that differ.
      UnsupportedError: "triton_gpu" without an NVIDIA GPU, or with another dtype.

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (swiglu); gpt-oss (clamped); Kimi K3, arXiv 2607.24653 (situ).
    """
    op = "gated_activation"
    if gate_RF.shape != up_RF.shape or gate_RF.dtype != up_RF.dtype:
        raise ValueError(f"{op}: gate_RF is {gate_RF.dtype} {gate_RF.shape}, up_RF is {up_RF.dtype} {up_RF.shape}. Give both alike.")
    if not jnp.issubdtype(gate_RF.dtype, jnp.floating):
        raise ValueError(f"{op}: gate_RF and up_RF must hold floats, got {gate_RF.dtype}.")
    require_numbers(op, kind, limit=limit, beta=beta)
    run = choose(op, implementation, IMPLEMENTATIONS, why_not={"triton_gpu": why_no_triton(gate_RF)})
    return run(gate_RF, up_RF, kind=kind, limit=limit, beta=beta, linear_beta=linear_beta)


def require_numbers(op: str, kind: str, **numbers) -> None:
    """Raises ValueError unless the kind is known and has the numbers that it needs."""
    if kind not in NEEDS:
        raise ValueError(f"{op}: kind={kind!r} is unknown; known are {', '.join(NEEDS)}.")
    for name in NEEDS[kind]:
        if numbers[name] is None or numbers[name] <= 0:
            raise ValueError(f"{op}: kind={kind!r} needs {name} > 0, got {name}={numbers[name]}.")


def why_no_triton(gate_RF) -> str | None:
    """As the end of a sentence; None where it runs."""
    if gate_RF.dtype not in GPU_DTYPES:
        return gpu.why_no_triton() or f"needs bfloat16 or float32 inputs, got {gate_RF.dtype}. Cast them, or pass implementation='xla'."
    return gpu.why_no_triton()
