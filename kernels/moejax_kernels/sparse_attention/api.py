"""Attention over chosen keys."""

from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.shapes import check, check_heads, check_segments
from moejax_kernels.sparse_attention import reference, widths, xla

IMPLEMENTATIONS = {
    "triton_gpu": later("moejax_kernels.sparse_attention.triton_gpu", "sparse_attention"),
    "xla": xla.sparse_attention,
    "reference": reference.sparse_attention,
}


def sparse_attention(
    q_BLHC, k_BLGC, v_BLGM, ids_BLK, *, scale, value_dim: int | None = None, segments=None, implementation: Implementation | None = None
):
    """Attention of each query over the keys that its ids name; all heads share them.

    Args:
      q_BLHC: float queries; H is a multiple of G, and query head h reads key head h // (H // G).
      k_BLGC: keys.
      v_BLGM: values, or None: the first `value_dim` channels of k (the MLA latent, 512 of 576).
      ids_BLK: integer row positions of the chosen keys, none twice; -1 is nothing. An id that the query may not see (later, another
        document, padding) is nothing too, so a wrong id leaks nothing.
      scale: factor of the scores.
      value_dim: M, given with v_BLGM=None and only then.
      segments: borders of the documents; None: one document per row.
      implementation: "reference", "xla", "triton_gpu" (see Raises), or None for the fastest that runs here. A name never falls back.

    Returns:
      o_BLHM, dtype of q; float32 inside (float64 for float64). A query without keys gives exactly 0. Each query reads its own keys:
      L*G*K*(C + M)*itemsize bytes a row forward (value_dim: L*K*C), beside q, o and the ids once; backward as much again, and as many
      float32 sums for the gradients of keys and values. docs/kernels.md lists what "triton_gpu" keeps for that.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or value_dim with v, without v missing or above C.
      UnsupportedError: the named implementation cannot run these inputs here; the message says why. triton_gpu takes one dtype
        of bfloat16, float16 and float32, widths 64, 96, 128, 192 and 256, of keys also 576 and of values 512.

    Source: DeepSeek-V3.2, section 2.1.
    """
    op = "sparse_attention"
    sizes = check(op, integer=("ids_BLK",), q_BLHC=q_BLHC, k_BLGC=k_BLGC, v_BLGM=v_BLGM, ids_BLK=ids_BLK)
    check_heads(op, sizes["H"], sizes["G"])
    check_segments(op, segments, sizes["B"], sizes["L"])
    if (v_BLGM is None) == (value_dim is None):
        raise ValueError(
            f"{op}: give either v_BLGM or value_dim (values are the first channels of k), got "
            f"{'neither' if value_dim is None else f'v_BLGM and value_dim={value_dim}'}."
        )
    if value_dim is not None and not 0 < value_dim <= sizes["C"]:
        raise ValueError(f"{op}: value_dim={value_dim} must lie between 1 and C={sizes['C']}, the channels of k.")
    why_not = {"triton_gpu": widths.why_no_triton(q_BLHC, k_BLGC, v_BLGM, ids_BLK, value_dim)}
    run = choose(op, implementation, IMPLEMENTATIONS, why_not=why_not)
    return run(q_BLHC, k_BLGC, v_BLGM, ids_BLK, scale=scale, value_dim=value_dim, segments=segments)
