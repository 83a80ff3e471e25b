"""Kernels of moejax: definitions, portable XLA versions and GPU versions of each op."""
