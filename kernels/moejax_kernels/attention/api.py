"""Softmax attention over packed documents."""

import jax.numpy as jnp

from moejax_kernels import gpu
from moejax_kernels.attention import reference, xla
from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.shapes import check, check_heads, check_segments

IMPLEMENTATIONS = {
    "triton_gpu": later("moejax_kernels.attention.triton_gpu", "attention"),
    "xla": xla.attention,
    "reference": reference.attention,
}
GPU_WIDTHS = (64, 96, 128, 192, 256)
GPU_DTYPES = (jnp.bfloat16, jnp.float32)


def attention(q_BLHC, k_BSGC, v_BSGM, *, scale, segments=None, window=None, sinks_H=None, implementation: Implementation | None = None):
    """Causal attention inside documents: `softmax(scale * q.k) v` over the visible keys.

    Args:
      q_BLHC: float queries; H is a multiple of G, and query head h reads key head h // (H // G).
      k_BSGC: keys; v_BSGM: values. M may differ from C. Where S > L, keys begin before the queries: queries are the row's last L positions.
      scale: factor of the scores.
      segments: borders of the documents, over all S positions; None: one document per row.
      window: None, or the number of keys that a query sees: itself and the window-1 tokens before it.
      sinks_H: None, or one logit per head that takes part in the softmax's denominator and has no value (attention sinks).
      implementation: "reference", "xla", "triton_gpu" (widths 64, 96, 128, 192 and 256, bfloat16 or float32), or None for the fastest
        that runs here. A name never falls back.

    Returns:
      o_BLHM, dtype of q; float32 inside (float64 for float64). A token that sees nothing (padding) gives exactly 0, and finite numbers
      in another document have exactly no influence on values or gradients. Both versions work on tiles, leave out those that no query of a
      block sees, and save their inputs, o and a float32 per query and head. Moves q, k, v and o once forward, and these and their
      gradients once backward; k and v once more per block of queries where no cache holds them.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or a window below 1.
      UnsupportedError: "triton_gpu" without an NVIDIA GPU, or with other widths, dtypes or scales than it takes.

    cuDNN is not among them: JAX's entry to it (`jax.nn.dot_product_attention`) takes a length per row, but no documents inside a row
    other than as a mask of L x L.

    Source: Vaswani et al. 2017, section 3.2; tiles after FlashAttention, Dao et al. 2022; sinks as in gpt-oss.
    """
    sizes = check("attention", q_BLHC=q_BLHC, k_BSGC=k_BSGC, v_BSGM=v_BSGM, sinks_H=sinks_H)
    check_heads("attention", sizes["H"], sizes["G"])
    if sizes["S"] < sizes["L"]:
        raise ValueError(f"attention: S={sizes['S']} keys for L={sizes['L']} queries, which are the last L of S positions; S >= L fits.")
    check_segments("attention", segments, sizes["B"], sizes["S"])
    if window is not None and window < 1:
        raise ValueError(f"attention: window={window} must be at least 1 (1 sees the token itself alone), or None for no window.")
    why_not = {"triton_gpu": gpu.why_no_triton() or _why_no_kernel(q_BLHC, k_BSGC, v_BSGM, scale)}
    run = choose("attention", implementation, IMPLEMENTATIONS, why_not=why_not)
    return run(q_BLHC, k_BSGC, v_BSGM, scale=scale, segments=segments, window=window, sinks_H=sinks_H)


def _why_no_kernel(q_BLHC, k_BSGC, v_BSGM, scale) -> str | None:
    (*_, C), (*_, M) = q_BLHC.shape, v_BSGM.shape
    dtypes = [array.dtype for array in (q_BLHC, k_BSGC, v_BSGM)]
    if C not in GPU_WIDTHS or M not in GPU_WIDTHS:
        widths = f"C={C} and M={M} (q is {q_BLHC.shape}, v is {v_BSGM.shape})"
        return f"needs key and value widths of 64, 96, 128, 192 or 256, got {widths}. Pass implementation='xla'."
    if dtypes[0] not in GPU_DTYPES or len(set(dtypes)) > 1:
        return f"needs q, k and v all bfloat16 or all float32, got {', '.join(map(str, dtypes))}. Cast them, or pass implementation='xla'."
    if not isinstance(scale, int | float) or scale <= 0:
        return f"needs a positive Python number as scale, got {scale!r}. Pass one, or implementation='xla'."
    return None
