"""Kernels of moejax: definitions, portable XLA versions and GPU versions of each op."""

from moejax_kernels.attention.api import attention
from moejax_kernels.causal_conv.api import causal_conv
from moejax_kernels.gated_activation.api import gated_activation
from moejax_kernels.gated_delta.api import gated_delta
from moejax_kernels.gated_delta.shards import gated_delta_shard_summary
from moejax_kernels.group_ranks.api import group_ranks
from moejax_kernels.grouped_matmul.api import grouped_matmul
from moejax_kernels.grouped_mlp.api import grouped_mlp
from moejax_kernels.implementation import Implementation, UnsupportedError
from moejax_kernels.index_kl.api import index_kl
from moejax_kernels.index_topk.api import index_topk
from moejax_kernels.kda.api import kda
from moejax_kernels.kda.shards import kda_shard_summary
from moejax_kernels.logits.api import logit_gradients, logit_sums
from moejax_kernels.permute.api import permute, unpermute
from moejax_kernels.permute.plan import RowPlan
from moejax_kernels.segments import Segments
from moejax_kernels.sparse_attention.api import sparse_attention

__all__ = [
    "Implementation",
    "RowPlan",
    "Segments",
    "UnsupportedError",
    "attention",
    "causal_conv",
    "gated_activation",
    "gated_delta",
    "gated_delta_shard_summary",
    "group_ranks",
    "grouped_matmul",
    "grouped_mlp",
    "index_kl",
    "index_topk",
    "kda",
    "kda_shard_summary",
    "logit_gradients",
    "logit_sums",
    "permute",
    "sparse_attention",
    "unpermute",
]
