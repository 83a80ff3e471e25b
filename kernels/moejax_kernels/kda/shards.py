"""What a context shard of KDA hands on."""

from moejax_kernels import delta_inputs, delta_shards, gpu
from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.kda import reference, xla
from moejax_kernels.segments import Segments

IMPLEMENTATIONS = {"triton_gpu": later("moejax_kernels.kda.triton_gpu", "kda"), "xla": xla.kda, "reference": reference.kda}


def kda_shard_summary(
    k_BLGC,
    v_BLHM,
    g_BLHC,
    beta_BLH,
    *,
    segments: Segments | None = None,
    min_log_decay: float | None = None,
    implementation: Implementation | None = None,
):
    """What a shard of a row does to the state that enters it: `state after the shard = transition @ state before it + state`.

    Shards of a row are folded from left to right: the state before a shard is the one after its left neighbour where the shard's first
    token goes on with the neighbour's last document, and 0 where it starts a document; that state is `kda`'s initial_state_BHCM.

    Args:
      k_BLGC, v_BLHM, g_BLHC, beta_BLH: this shard's tokens, as in `kda`.
      segments: the shard's part of the documents, built from its own ids; None: one document a row. The incoming state belongs to
        the first token's document alone.
      min_log_decay: as in `kda`.
      implementation: "triton_gpu" (as in `kda`, with value channels M + C of a width that it takes), "xla", "reference", or None for
        the fastest that runs here. A name never falls back.

    Returns:
      transition_BHCC, [to, from], and state_BHCM, the state after the shard from a zero state, in the dtype of the computation: float32,
      or float64 where an input is. The transition is 0 where the document at the shard's end (padding left out) is not the one at its
      start, and the identity where the row is nothing but padding. A pass costs what `kda` costs with M + C value channels and no
      outputs; H*C*(C+M) numbers a row go to the next shard, whatever L is. Differentiable in all inputs.

    Raises:
      ValueError: shapes that do not fit each other, or inputs that are not floating point.
      UnsupportedError: "triton_gpu" with other widths or dtypes, or without an NVIDIA GPU.

    Source: Yang et al. 2024, arXiv 2412.06464; context parallelism as in fla-org/flash-linear-attention `fla/ops/cp`.
    """
    delta_inputs.check("kda_shard_summary", k_BLGC, k_BLGC, v_BLHM, g_BLHC, beta_BLH, segments, None, decay_per_channel=True)
    why_not = gpu.why_no_triton() or delta_shards.why_not_triton(k_BLGC, v_BLHM, g_BLHC, beta_BLH)
    run = choose("kda_shard_summary", implementation, IMPLEMENTATIONS, why_not={"triton_gpu": why_not})
    return delta_shards.summary(run, k_BLGC, v_BLHM, g_BLHC, beta_BLH, segments=segments, min_log_decay=min_log_decay)
