"""Choice of keys for sparse attention."""

import jax.numpy as jnp

from moejax_kernels import gpu
from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.index_topk import reference, xla
from moejax_kernels.shapes import check, check_segments

IMPLEMENTATIONS = {
    "triton_gpu": later("moejax_kernels.index_topk.triton_gpu", "index_topk"),
    "xla": xla.index_topk,
    "reference": reference.index_topk,
}
WIDTHS = (64, 96, 128, 192, 256)
"""Of index keys, for the GPU kernels."""
MOST_KEYS = 2048
"""Per query, for the GPU kernels."""


def index_topk(
    index_q_BLJC, index_k_BSC, index_w_BLJ, *, topk: int, segments=None, key_end_BS=None, implementation: Implementation | None = None
):
    """The topk visible keys with the highest index score `sum_j w_j relu(q_j . k)`. No scale is applied: put it into q or w.

    Args:
      index_q_BLJC: float index queries, J heads.
      index_k_BSC: index keys, one head. S = L, or the number of pools.
      index_w_BLJ: weight of each index head, of any sign.
      topk: K, keys per query; may exceed S.
      segments: borders of the documents; None: one document per row.
      key_end_BS: None: key s is the token at row position s. Else int, pools: row position of the last token that pool s covers,
        negative for no pool. A query sees a pool when it sees that token.
      implementation: "reference", "xla", "triton_gpu" (see Raises), or None for the fastest that runs here. A name never falls back.

    Returns:
      ids_BLK, int32, indices along S (row positions, or pools), by falling score and of equal scores the lower first; -1 in the slots
      left over, which are the last. Scores are float32 (float64 for float64). Not differentiable: no gradient reaches the inputs.
      "xla" and "triton_gpu" stream over tiles of keys: [L, S] never exists as a whole for long rows. Moves L*J*(C + 1)*itemsize and
      4*L*topk bytes a row, and the keys, S*C*itemsize, once per block of queries.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or topk no whole number of at least 1.
      UnsupportedError: the named implementation cannot run these inputs here; the message says why. triton_gpu takes one dtype
        of bfloat16, float16 and float32, widths 64, 96, 128, 192 and 256, topk up to 2048.

    Source: DeepSeek-V3.2, section 2.1 (lightning indexer); pools as in glm5_next.
    """
    op = "index_topk"
    sizes = check(
        op, integer=("key_end_BS",), index_q_BLJC=index_q_BLJC, index_k_BSC=index_k_BSC, index_w_BLJ=index_w_BLJ, key_end_BS=key_end_BS
    )
    check_segments(op, segments, sizes["B"], sizes["L"])
    if topk != int(topk) or topk < 1:
        raise ValueError(f"{op}: topk={topk} must be a whole number of at least 1.")
    if key_end_BS is None and sizes["S"] != sizes["L"]:
        raise ValueError(
            f"{op}: S={sizes['S']} keys for L={sizes['L']} tokens (index_k_BSC is {jnp.shape(index_k_BSC)}). "
            "Give one key per token, or key_end_BS with the last token of each pool."
        )
    why_not = {"triton_gpu": gpu.why_no_triton() or why_no_index(index_q_BLJC, index_k_BSC) or _why_no_topk(topk)}
    return choose(op, implementation, IMPLEMENTATIONS, why_not=why_not)(
        index_q_BLJC, index_k_BSC, index_w_BLJ, topk=topk, segments=segments, key_end_BS=key_end_BS
    )


def why_no_index(index_q_BLJC, index_k_BSC) -> str | None:
    """Why the GPU kernels cannot take these index queries and keys, and what can; None if they can."""
    names = {array.dtype.name for array in (index_q_BLJC, index_k_BSC)}
    if len(names) > 1 or not names <= {"bfloat16", "float16", "float32"}:
        return f"needs index q and k both in bfloat16, float16 or float32, got {', '.join(sorted(names))}. Pass implementation='xla'."
    num_heads, width = index_q_BLJC.shape[2:]
    if width not in WIDTHS:
        return (
            f"needs an index width of 64, 96, 128, 192 or 256, got C={width} (index_k is {index_k_BSC.shape}). Pass implementation='xla'."
        )
    if num_heads > 128 or 0 in index_q_BLJC.shape or 0 in index_k_BSC.shape:
        return f"needs 1 to 128 index heads, a token and a key, got index_q of {index_q_BLJC.shape}. Pass implementation='xla'."
    return None


def _why_no_topk(topk: int) -> str | None:
    return None if topk <= MOST_KEYS else f"chooses at most {MOST_KEYS} keys per query, got topk={topk}. Pass implementation='xla'."
