"""How tokens choose experts. Formulas: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2; Qwen3-MoE and Mixtral for softmax."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.config.model import RouterConfig
from moejax.moe.expert_parallel import KEPT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The choice of each token; ids are -1 for padding."""

    ids_BLK: Any
    """int32, chosen experts."""
    probs_BLK: Any
    """Weights of their outputs; gradients reach the router through them."""
    scores_BLE: Any
    """Scores before the correction bias."""
    logits_BLE: Any
    """Router logits."""


def route(logits_BLE, bias_E, valid_BL, *, experts_per_token: int, config: RouterConfig) -> Routing:
    """Chooses experts by score plus correction bias, and weighs them by score alone.

    Args:
      logits_BLE: float32 (or float64) router logits.
      bias_E: correction bias, or None; no gradient flows to it.
      valid_BL: bool; padding tokens choose nothing.
    """
    scores_BLE = jax.nn.softmax(logits_BLE, -1) if config.score == "softmax" else jax.nn.sigmoid(logits_BLE)
    choice_BLE = jax.lax.stop_gradient(scores_BLE)
    if bias_E is not None:
        choice_BLE = choice_BLE + jax.lax.stop_gradient(bias_E.astype(choice_BLE.dtype))
    if config.num_groups > 1:
        choice_BLE = _open_groups(choice_BLE, config)
    ids_BLK = checkpoint_name(jax.lax.top_k(choice_BLE, experts_per_token)[1], KEPT)
    # a one-hot product, not a gather: its gradient is a product too, and experts nobody chose get exactly 0
    chosen_BLKE = jax.nn.one_hot(ids_BLK, logits_BLE.shape[-1], dtype=scores_BLE.dtype)
    probs_BLK = jnp.sum(chosen_BLKE * scores_BLE[:, :, None], -1)
    if config.renormalise:
        # sigmoid scores can underflow together; DeepSeek adds 1e-20, whose square in the gradient underflows to 0 in float32
        probs_BLK = probs_BLK / jnp.maximum(jnp.sum(probs_BLK, -1, keepdims=True), 1e-18)
    ids_BLK = jnp.where(valid_BL[:, :, None], ids_BLK, -1).astype(jnp.int32)
    return Routing(ids_BLK, probs_BLK * config.scale, scores_BLE, logits_BLE)


def _open_groups(choice_BLE, config: RouterConfig):
    """-inf on all experts but those of the best groups; a group scores the sum of its two best."""
    *lead, num_experts = choice_BLE.shape
    grouped_BLGX = choice_BLE.reshape(*lead, config.num_groups, num_experts // config.num_groups)
    group_score_BLG = jnp.sum(jax.lax.top_k(grouped_BLGX, 2)[0], -1)
    _, open_BLO = jax.lax.top_k(group_score_BLG, config.groups_kept)
    open_BLG = jnp.any(open_BLO[..., None] == jnp.arange(config.num_groups), -2)
    return jnp.where(open_BLG[..., None], grouped_BLGX, -jnp.inf).reshape(choice_BLE.shape)
