"""Public Gated DeltaNet."""

from moejax_kernels import delta_inputs, gpu
from moejax_kernels.gated_delta import reference, xla
from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.segments import Segments

IMPLEMENTATIONS = {
    "triton_gpu": later("moejax_kernels.gated_delta.triton_gpu", "gated_delta"),
    "xla": xla.gated_delta,
    "reference": reference.gated_delta,
}


def gated_delta(
    q_BLGC,
    k_BLGC,
    v_BLHM,
    g_BLH,
    beta_BLH,
    *,
    segments: Segments | None = None,
    initial_state_BHCM=None,
    scale: float | None = None,
    implementation: Implementation | None = None,
):
    """Gated delta rule with a decay per head: `S <- (I - beta k k') exp(g) S + beta k v'`, then `o = scale S'q`.

    Args:
      q_BLGC, k_BLGC: float arrays, normalised by the caller. H is a multiple of G; head h reads group h // (H // G).
      v_BLHM: float array of values.
      g_BLH: log-decay in nats a token, finite and <= 0.
      beta_BLH: write strength, 0..1 (2 with negative eigenvalues).
      segments: packed documents; None: one document a row. A document starts from a zero state, one with a parent from the state
        after the parent's last token. A padding token outputs 0 and the state passes it by unchanged.
      initial_state_BHCM: state before the row's first token, for that token's document alone. None: zeros.
      scale: factor of q; None: C**-0.5.
      implementation: "triton_gpu" (widths 64, 96, 128, 192, 256; q, k, v in bfloat16 or float32), "xla", "reference", or None for the
        fastest that runs here. A name never falls back.

    Returns:
      o_BLHM in v's dtype, and final_state_BHCM, the state after the row's last token that is not padding, in the dtype of the
      computation: float32, or float64 where an input is. "xla" works on blocks that fit a cache and saves, per token and head, the
      inputs, 32 + M numbers, and a state per 16 tokens. "triton_gpu" keeps, beside the inputs, two 64 x 64 matrices and one state
      per head and 64 tokens, in v's dtype: 2*(128 + C*M/64) bytes a token and head in bfloat16.
      Moves the inputs, o and what is kept once forward; these, do and the inputs' gradients once backward. Segments with parents fill
      whole chunks of their own (16 tokens in "xla", 64 in "triton_gpu"), for which inputs, o and gradients are moved once more.

    Raises:
      ValueError: shapes that do not fit each other, or inputs that are not floating point.
      UnsupportedError: "triton_gpu" with other widths or dtypes, or without an NVIDIA GPU.

    Source: Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464; fla-org/flash-linear-attention `fla/ops/gated_delta_rule/naive.py`.
    """
    delta_inputs.check("gated_delta", q_BLGC, k_BLGC, v_BLHM, g_BLH, beta_BLH, segments, initial_state_BHCM, decay_per_channel=False)
    why_not = gpu.why_no_triton() or delta_inputs.why_not_triton(q_BLGC, k_BLGC, v_BLHM, g_BLH, beta_BLH)
    run = choose("gated_delta", implementation, IMPLEMENTATIONS, why_not={"triton_gpu": why_not})
    return run(q_BLGC, k_BLGC, v_BLHM, g_BLH, beta_BLH, segments=segments, initial_state_BHCM=initial_state_BHCM, scale=scale)
