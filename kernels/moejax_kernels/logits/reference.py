"""Definitions of what a loss makes of logits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class LogitSums(NamedTuple):
    """What a piece of the vocabulary tells of each token, at least float32."""

    peak_T: Any
    """Largest logit."""
    total_T: Any
    """Sum of exp(logit - peak)."""
    target_T: Any
    """Logit of the target, 0 if it is none of these columns."""


def capped(product, logit_cap: float):
    """Soft-capped logits, cap * tanh(product / cap); 0: as they are."""
    return logit_cap * jnp.tanh(product / logit_cap) if logit_cap else product


def logit_sums(hidden_TD, weight_DV, targets_T, skip, *, logit_cap):
    return sums_of(_logits(hidden_TD, weight_DV, logit_cap), targets_T, skip)


def logit_gradients(hidden_TD, weight_DV, targets_T, lse_T, slope_T, weights_T, skip, *, logit_cap):
    logits_TV = _logits(hidden_TD, weight_DV, logit_cap)
    return gradients_of(logits_TV, targets_T, lse_T, slope_T, weights_T, skip, logit_cap=logit_cap).astype(hidden_TD.dtype)


def sums_of(logits_TV, targets_T, skip) -> LogitSums:
    """Of logits that are there."""
    counts_V, is_target_TV = _columns(logits_TV, targets_T, skip)
    peak_T = jnp.max(logits_TV, -1, where=counts_V, initial=-jnp.inf)
    finite_T = jnp.maximum(peak_T, jnp.finfo(peak_T.dtype).min)  # no column counts: exp(-inf - finite) is 0
    total_T = jnp.sum(jnp.exp(logits_TV - finite_T[..., None]), -1, where=counts_V)
    return LogitSums(peak_T, total_T, jnp.sum(jnp.where(is_target_TV, logits_TV, 0), -1))  # a masked sum: -100 picks nothing


def gradients_of(logits_TV, targets_T, lse_T, slope_T, weights_T, skip, *, logit_cap):
    """Of logits that are there, to the products they were capped from."""
    counts_V, is_target_TV = _columns(logits_TV, targets_T, skip)
    dlogits_TV = slope_T[..., None] * jnp.exp(logits_TV - lse_T[..., None]) - jnp.where(is_target_TV, weights_T[..., None], 0)
    if logit_cap:
        dlogits_TV *= 1 - (logits_TV / logit_cap) ** 2
    return dlogits_TV if counts_V is None else jnp.where(counts_V, dlogits_TV, 0)


def _columns(logits_TV, targets_T, skip):
    """Which columns count (None: all), and which is each token's target."""
    columns_V = jnp.arange(logits_TV.shape[-1])
    is_target_TV = columns_V == targets_T[..., None]
    return (None, is_target_TV) if skip is None else (columns_V >= skip, is_target_TV & (columns_V >= skip))


def _logits(hidden_TD, weight_DV, logit_cap):
    inside = jnp.promote_types(hidden_TD.dtype, jnp.float32)
    product_TV = jnp.matmul(hidden_TD.astype(inside), weight_DV.astype(inside), precision=jax.lax.Precision.HIGHEST)
    return capped(product_TV, logit_cap)
