"""The step with moments, and master weights, in pinned host memory: they visit the devices one weight of one layer at a time."""

import dataclasses

import jax

from moejax.optim.groups import path_of
from moejax.optim.pieces import WeightUpdate, get, layer_of, replaced, with_layer
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
    weights, new, masters = {}, dict(old), {}
    for update in updates:
        path, weight = "/".join(update.names), get(state.params, update.names)
        lying = state.master.get(path)
        weights[update.names], master, moved = _visit(update, weight, lying, get(seen.grads, update.names), seen, old)
        new |= moved
        masters |= {} if master is None else {path: master}
    opt_state = jax.tree_util.tree_map_with_path(lambda keys, _: new[path_of(keys)], state.opt_state)
    params = replaced(seen.rest.params, weights)
    return dataclasses.replace(seen.rest, params=params, opt_state=opt_state, master=state.master | masters), seen.out


def _visit(update: WeightUpdate, weight, master, grad, seen: Measured, old: dict):
    """A weight as the model reads it, its master if that lies on the host (else None), and its moments and counts, after the update."""
    counts, moments = ({path: old[path] for path in paths} for paths in (update.counts, update.moments))

    def piece(weight, grad, away):
        master, moments = jax.device_put(away, DEVICE)
        whole = weight if master is None else master
        moved, new, after = keep_if(seen.finite, update.apply(whole, grad, seen.norm, moments, counts), (whole, moments, counts))
        return moved.astype(weight.dtype), jax.device_put((None if master is None else moved, new), HOST), after

    def layer(index, carry):  # in place: stacks that a scan took in and gave out would lie in memory twice
        weight, away, _ = carry
        alone = jax.tree.map(lambda stack: layer_of(stack, index), (weight, away))
        moved, gone, counts = piece(alone[0], layer_of(grad, index), alone[1])
        weight, away = jax.tree.map(lambda stack, part: with_layer(stack, index, part), (weight, away), (moved, gone))
        return weight, away, counts

    if update.num_layers:
        weight, (master, moments), counts = jax.lax.fori_loop(0, update.num_layers, layer, (weight, (master, moments), counts))
    else:
        weight, (master, moments), counts = piece(weight, grad, (master, moments))
    return weight, master, moments | counts
