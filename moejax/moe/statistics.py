"""What the balance losses and the router's bias need to know of a batch: sums over valid tokens, over all devices."""

import jax
import jax.numpy as jnp

from moejax.losses import balance, router_bias
from moejax.moe.router import Routing
from moejax.parallel.islands import per_rows


def routing_statistics(routing: Routing, bias_E, segments, *, kind: str, z: bool, histogram: bool, global_load_E=None) -> dict:
    """Sums asked for; a token counts once for each document that holds it (`Segments.multiplicity`).

    Args:
      routing: choices of the layer.
      bias_E: correction bias they were made with, or None.
      kind: balance loss: none, switch, sequence or global.
      z: also the sum of squared logsumexp of the logits.
      histogram: also the margins of Quantile Balancing.
      global_load_E: `global` alone: rows per expert of the whole global batch.

    Returns:
      `balance` and `balance_num` (the loss is their quotient over the global batch), `router_z`, `margins_EN`.
    """
    out = {}
    num_chosen = routing.ids_BLK.shape[-1]
    scores_BLE = routing.scores_BLE / jnp.sum(routing.scores_BLE, -1, keepdims=True)
    if kind in ("switch", "sequence"):
        loss = balance.switch_balance if kind == "switch" else balance.sequence_balance
        parts = per_rows(lambda *arrays: jax.tree.map(lambda x: x[None], loss(*arrays)), scores_BLE, routing.ids_BLK, segments)
        out |= {"balance": parts.loss_sum.sum(), "balance_num": parts.num.sum()}
    if kind == "global":
        assert global_load_E is not None
        num_tokens = jnp.sum(global_load_E.astype(scores_BLE.dtype)) / num_chosen  # as float: the sum can pass 2**31
        out["balance"] = balance.global_balance(scores_BLE, segments, counts_E=global_load_E, num_tokens=num_tokens, num_chosen=num_chosen)
        out["balance_num"] = jnp.sum(segments.multiplicity()).astype(scores_BLE.dtype)
    if z:
        out["router_z"] = balance.router_z_sum(routing.logits_BLE, segments)
    if histogram:
        flat = lambda x: x.reshape(-1, x.shape[-1])
        margins = lambda scores, times_BL, bias_E: router_bias.margin_histogram(flat(scores), bias_E, times_BL.reshape(-1), num_chosen)[
            None
        ]
        out["margins_EN"] = per_rows(margins, routing.ranked_BLE, segments.multiplicity(), whole=(bias_E,)).sum(0)
    return out
