"""Attention over a few chosen keys per query."""

from moejax_kernels.sparse_attention.api import sparse_attention

__all__ = ["sparse_attention"]
