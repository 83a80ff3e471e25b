"""How the router's correction bias moves: once per optimizer step, on statistics of the whole global batch."""

import jax
import jax.numpy as jnp


def sign_update(bias_E, counts_E, rate: float):
    """The bias moved by `rate` up where an expert got less than the mean load, down where it got more.

    Args:
      bias_E: float bias [..., E]; leading dims are stacked layers.
      counts_E: integers [..., E], routed rows per expert of the global batch, valid tokens alone.
      rate: step, in units of the score.

    Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing" (2408.15664), algorithm 1.
    """
    load_E = counts_E.astype(bias_E.dtype)
    return bias_E + rate * jnp.sign(load_E.mean(-1, keepdims=True) - load_E)


def margin_histogram(scores_TE, bias_E, times_T, num_chosen: int, *, num_bins: int = 1000):
    """How far the bias of each expert would have to rise to win each token: int32 counts [E, num_bins].

    The margin of token i and expert j is alpha_i - s_ij, with alpha_i the (K+1)-th largest of s_i + b: j is chosen iff b_j is above.
    Histograms of parts of a batch, made with the same bias, add up exactly to that of the whole.

    Args:
      scores_TE: router scores in [0, 1] without the bias; a topology bias that the tokens were routed with is part of them.
      bias_E: the bias with which the tokens were routed.
      times_T: integers or bools, how often each token counts; 0 for padding.
      num_chosen: experts per token (K). With K = E all are chosen whatever the bias: alpha is the smallest of s_i + b then.
      num_bins: bins between min(bias) - 1 and max(bias) + 1, which hold every margin of scores in [0, 1]; the outer ones take what a
        topology bias moves beyond.

    Source: Kimi K3 (2607.24653), section 2.3.3, eqs. 13 and 14.
    """
    num_experts = scores_TE.shape[-1]
    alpha_T = jax.lax.top_k(scores_TE + bias_E, min(num_chosen + 1, num_experts))[0][:, -1]
    low, width = _bins(bias_E, num_bins)
    bin_TE = jnp.clip(jnp.floor((alpha_T[:, None] - scores_TE - low) / width), 0, num_bins - 1).astype(jnp.int32)
    return jnp.zeros((num_experts, num_bins), jnp.int32).at[jnp.arange(num_experts), bin_TE].add(times_T[:, None].astype(jnp.int32))


def quantile_update(bias_E, histogram_EN, num_chosen: int):
    """The bias with which each expert would have won a share K / E of the tokens, less its mean.

    Args:
      bias_E: float bias [..., E] that the histogram was made with; leading dims are stacked layers.
      histogram_EN: margin_histogram [..., E, num_bins] of the whole global batch. Without a token the bias stays.
      num_chosen: experts per token (K). With K = E no bias changes the choice, and it stays.

    Source: Kimi K3 (2607.24653), section 2.3.3, eqs. 13 and 14.
    """
    num_experts, num_bins = histogram_EN.shape[-2:]
    if num_chosen == num_experts:
        return bias_E
    low, width = _bins(bias_E, num_bins)
    upto_EN = jnp.cumsum(histogram_EN, axis=-1)
    total_E = upto_EN[..., -1]
    wanted_E = total_E.astype(bias_E.dtype) * (num_chosen / num_experts)
    at_E = jnp.argmax(upto_EN >= wanted_E[..., None], axis=-1)
    inside_E, upto_E = (jnp.take_along_axis(array_EN, at_E[..., None], axis=-1)[..., 0] for array_EN in (histogram_EN, upto_EN))
    before_E = (upto_E - inside_E).astype(bias_E.dtype)
    moved_E = low + width * (at_E + (wanted_E - before_E) / jnp.maximum(inside_E, 1))
    moved_E = (moved_E - moved_E.mean(-1, keepdims=True)).astype(bias_E.dtype)
    return jnp.where(total_E > 0, moved_E, bias_E)


def _bins(bias_E, num_bins: int):
    """Lower end and width of the bins, [..., 1]."""
    low = bias_E.min(-1, keepdims=True) - 1
    return low, (bias_E.max(-1, keepdims=True) + 1 - low) / num_bins
