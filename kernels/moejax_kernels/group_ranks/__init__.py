"""Counting sort: the place of each row in its group."""

from moejax_kernels.group_ranks.api import group_ranks

__all__ = ["group_ranks"]
