"""Which implementations each op has, and why one cannot run on this machine."""

from moejax_kernels import gpu
from moejax_kernels.attention import api as attention
from moejax_kernels.causal_conv import api as causal_conv
from moejax_kernels.gated_activation import api as gated_activation
from moejax_kernels.gated_delta import api as gated_delta
from moejax_kernels.gated_delta import shards as gated_delta_shards
from moejax_kernels.group_ranks import api as group_ranks
from moejax_kernels.grouped_matmul import api as grouped_matmul
from moejax_kernels.grouped_mlp import api as grouped_mlp
from moejax_kernels.index_kl import api as index_kl
from moejax_kernels.index_topk import api as index_topk
from moejax_kernels.kda import api as kda
from moejax_kernels.kda import shards as kda_shards
from moejax_kernels.logits import api as logits
from moejax_kernels.permute import api as permute
from moejax_kernels.sparse_attention import api as sparse_attention

TABLES = {
    "attention": attention.IMPLEMENTATIONS,
    "causal_conv": causal_conv.IMPLEMENTATIONS,
    "gated_activation": gated_activation.IMPLEMENTATIONS,
    "gated_delta": gated_delta.IMPLEMENTATIONS,
    "gated_delta_shard_summary": gated_delta_shards.IMPLEMENTATIONS,
    "group_ranks": group_ranks.IMPLEMENTATIONS,
    "grouped_matmul": grouped_matmul.IMPLEMENTATIONS,
    "grouped_mlp": grouped_mlp.IMPLEMENTATIONS,
    "index_kl": index_kl.IMPLEMENTATIONS,
    "index_topk": index_topk.IMPLEMENTATIONS,
    "kda": kda.IMPLEMENTATIONS,
    "kda_shard_summary": kda_shards.IMPLEMENTATIONS,
    "logit_gradients": logits.GRADIENTS,
    "logit_sums": logits.SUMS,
    "permute": permute.PERMUTE,
    "sparse_attention": sparse_attention.IMPLEMENTATIONS,
    "unpermute": permute.UNPERMUTE,
}
"""Op -> implementations, the fastest first."""


def survey() -> dict[str, dict[str, str | None]]:
    """Op -> implementation -> why it cannot run on this machine, whatever the arrays; None where it can."""
    why_not = {"triton_gpu": gpu.why_no_triton(), "mosaic_gpu": gpu.why_no_mosaic()}
    return {op: {name: why_not.get(name) for name in table} for op, table in TABLES.items()}
