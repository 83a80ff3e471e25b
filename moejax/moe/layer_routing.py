"""The routing of one layer over all devices: each chooses for its rows, all count together, then each weighs its rows."""

from typing import Any

import jax
import jax.numpy as jnp

from moejax.config.moe import RouterConfig
from moejax.moe.dispatch import kept
from moejax.moe.router import Choice, Routing, choose, is_overloaded, overload_factor, weigh
from moejax.moe.topology import Topology, distance, distance_bias, own_device, rows_by_distance
from moejax.parallel.islands import per_rows


def choose_layer(
    logits_BLE, bias_E, segments, *, experts_per_token: int, config: RouterConfig, topology: Topology | None = None
) -> tuple[Choice, Any, dict]:
    """Chooses the experts of every row.

    Args:
      logits_BLE: float32 (or float64) router logits, a trained bias included; rows split over the token axes.
      bias_E: correction bias, or None.
      segments: tells padding, and trees of shared prefixes.
      topology: distances; None: no topology bias, and no row is counted by distance.

    Returns:
      the choice; load_E, int32 rows per expert over all devices; and a report. With a topology, `distance_rows_3`: int32 rows whose
      expert lives on their device, their node, and elsewhere, over all devices. With trees, `counted_E`: the load as balancing sees it,
      each row once for every document that holds its token.
    """
    num_experts = logits_BLE.shape[-1]

    def on_own_rows(logits_BLE, ids_BL, times_BL, bias_E, home_device_E, factor):
        distance_E = offset_E = None
        if topology is not None:
            distance_E = distance(home_device_E, own_device(), devices_per_node=topology.devices_per_node)
        if factor is not None:
            offset_E = distance_bias(distance_E, config=config, factor=factor)
        choice = choose(logits_BLE, bias_E, ids_BL >= 0, experts_per_token=experts_per_token, config=config, offset_E=offset_E)
        load_E = count_rows(choice.ids_BLK, num_experts)
        rows = {} if topology is None else {"distance_rows_3": rows_by_distance(load_E, distance_E)}
        if times_BL is not None:
            rows["counted_E"] = count_rows(choice.ids_BLK, num_experts, times_BL[..., None])
        return choice, jax.tree.map(lambda count: count[None], (load_E, rows))

    home_device_E = None if topology is None else topology.home_device_E
    factor = None if topology is None or config.topology_far == 0 else topology.factor
    choice, counts = per_rows(on_own_rows, logits_BLE, segments.ids_BL, segments.copies_BL, whole=(bias_E, home_device_E, factor))
    load_E, report = jax.tree.map(lambda count: count.sum(0, dtype=count.dtype), counts)
    if "counted_E" in report:
        report["counted_E"] = kept(report["counted_E"])
    return choice, kept(load_E), report


def weigh_layer(choice: Choice, load_E, *, config: RouterConfig, constrain: bool = True, whole_load_E=None) -> tuple[Routing, dict]:
    """Weighs the chosen experts of every row, under the soft constraint if the config has one.

    Args:
      load_E: int32, rows per expert of this batch over all devices.
      constrain: False outside training: no soft constraint.
      whole_load_E: rows per expert of the whole global batch, which the soft constraint looks at; None: this batch is the whole one.

    Returns:
      the routing, and under the soft constraint a report: int32 `overloaded` experts, int32 `scaled_rows` of them, and `removed_weight`
      over all devices, in tokens: each lost that share of its weight, before renormalisation.
    """
    if not (constrain and config.overload_strength):
        return per_rows(lambda choice: weigh(choice, config=config), choice), {}
    whole_load_E = load_E if whole_load_E is None else whole_load_E
    factor_E = overload_factor(whole_load_E, config, choice.scores_BLE.dtype)
    routing = per_rows(lambda choice, factor_E: weigh(choice, config=config, factor_E=factor_E), choice, whole=(factor_E,))
    over_E = is_overloaded(whole_load_E, config)
    return routing, {
        "overloaded": jnp.sum(over_E, dtype=jnp.int32),
        "scaled_rows": jnp.sum(jnp.where(over_E, load_E, 0), dtype=jnp.int32),
        "removed_weight": jnp.sum(routing.removed_BL),
    }


def count_together(ids_BLK, num_experts: int):
    """How many tokens chose both of two experts, float32 [E, E] over all devices; rows split over the token axes."""

    def on_own_rows(ids_BLK):
        chosen_TE = jax.nn.one_hot(ids_BLK.reshape(-1, ids_BLK.shape[-1]), num_experts, dtype=jnp.float32).sum(1)
        return jnp.matmul(chosen_TE.T, chosen_TE)[None]

    return per_rows(on_own_rows, ids_BLK).sum(0)


def count_rows(ids_BLK, num_experts: int, times=1):
    """Rows per expert, int32 [E]; an id of -1 counts nowhere, another `times`: an integer, or integers that broadcast to ids_BLK."""
    ids_BLK = jnp.where(ids_BLK < 0, num_experts, ids_BLK)
    return jnp.zeros(num_experts, jnp.int32).at[ids_BLK].add(times, mode="drop")
