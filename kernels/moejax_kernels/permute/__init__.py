"""Tokens to routed rows and back."""

from moejax_kernels.permute.api import permute, unpermute
from moejax_kernels.permute.plan import RowPlan

__all__ = ["RowPlan", "permute", "unpermute"]
