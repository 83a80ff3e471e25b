"""Choice of the best keys of each query by the index scores of sparse attention."""

from moejax_kernels.index_topk.api import index_topk

__all__ = ["index_topk"]
