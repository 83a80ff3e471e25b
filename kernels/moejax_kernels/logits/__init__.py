"""Logits of some tokens and a piece of the vocabulary, and what a loss makes of them."""

from moejax_kernels.logits.api import logit_gradients, logit_sums

__all__ = ["logit_gradients", "logit_sums"]
