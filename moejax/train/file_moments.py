"""The step with moments, and master weights, in files: gradients in one program, then weight after weight, layer after layer, moments are read ahead, used by a
small program, and written behind."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.memory.shelf import Parts, Record, Shelf, assemble, parts_of
from moejax.optim.groups import path_of
from moejax.optim.pieces import WeightUpdate, get, layer_of, replaced, with_layer
from moejax.train.state import TrainState
from moejax.train.step import StepOutput, measure

MASTER = "master weight"
"""Name of a master weight in its record, beside the paths of its moments."""


class Gradients(NamedTuple):
    """What the update needs of a batch."""

    grads: dict
    """Not clipped."""
    norm: Any
    finite: Any
    """Whether the weights shall move."""
    out: StepOutput | None


def gradient_step(state: TrainState, batches, **parts) -> tuple[TrainState, Gradients]:
    """The state but for what the optimizer moves, and what it needs; `parts` as `measure` takes them."""
    seen = measure(state, batches, **parts)
    return seen.rest, Gradients(seen.grads, seen.norm, seen.finite, seen.out)


def counts_alone(opt_state) -> dict:
    """Of a whole optimizer state what stays in memory when the moments lie in files: the scalars, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return {path_of(keys): leaf for keys, leaf in leaves if leaf.ndim == 0}


