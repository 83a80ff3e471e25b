"""Softmax attention over packed documents."""

from moejax_kernels.attention import reference, xla
from moejax_kernels.attention.shapes import check, check_heads, check_segments
from moejax_kernels.implementation import Implementation, choose

IMPLEMENTATIONS = {"xla": xla.attention, "reference": reference.attention}


def attention(q_BLHC, k_BLGC, v_BLGM, *, scale, segments=None, window=None, sinks_H=None, implementation: Implementation | None = None):
    """Causal attention inside documents: `softmax(scale * q.k) v` over the visible keys.

    Args:
      q_BLHC: float queries; H is a multiple of G, and query head h reads key head h // (H // G).
      k_BLGC: keys; v_BLGM: values. M may differ from C.
      scale: factor of the scores.
      segments: borders of the documents; None: one document per row.
      window: None, or the number of keys that a query sees: itself and the window-1 tokens before it.
      sinks_H: None, or one logit per head that takes part in the softmax's denominator and has no value (attention sinks).
      implementation: "reference", "xla", or None for the fastest that runs here. A name never falls back.

    Returns:
      o_BLHM, dtype of q; float32 inside (float64 for float64). A token that sees nothing (padding) gives exactly 0, and what lies in
      another document has exactly no influence on values or gradients. "xla" saves its inputs for backward and recomputes blocks of
      queries; [L, L] exists as a whole only for short rows.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or a window below 1.

    Source: Vaswani et al. 2017, section 3.2; sinks as in gpt-oss.
    """
    sizes = check("attention", q_BLHC=q_BLHC, k_BLGC=k_BLGC, v_BLGM=v_BLGM, sinks_H=sinks_H)
    check_heads("attention", sizes["H"], sizes["G"])
    check_segments("attention", segments, sizes["B"], sizes["L"])
    if window is not None and window < 1:
        raise ValueError(f"attention: window={window} must be at least 1 (1 sees the token itself alone), or None for no window.")
    run = choose("attention", implementation, IMPLEMENTATIONS)
    return run(q_BLHC, k_BLGC, v_BLGM, scale=scale, segments=segments, window=window, sinks_H=sinks_H)
