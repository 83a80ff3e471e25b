"""Softmax attention over packed documents, with window, sinks and grouped key heads."""

from moejax_kernels.attention.api import attention

__all__ = ["attention"]
