"""What layers are told besides their batch: capacities that follow what is dropped, placements that follow loads, a fading topology bias.

Part of the train state: a tree by section and place of dicts, entries of `unit` stacked along the depth. Capacities move inside the step;
placements are decided on the host now and then, and enter the step as arrays. Nothing here makes a step compile anew.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config.model import ModelConfig
from moejax.config.moe import AdaptiveConfig
from moejax.config.run import layer_plan
from moejax.moe import copies, placement, topology

COUNTS = ("load_E", "together_EE")
"""What is summed up between two decisions."""


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
        if moe.copies.move and moe.node_size:
            fresh["together_EE"] = np.zeros((moe.num_experts, moe.num_experts), np.float32)
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
        counts = [name for name in COUNTS if name in state]
        state |= {name: state[name] + report[name] for name in counts}
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
    moe, new, sources, loads = config.moe, {}, {}, []
    choose = functools.partial(
        placement.plan,
        num_devices=num_devices,
        copies_per_device=moe.copies.per_device,
        num_nodes=num_devices // moe.node_size if moe.node_size else 1,
        move=moe.copies.move,
        gain=moe.copies.gain,
    )
    for section, places in control.items():
        new[section] = {}
        for place, state in places.items():
            stacked = np.ndim(state["load_E"]) == 2
            states = [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(len(state["load_E"]))] if stacked else [state]
            old = [copies.plan_of(each["tables"], num_devices=num_devices) for each in states]
            plans = [choose(each["load_E"], together_EE=each.get("together_EE"), keep=plan) for plan, each in zip(old, states, strict=True)]
            loads += [
                [placement.peak_load(each, state["load_E"]) for each in pair]
                for pair, state in zip(zip(old, plans, strict=True), states, strict=True)
            ]
            moved = [_sources(*pair) for pair in zip(old, plans, strict=True)]
            join = (lambda parts: jax.tree.map(lambda *leaves: np.stack(leaves), *parts)) if stacked else (lambda parts: parts[0])
            cleared = {name: np.zeros_like(state[name]) for name in COUNTS if name in state}
            new[section][place] = state | {"tables": join([copies.tables(plan) for plan in plans])} | cleared
            if any((source_E != np.arange(source_E.size)).any() for source_E in moved):
                sources.setdefault(section, {})[place] = join(moved)
    before, after = np.max(loads, 0) if loads else (1.0, 1.0)
    return new, sources, {"device_load_before": float(before), "device_load_after": float(after)}


def _sources(old: placement.Plan, new: placement.Plan):
    """int32 [E], the slot where the weights of each slot of `new` lie under `old`."""
    return np.argsort(old.expert_at_E)[new.expert_at_E].astype(np.int32)


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
