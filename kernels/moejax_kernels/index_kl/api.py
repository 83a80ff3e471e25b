"""Loss of the sparse attention's index."""

from moejax_kernels import gpu
from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.index_kl import reference, xla
from moejax_kernels.index_topk.api import why_no_index
from moejax_kernels.shapes import check, check_heads, check_segments
from moejax_kernels.sparse_attention import widths

IMPLEMENTATIONS = {
    "triton_gpu": later("moejax_kernels.index_kl.triton_gpu", "index_kl"),
    "xla": xla.index_kl,
    "reference": reference.index_kl,
}


def index_kl(
    q_BLHC, k_BLGC, index_q_BLJC, index_k_BLC, index_w_BLJ, ids_BLK, *, scale, segments=None, implementation: Implementation | None = None
):
    """Per query `KL(p || softmax(index scores))`, where p is the attention, averaged over heads, that the index should foresee.

    Args:
      q_BLHC, k_BLGC: queries and keys of the attention; no gradient reaches them.
      index_q_BLJC, index_k_BLC, index_w_BLJ: as in index_topk (their own C), scaled alike.
      ids_BLK: row positions of the chosen keys, -1 is nothing: both sides are restricted to them and renormalised (the sparse stage);
        None: all visible keys (the dense warm-up).
      scale: factor of the attention's scores.
      segments: borders of the documents; None: one document per row.
      implementation: "reference", "xla", "triton_gpu" (see Raises), or None for the fastest that runs here. A name never falls back.

    Returns:
      kl_BL in nats, float32 (float64 for float64); 0 where a query sees nothing. The caller weights and averages. With ids each query
      reads its own K keys of both kinds, L*K*(G*C + C_index)*itemsize bytes a row; without, all keys once per block of queries.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      UnsupportedError: the named implementation cannot run these inputs here; the message says why. triton_gpu takes one dtype
        of bfloat16, float16 and float32, widths 64, 96, 128, 192 and 256, of k also 576.

    Source: DeepSeek-V3.2, section 2.1.1, equations 3 and 4.
    """
    op = "index_kl"
    sizes = check(op, integer=("ids_BLK",), q_BLHC=q_BLHC, k_BLGC=k_BLGC, ids_BLK=ids_BLK)
    index_sizes = check(op, index_q_BLJC=index_q_BLJC, index_k_BLC=index_k_BLC, index_w_BLJ=index_w_BLJ)
    check_heads(op, sizes["H"], sizes["G"])
    check_segments(op, segments, sizes["B"], sizes["L"])
    if (index_sizes["B"], index_sizes["L"]) != (sizes["B"], sizes["L"]):
        raise ValueError(
            f"{op}: the index has B={index_sizes['B']}, L={index_sizes['L']}, the attention B={sizes['B']}, L={sizes['L']}. "
            "Give both for the same tokens."
        )
    why_not = gpu.why_no_triton() or widths.why_not_these(q_BLHC, k_BLGC) or why_no_index(index_q_BLJC, index_k_BLC)
    run = choose(op, implementation, IMPLEMENTATIONS, why_not={"triton_gpu": why_not})
    return run(q_BLHC, k_BLGC, index_q_BLJC, index_k_BLC, index_w_BLJ, ids_BLK, scale=scale, segments=segments)
