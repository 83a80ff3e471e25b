"""Public short convolution."""

import jax.numpy as jnp

from moejax_kernels import gpu
from moejax_kernels.causal_conv import reference, xla
from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.segments import Segments

IMPLEMENTATIONS = {
    "triton_gpu": later("moejax_kernels.causal_conv.triton_gpu", "causal_conv"),
    "xla": xla.causal_conv,
    "reference": reference.causal_conv,
}
GPU_DTYPES = (jnp.bfloat16, jnp.float32)


def causal_conv(
    x_BLD,
    weight_D4,
    *,
    segments: Segments | None = None,
    history_B3D=None,
    activation: str | None = "silu",
    implementation: Implementation | None = None,
):
    """Depthwise causal convolution over four tokens of a document, then an activation.

    Args:
      x_BLD: float array.
      weight_D4: taps per channel; the last one is the current token's.
      segments: packed documents; None: one document a row. Before a document's first token there are zeros, or its parent's last
        tokens. A padding token outputs 0.
      history_B3D: inputs of the three tokens before the row, for the document of the row's first token alone. None: zeros.
      activation: "silu" or None.
      implementation: "triton_gpu" (bfloat16 and float32), "xla", "reference", or None for the fastest that runs here. A name never falls back.

    Returns:
      y_BLD like x, computed in float32 (float64 where an input is) and rounded once, and history_B3D in x's dtype: the inputs of the
      row's last three tokens that are not padding, 0 where one is not of the last one's document. Moves 2*B*L*D*itemsize bytes
      forward, about twice that backward. Saves its inputs alone for backward; "triton_gpu" launches once forward, twice backward; for
      segments with parents it moves x, y and their gradients once more, to and from a row with three more tokens a segment.

    Raises:
      ValueError: shapes that do not fit each other, inputs that are not floating point, an unknown activation.
      UnsupportedError: "triton_gpu" with another dtype or without an NVIDIA GPU.

    Source: the short convolution of Mamba (Gu and Dao 2023) as in Gated DeltaNet and KDA, arXiv 2412.06464 and 2510.26692.
    """
    B, L, D = _shape(x_BLD)
    wanted = {
        "x_BLD": (x_BLD, (B, L, D)),
        "weight_D4": (weight_D4, (D, reference.TAPS)),
        "history_B3D": (history_B3D, (B, reference.TAPS - 1, D)),
    }
    for name, (array, shape) in wanted.items():
        if array is None:
            continue
        if array.shape != shape:
            raise ValueError(f"causal_conv: {name} must be {shape} beside x {x_BLD.shape}, got {array.shape}.")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"causal_conv: {name} must be floating point, got {array.dtype}. Cast it, for example to float32.")
    if segments is not None and segments.ids_BL.shape != (B, L):
        raise ValueError(
            f"causal_conv: segments are for {segments.ids_BL.shape} tokens, x has {(B, L)}. Build them from the ids of this batch."
        )
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"causal_conv: activation={activation!r} is unknown; use 'silu' or None.")
    why_not = {"triton_gpu": gpu.why_no_triton() or _why_no_kernel(x_BLD, weight_D4)}
    run = choose("causal_conv", implementation, IMPLEMENTATIONS, why_not=why_not)
    return run(x_BLD, weight_D4, segments=segments, history_B3D=history_B3D, activation=activation)


def _shape(x_BLD):
    if x_BLD.ndim != 3:
        raise ValueError(f"causal_conv: x is [B, L, D], got {x_BLD.shape}.")
    if 0 in x_BLD.shape:
        raise ValueError(f"causal_conv: x is {x_BLD.shape}; every size must be at least 1.")
    return x_BLD.shape


def _why_no_kernel(x_BLD, weight_D4) -> str | None:
    if x_BLD.dtype not in GPU_DTYPES or weight_D4.dtype not in GPU_DTYPES:
        return (
            f"needs bfloat16 or float32 inputs, got x_BLD {x_BLD.dtype} and weight_D4 {weight_D4.dtype}. "
            "Cast them, or pass implementation='xla'."
        )
    return None
