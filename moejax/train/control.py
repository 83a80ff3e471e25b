"""What layers are told besides their batch: capacities that follow what is dropped, placements that follow loads, a fading topology bias.

Part of the train state: a tree by section and place of dicts, entries of `unit` stacked along the depth. Capacities move inside the step;
placements are decided on the host now and then, and enter the step as arrays. Nothing here makes a step compile anew.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config.model import ModelConfig
from moejax.config.moe import AdaptiveConfig
from moejax.config.run import layer_plan
from moejax.moe import copies, placement, topology


def sparse_places(config: ModelConfig) -> Iterator[tuple[str, str, int]]:
    """Section, place, and number of stacked layers (0: not stacked) of every sparse layer."""
    plan = layer_plan(config)
    for section, kinds, stacked in (("head", plan.head, 0), ("unit", plan.unit, plan.num_units), ("tail", plan.tail, 0)):
        yield from ((section, str(place), stacked) for place, kind in enumerate(kinds) if kind.feed_forward == "moe")


def init_control(config: ModelConfig, num_devices: int) -> dict:
    """What a fresh run begins with, numpy; {} if nothing changes between steps.

    Args:
      num_devices: size of mesh.expert.
    """
    moe, fresh = config.moe, {}
    if moe.adaptive.highest:
        zero = np.int32(0)
        fresh["capacity"] = {"factor": np.float32(moe.capacity_factor), "asked_more": zero, "asked_less": zero}
    if moe.copies.every:
        home = placement.identity(moe.num_experts, num_devices, moe.copies.per_device)
        fresh |= {"tables": copies.tables(home), "load_E": np.zeros(moe.num_experts, np.float32)}
    if not fresh:
        return {}
    stack = lambda stacked: jax.tree.map(lambda leaf: np.stack([leaf] * stacked) if stacked else np.asarray(leaf), fresh)
    return _tree(config, lambda section, place, stacked: stack(stacked))


def told(config: ModelConfig, control: dict, *, step=None) -> dict | None:
    """What `language_model.forward` hands to the layers.

    Args:
      step: global batches seen, for the topology bias; None: none, as outside training.
    """
    router = config.moe.router
    bias = step is not None and router.topology_far > 0

    def of(section, place, stacked):
        state = control.get(section, {}).get(place, {})
        out = {"tables": state["tables"]} if "tables" in state else {}
        if "capacity" in state:
            out["capacity_factor"] = state["capacity"]["factor"]
        if bias:
            factor = topology.anneal(step, num_steps=router.topology_anneal_steps)
            out["topology_factor"] = jnp.broadcast_to(factor, (stacked,) if stacked else ())
        return out

    return _tree(config, of) if control or bias else None


def update(config: ModelConfig, control: dict, layers: dict, *, num_microbatches: int) -> dict:
    """The control after a step whose layers reported `layers` (sums over microbatches)."""

    def of(state, report):
        state = dict(state)
        if "capacity" in state:
            rows = jnp.maximum(report["load_E"].sum(-1), 1)
            needed = report["needed_capacity"] / num_microbatches
            state["capacity"] = next_capacity(state["capacity"], report["dropped"] / rows, needed, config.moe.adaptive)
        if "load_E" in state:
            state["load_E"] = state["load_E"] + report["load_E"]
        return state

    return {section: {place: of(state, layers[section][place]) for place, state in places.items()} for section, places in control.items()}


def next_capacity(capacity: dict, drop_rate, needed, config: AdaptiveConfig) -> dict:
    """A layer's capacity after one more step.

    Args:
      capacity: `factor`, and for how many steps in a row more and less were asked for.
      drop_rate: share of the layer's rows that found no place.
      needed: capacity factor with which nothing would have been dropped.
    """
    factor, more = capacity["factor"], drop_rate > config.drop_rate
    less = (drop_rate == 0) & (needed < factor * (1 - config.spare))
    count = lambda asked, name: jnp.where(asked, capacity[name] + 1, 0)
    asked_more, asked_less = count(more, "asked_more"), count(less, "asked_less")
    up, down = asked_more >= config.patience, asked_less >= config.patience
    factor = jnp.where(up, factor * config.step, jnp.where(down, factor / config.step, factor))
    return {
        "factor": jnp.clip(factor, config.lowest, config.highest),
        "asked_more": jnp.where(up, 0, asked_more),
        "asked_less": jnp.where(down, 0, asked_less),
    }


def buffer_size(config: AdaptiveConfig, largest_factor: float) -> float:
    """The smallest buffer, as a capacity factor, that no layer's capacity passes."""
    return next((size for size in config.sizes() if largest_factor <= size * (1 + 1e-6)), config.highest)


