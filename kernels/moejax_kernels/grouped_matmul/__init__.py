"""Matrix products of groups of rows, each with its own weight."""

from moejax_kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
