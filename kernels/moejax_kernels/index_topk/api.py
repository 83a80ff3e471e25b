"""Choice of keys for sparse attention."""

import jax.numpy as jnp

from moejax_kernels.attention.shapes import check, check_segments
from moejax_kernels.implementation import Implementation, choose
from moejax_kernels.index_topk import reference, xla

IMPLEMENTATIONS = {"xla": xla.index_topk, "reference": reference.index_topk}


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
      implementation: "reference", "xla", or None for the fastest that runs here. A name never falls back.

    Returns:
      ids_BLK, int32, indices along S (row positions, or pools), by falling score and of equal scores the lower first; -1 in the slots
      left over, which are the last. Scores are float32 (float64 for float64). Not differentiable: no gradient reaches the inputs.
      "xla" streams over tiles of keys: [L, S] never exists as a whole for long rows.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or topk below 1.

    Source: DeepSeek-V3.2, section 2.1 (lightning indexer); pools as in glm5_next.
    """
    op = "index_topk"
    sizes = check(
        op, integer=("key_end_BS",), index_q_BLJC=index_q_BLJC, index_k_BSC=index_k_BSC, index_w_BLJ=index_w_BLJ, key_end_BS=key_end_BS
    )
    check_segments(op, segments, sizes["B"], sizes["L"])
    if topk < 1:
        raise ValueError(f"{op}: topk={topk} must be at least 1.")
    if key_end_BS is None and sizes["S"] != sizes["L"]:
        raise ValueError(
            f"{op}: S={sizes['S']} keys for L={sizes['L']} tokens (index_k_BSC is {jnp.shape(index_k_BSC)}). "
            "Give one key per token, or key_end_BS with the last token of each pool."
        )
    return choose(op, implementation, IMPLEMENTATIONS)(
        index_q_BLJC, index_k_BSC, index_w_BLJ, topk=topk, segments=segments, key_end_BS=key_end_BS
    )