def decide(config: ModelConfig, control: dict, *, num_devices: int) -> tuple[dict, dict, dict[str, float]]:
    """New placements from the loads counted since the last decision; on the host.

    Args:
      control: as numpy.

    Returns:
      the control with them, and loads from 0 again; for layers whose experts move, the slots [E] or [n, E] where the weights of each slot
      lie now, by section and place; and the largest load of a device over the mean, expected before and after.
    """
    new, sources, before, after = {}, {}, [], []
    nodes = num_devices // config.moe.node_size if config.moe.node_size else 1
    for section, places in control.items():
        new[section] = {}
        for place, state in places.items():
            load_E = np.asarray(state["load_E"])
            stacked = load_E.ndim == 2
            layers = (
                [jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], state["tables"]) for i in range(len(load_E))]
                if stacked
                else [state["tables"]]
            )
            chosen, moved = [], []
            for tables, loads in zip(layers, load_E if stacked else [load_E], strict=True):
                old = copies.plan_of(tables)
                plan = _next_plan(config, old, loads, num_devices=num_devices, num_nodes=nodes)
                ratio = lambda plan, loads=loads: placement.max_over_mean(
                    placement.device_load_S(loads[plan.expert_at_E], plan.copy_SC, plan.share_SC, num_devices)
                )
                before.append(ratio(old))
                after.append(ratio(plan))
                chosen.append(copies.tables(plan))
                moved.append(np.argsort(old.expert_at_E)[plan.expert_at_E].astype(np.int32))
            join = (lambda parts: jax.tree.map(lambda *leaves: np.stack(leaves), *parts)) if stacked else (lambda parts: parts[0])
            new[section][place] = state | {"tables": join(chosen), "load_E": np.zeros_like(load_E)}
            if any((source != np.arange(source.size)).any() for source in moved):
                sources.setdefault(section, {})[place] = join(moved)
    return new, sources, {"device_load_before": max(before, default=1.0), "device_load_after": max(after, default=1.0)}


def _next_plan(config: ModelConfig, old: placement.Plan, load_E, *, num_devices: int, num_nodes: int) -> placement.Plan:
    settings = config.moe.copies
    if settings.move:
        return placement.plan(
            load_E, num_devices=num_devices, copies_per_device=settings.per_device, num_nodes=num_nodes, keep=old, gain=settings.gain
        )
    load_E = load_E[old.expert_at_E]
    copy_SC, share_SC = placement.copies(load_E, num_devices=num_devices, copies_per_device=settings.per_device)
    new = dataclasses.replace(old, copy_SC=copy_SC, share_SC=share_SC)
    ratio = lambda plan: placement.max_over_mean(placement.device_load_S(load_E, plan.copy_SC, plan.share_SC, num_devices))
    return new if ratio(new) < ratio(old) - settings.gain else old


def move_experts(tree, sources: dict):
    """Weights of experts, and moments that lie as they do, at the places that a decision gave them; inside jit, on the run's mesh.

    The devices of the `expert` axis hand their experts around in a ring, and each keeps what is to live with it: twice its own experts
    are in memory, one weight at a time.

    Args:
      tree: weights or an optimizer's state; a leaf belongs to a layer's experts by the end of its path,
        (section, place, "feed_forward", "experts", name).
      sources: see `decide`.
    """

    def move(path, leaf):
        names = [getattr(step, "key", None) for step in path]
        if "experts" not in names or leaf.ndim < 2:
            return leaf
        section, place = names[names.index("experts") - 3 : names.index("experts") - 1]
        source_E = sources.get(section, {}).get(place)
        return leaf if source_E is None else _exchange(leaf, source_E, stacked=section == "unit")

    return jax.tree_util.tree_map_with_path(move, tree)


def _exchange(leaf, source_E, *, stacked: bool):
    spec = jax.sharding.PartitionSpec(*(None,) * stacked, "expert")
    num_devices = jax.sharding.get_abstract_mesh().shape["expert"]

    @functools.partial(jax.shard_map, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec, check_vma=False, axis_names={"expert"})
    def on_each_device(own, source_E):
        device, num_own = jax.lax.axis_index("expert"), own.shape[stacked]
        wanted = jax.lax.dynamic_slice_in_dim(source_E, device * num_own, num_own, axis=stacked)
        wide = (..., *(None,) * (own.ndim - wanted.ndim))

        def turn(step, carry):
            passing, kept = carry
            local = wanted - (device - step) % num_devices * num_own
            here = (local >= 0) & (local < num_own)
            pick = jnp.take_along_axis(passing, jnp.clip(local, 0, num_own - 1)[wide], axis=stacked)
            ring = [(i, (i + 1) % num_devices) for i in range(num_devices)]
            return jax.lax.ppermute(passing, "expert", ring), jnp.where(here[wide], pick, kept)

        return jax.lax.fori_loop(0, num_devices, turn, (own, own))[1]

    return on_each_device(leaf, source_E)


def control_metrics(control: dict) -> dict:
    """Scalars of the capacities, over layers."""
    factors = [state["capacity"]["factor"].reshape(-1) for places in control.values() for state in places.values() if "capacity" in state]
    if not factors:
        return {}
    factor_N = jnp.concatenate(factors)
    return {"capacity_factor_max": factor_N.max(), "capacity_factor_mean": factor_N.mean(), "capacity_factor_min": factor_N.min()}


def _tree(config: ModelConfig, of) -> dict:
    tree: dict = {}
    for section, place, stacked in sparse_places(config):
        tree.setdefault(section, {})[place] = of(section, place, stacked)
    return tree
