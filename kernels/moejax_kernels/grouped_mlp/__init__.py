"""Gated MLPs of groups of rows, each group with its own weights."""

from moejax_kernels.grouped_mlp.api import grouped_mlp

__all__ = ["grouped_mlp"]
