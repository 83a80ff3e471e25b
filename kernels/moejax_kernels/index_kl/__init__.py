"""How far the index scores are from the attention that they stand for."""

from moejax_kernels.index_kl.api import index_kl

__all__ = ["index_kl"]
