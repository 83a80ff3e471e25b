"""How tokens choose experts, and what the chosen weigh. All local to one device's rows.

Formulas: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2, node-limited routing among it (a group is a node); Qwen3-MoE, Mixtral and OLMoE
for softmax, the last without renormalisation; gpt-oss for the softmax over the chosen logits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moejax.config.moe import RouterConfig
from moejax.moe.dispatch import kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice of each token, not yet weighed; ids are -1 for padding."""

    ids_BLK: Any
    """int32, chosen experts."""
    scores_BLE: Any
    """Scores before any bias: a softmax over all experts, or sigmoids."""
    logits_BLE: Any
    """Router logits."""
    ranked_BLE: Any
    """What the choice was made by, but for the correction bias: with the topology bias. No gradient."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing(Choice):
    """A choice and its weights."""

    probs_BLK: Any
    """Weights of the experts' outputs, 0 for padding; gradients reach the router through them."""
    removed_BL: Any = None
    """Share of each token's weight that the soft constraint took, before renormalisation; None without it."""


def route(logits_BLE, bias_E, valid_BL, *, experts_per_token: int, config: RouterConfig, offset_E=None) -> Routing:
    """`choose`, then `weigh` without a soft constraint, which needs the choices of all devices in between."""
    choice = choose(logits_BLE, bias_E, valid_BL, experts_per_token=experts_per_token, config=config, offset_E=offset_E)
    return weigh(choice, config=config)


def choose(logits_BLE, bias_E, valid_BL, *, experts_per_token: int, config: RouterConfig, offset_E=None) -> Choice:
    """Chooses experts by score plus correction bias.

    Args:
      logits_BLE: float32 (or float64) router logits, a trained bias included.
      bias_E: correction bias, or None; no gradient flows to it.
      valid_BL: bool; padding tokens choose nothing.
      offset_E: added in the choice as the correction bias is, or None: this device's topology bias (`topology.distance_bias`).
    """
    scores_BLE = jax.nn.sigmoid(logits_BLE) if config.score == "sigmoid" else jax.nn.softmax(logits_BLE, -1)
    ranked_BLE = jax.lax.stop_gradient(logits_BLE if config.score == "softmax_chosen" else scores_BLE)
    if offset_E is not None:
        ranked_BLE = ranked_BLE + jax.lax.stop_gradient(offset_E.astype(ranked_BLE.dtype))
    choice_BLE = ranked_BLE
    if bias_E is not None:
        choice_BLE = choice_BLE + jax.lax.stop_gradient(bias_E.astype(choice_BLE.dtype))
    if config.num_groups > 1:
        choice_BLE = _open_groups(choice_BLE, config)
    ids_BLK = jnp.where(valid_BL[:, :, None], jax.lax.top_k(choice_BLE, experts_per_token)[1], -1).astype(jnp.int32)
    return Choice(kept(ids_BLK), scores_BLE, logits_BLE, ranked_BLE)


def weigh(choice: Choice, *, config: RouterConfig, factor_E=None) -> Routing:
    """Weighs the chosen experts by their scores alone.

    Args:
      factor_E: multiplies the weights of each expert's rows before they are renormalised (`overload_factor`), or None.
    """
    chosen_BLKE = jax.nn.one_hot(choice.ids_BLK, choice.scores_BLE.shape[-1], dtype=choice.scores_BLE.dtype)
    # a one-hot product, not a gather: its gradient is a product too, and experts nobody chose get exactly 0
    of_chosen = lambda array_BLE: jnp.sum(chosen_BLKE * array_BLE[:, :, None], -1)
    if config.score == "softmax_chosen":
        probs_BLK = jnp.where(choice.ids_BLK >= 0, jax.nn.softmax(of_chosen(choice.logits_BLE), -1), 0)
    else:
        probs_BLK = of_chosen(choice.scores_BLE)
    removed_BL = None
    if factor_E is not None:
        whole_BLK, probs_BLK = probs_BLK, probs_BLK * of_chosen(factor_E[None, None])
        removed_BL = jax.lax.stop_gradient(1 - _at_least_tiny(probs_BLK.sum(-1)) / _at_least_tiny(whole_BLK.sum(-1)))
    if config.renormalise and (config.score != "softmax_chosen" or factor_E is not None):
        probs_BLK = probs_BLK / _at_least_tiny(jnp.sum(probs_BLK, -1, keepdims=True))
    return Routing(choice.ids_BLK, choice.scores_BLE, choice.logits_BLE, choice.ranked_BLE, probs_BLK * config.scale, removed_BL)


def is_overloaded(load_E, config: RouterConfig):
    """Whether an expert's load passes overload_threshold times the mean; leading dims of load_E are stacked layers."""
    return load_E > config.overload_threshold * load_E.mean(-1, keepdims=True)


def overload_factor(load_E, config: RouterConfig, dtype):
    """(overload_threshold * mean / load) ** overload_strength for overloaded experts, 1 for others. No gradient.

    Args:
      load_E: rows per expert of this layer and step over all devices, valid tokens alone.
    """
    load_E = jax.lax.stop_gradient(load_E.astype(dtype))
    over_E = is_overloaded(load_E, config)
    ratio_E = config.overload_threshold * load_E.mean(-1, keepdims=True) / jnp.where(over_E, load_E, 1)
    return jnp.where(over_E, ratio_E**config.overload_strength, 1)


def _at_least_tiny(total):
    # sigmoid scores can underflow together; DeepSeek adds 1e-20, whose square in the gradient underflows to 0 in float32
    return jnp.maximum(total, 1e-18)


def _open_groups(choice_BLE, config: RouterConfig):
    """-inf on all experts but those of the best groups; a group scores the sum of its group_top best."""
    *lead, num_experts = choice_BLE.shape
    grouped_BLGX = choice_BLE.reshape(*lead, config.num_groups, num_experts // config.num_groups)
    group_score_BLG = jnp.sum(jax.lax.top_k(grouped_BLGX, config.group_top)[0], -1)
    _, open_BLO = jax.lax.top_k(group_score_BLG, config.groups_kept)
    open_BLG = jnp.any(open_BLO[..., None] == jnp.arange(config.num_groups), -2)
    return jnp.where(open_BLG[..., None], grouped_BLGX, -jnp.inf).reshape(choice_BLE.shape)
