"""The step with moments in pinned host memory: they visit the devices one weight of one layer at a time."""

import dataclasses

import jax

from moejax.optim.groups import path_of
from moejax.optim.pieces import WeightUpdate, get, replaced
from moejax.train.state import TrainState
from moejax.train.step import Measured, StepOutput, keep_if, measure

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def host_step(state: TrainState, batches, *, updates: list[WeightUpdate], **parts) -> tuple[TrainState, StepOutput]:
    """What `train_step` does, bit for bit, for a state whose moments lie in host memory (`state_shardings`).

    Args:
      updates: of `pieces.cut`.
      parts: as `measure` takes them.
    """
    seen = measure(state, batches, **parts)
    old = {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    weights, new = {}, dict(old)
    for update in updates:
        weights[update.names], moved = _visit(update, get(state.params, update.names), get(seen.grads, update.names), seen, old)
        new |= moved
    opt_state = jax.tree_util.tree_map_with_path(lambda keys, _: new[path_of(keys)], state.opt_state)
    return dataclasses.replace(seen.rest, params=replaced(seen.rest.params, weights), opt_state=opt_state), seen.out


def _visit(update: WeightUpdate, weight, grad, seen: Measured, old: dict):
    """A weight, and its moments and counts by path, after the update."""
    counts, moments = ({path: old[path] for path in paths} for paths in (update.counts, update.moments))

    def piece(weight, grad, moments):
        here = jax.device_put(moments, DEVICE)
        kept = keep_if(seen.finite, update.apply(weight, grad, seen.norm, here, counts), (weight, here, counts))
        return kept[0], jax.device_put(kept[1], HOST), kept[2]

    def layer(_, parts):
        weight, moments, counts = piece(*jax.tree.map(lambda part: part[None], parts))
        return counts, jax.tree.map(lambda part: part[0], (weight, moments))

    if update.num_layers:
        counts, (weight, moments) = jax.lax.scan(layer, counts, (weight, grad, moments))
    else:
        weight, moments, counts = piece(weight, grad, moments)
    return weight, moments | counts