class FileMoments:
    """The moments of all weights, in a shelf's files; a state's `opt_state` then holds the optimizer's counts alone, by path.

    A piece is one layer of one weight. Its program is the update that `train_step` does, on a slice; no piece is updated before the norm
    of all gradients is known to be finite.
    """

    def __init__(
        self,
        updates: list[WeightUpdate],
        places: TrainState,
        shelf: Shelf,
        *,
        rounded: frozenset[str] = frozenset(),
        compiler_options: dict | None = None,
    ):
        """
        Args:
          updates: of `pieces.cut`.
          places: shardings of a state that lies on the devices as a whole.
          rounded: paths of the weights whose masters lie with the moments, and of which the state has copies.
        """
        self.updates, self.shelf, self.rounded, self._options = updates, shelf, rounded, compiler_options
        self._everywhere, self._places_of = places.step, {}
        moment_places = {path_of(keys): place for keys, place in jax.tree_util.tree_leaves_with_path(places.opt_state)}
        for update in updates:
            place = get(places.params, update.names)
            master = {MASTER: place} if self._has_master(update) else {}
            self._places_of[update.names] = place, {path: moment_places[path] for path in update.moments} | master
        self._records = [name for update in updates for name in _records_of(update)]
        self._programs: dict[tuple[str, ...], Any] = {}

    def begin(self, params: dict) -> dict:
        """Writes the moments of (master) weights that have not moved yet, and those of `rounded`; returns the counts."""
        counts = {}
        for update in self.updates:

            def init(weight, layer, update=update):
                piece = _piece(update, weight, layer)
                moments, counts = update.init(piece)
                return moments | ({MASTER: piece} if self._has_master(update) else {}), counts

            run = self._jit(init, out_shardings=(self._places_of[update.names][1], self._everywhere))
            for layer, record in enumerate(_records_of(update)):
                arrays, of_weight = run(get(params, update.names), np.int32(layer))
                self.shelf.write(record, arrays)
            counts |= of_weight
        self.shelf.drain()
        return counts

    def _has_master(self, update: WeightUpdate) -> bool:
        return "/".join(update.names) in self.rounded

    def take(self, params: dict, opt_state) -> dict:
        """Writes the moments of a whole optimizer state, e.g. a checkpoint's, and master weights; returns the counts."""
        leaves = {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(opt_state)}
        for update in self.updates:
            whole = {path: parts_of(leaves[path]) for path in update.moments}
            whole |= {MASTER: parts_of(get(params, update.names))} if self._has_master(update) else {}
            for layer, record in enumerate(_records_of(update)):
                self.shelf.write(record, {path: _layer(parts, layer) for path, parts in whole.items()} if update.num_layers else whole)
        self.shelf.drain()
        return counts_alone(opt_state)

    def whole(self, counts: dict, like: TrainState) -> tuple[Any, dict]:
        """The optimizer's state as a tree of arrays, and master weights by path.

        Args:
          counts: the state's `opt_state`.
          like: shapes and places of a whole state.
        """
        found, masters, records = dict(counts), {}, self.shelf.read(self._records)
        like_of = {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(like.opt_state)}
        for update in self.updates:
            layers = [next(records) for _ in _records_of(update)]

            def array(name, leaf, layers=layers, update=update):
                parts = [layer[name] for layer in layers]
                return assemble(_stack(parts) if update.num_layers else parts[0], leaf.shape, leaf.sharding)

            found |= {path: array(path, like_of[path]) for path in update.moments}
            if self._has_master(update):
                masters["/".join(update.names)] = array(MASTER, get(like.params, update.names))
        return jax.tree_util.tree_map_with_path(lambda keys, _: found[path_of(keys)], like.opt_state), masters

    def around(self, gradients) -> Callable[[TrainState, Any], tuple[TrainState, StepOutput]]:
        """A step like the compiled `train_step`, made of the compiled `gradient_step`."""
        return functools.partial(self._step, gradients)

    def _step(self, gradients, state: TrainState, batches) -> tuple[TrainState, StepOutput]:
        records = self.shelf.read(self._records)  # the first ones come while the gradients are made
        state, seen = gradients(state, batches)
        if not bool(seen.finite):
            records.close()
            return state, seen.out
        params, grads, counts = _leaves(state.params), _leaves(seen.grads), dict(state.opt_state)
        norm, out = seen.norm, seen.out
        del seen  # a gradient's memory is free once its weight has moved
        for update in self.updates:
            weight, grad = params[update.names], grads.pop(update.names)
            for layer, name in enumerate(_records_of(update)):
                moments = self._on_devices(update, next(records))
                old = {path: state.opt_state[path] for path in update.counts}
                weight, moments, new = self._program(update)(weight, grad, np.int32(layer), norm, moments, old)
                self.shelf.write(name, moments)
                counts |= new
            params[update.names] = weight
        return dataclasses.replace(state, params=replaced(state.params, params), opt_state=counts), out

    def _on_devices(self, update: WeightUpdate, record: Record) -> dict:
        _, places = self._places_of[update.names]
        shape = (1, *update.like.shape[1:]) if update.num_layers else update.like.shape
        return {name: assemble(record[name], shape, place) for name, place in places.items()}

    def _program(self, update: WeightUpdate):
        if update.names not in self._programs:

            def run(weight, grad, layer, norm, record, counts):
                moments = dict(record)
                piece = moments.pop(MASTER) if self._has_master(update) else _piece(update, weight, layer)
                moved, moments, counts = update.apply(piece, _piece(update, grad, layer), norm, moments, counts)
                moments |= {MASTER: moved} if self._has_master(update) else {}
                read = moved.astype(weight.dtype)
                return with_layer(weight, layer, read) if update.num_layers else read, moments, counts

            place, places = self._places_of[update.names]
            self._programs[update.names] = self._jit(run, donate_argnums=(0, 4), out_shardings=(place, places, self._everywhere))
        return self._programs[update.names]

    def _jit(self, function, **options):
        return jax.jit(function, compiler_options=self._options, **options)


def _records_of(update: WeightUpdate) -> list[str]:
    """Names of a weight's records, one a layer."""
    name = "/".join(update.names)
    return [f"{name}/{layer}" for layer in range(update.num_layers)] if update.num_layers else [name]


def _piece(update: WeightUpdate, array, layer):
    return layer_of(array, layer) if update.num_layers else array


def _layer(parts: Parts, layer: int) -> Parts:
    """One layer, with its dim, of what this process holds of a stack."""
    return {((0, 1), *index[1:]): part[layer : layer + 1] for index, part in parts.items()}


def _stack(layers: list[Parts]) -> Parts:
    """What `_layer` took apart."""
    return {((0, len(layers)), *index[1:]): np.concatenate([parts[index] for parts in layers]) for index in layers[0]}


def _leaves(tree) -> dict[tuple[str, ...], Any]:
    return {tuple(key.key for key in keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}
