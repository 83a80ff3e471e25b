"""Gated activations of MLPs."""

from moejax_kernels.gated_activation.api import gated_activation

__all__ = ["gated_activation"]
