"""Weights that the devices hold rounded: copies in the compute dtype of master weights that lie elsewhere."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moejax.config.model import ModelConfig
from moejax.model import language_model
from moejax.optim.groups import is_matrix, path_of
from moejax.optim.pieces import STACKED, WeightUpdate
from moejax.parallel.axes import on_host
from moejax.train.state import TrainState

FLOAT32_INSIDE = frozenset({"weight_DJ"})
"""Matrices of the mixers, by name, that meet activations in float32: the head weights of indexers."""


def rounded(config: ModelConfig, updates: list[WeightUpdate]) -> frozenset[str]:
    """Paths of the stacked weights that move and that the model reads in the compute dtype alone, so that a rounded copy serves it as well: the matrices of
    mixers and MLPs. Not the router's, nor what scales, shifts or gates each channel: these are read in float32, and small."""

    def is_rounded(path: str, shape: tuple[int, ...]) -> bool:
        section, _, module, *inside = path.split("/") if path.count("/") > 2 else ("", "", "")
        known = section == STACKED and module in ("mixer", "feed_forward") and "router" not in inside and inside[-1] not in FLOAT32_INSIDE
        return known and is_matrix(path, shape)

    return frozenset(path for path, like in (("/".join(update.names), update.like) for update in updates) if is_rounded(path, like.shape))


def split_arrays(state: TrainState, paths: frozenset[str], dtype: str, *, masters: bool = True) -> TrainState:
    """The state whose `params` are copies at some paths, with the masters, which they were, in host memory, if they are wanted."""
    on_device = lambda leaf: leaf.sharding.with_memory_kind("device")
    copy = lambda leaf: jax.device_put(leaf, on_device(leaf)).astype(dtype)
    away = lambda leaf: jax.device_put(leaf, on_host(leaf.sharding)) if masters else None
    split = _split(state, paths, copy, away)
    return split if masters else dataclasses.replace(split, master={})


def split_shapes(state: TrainState, paths: frozenset[str], dtype: str) -> TrainState:
    """The same of shapes with their places."""
    copy = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    away = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host(leaf.sharding))
    return _split(state, paths, copy, away)


def _split(state: TrainState, paths: frozenset[str], copy: Callable, away: Callable) -> TrainState:
    masters = {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(state.params) if path_of(keys) in paths}
    params = jax.tree_util.tree_map_with_path(lambda keys, leaf: copy(leaf) if path_of(keys) in paths else leaf, state.params)
    return dataclasses.replace(state, params=params, master={path: away(leaf) for path, leaf in masters.items()})


def joined(state: TrainState) -> TrainState:
    """The state with all master weights in `params`."""
    params = jax.tree_util.tree_map_with_path(lambda keys, leaf: state.master.get(path_of(keys), leaf), state.params)
    return dataclasses.replace(state, params=params, master={})


def differentiable(config: ModelConfig, params: dict) -> tuple[dict, Callable[[dict], dict]]:
    """What gradients are taken for, in the master's dtype, and what makes weights that the model reads of it."""
    like = language_model.shapes(config)
    carriers = jax.tree.map(lambda leaf, like: leaf if leaf.dtype == like.dtype else jnp.zeros(like.shape, like.dtype), params, like)
    widen = lambda leaf, carrier: carrier if leaf.dtype == carrier.dtype else Widened(leaf, carrier)
    return carriers, lambda carriers: jax.tree.map(widen, params, carriers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Widened:
    """A copy that reads as its master weight would (`weight[...]`), and whose gradient is a master weight's, unrounded.

    The gradient goes to `carrier`, an array that nothing reads: gradients have the dtype of what they belong to, and the copy's is too
    narrow. In a scan over layers each layer widens its own slice.
    """

    copy: Any
    carrier: Any
    """Of the master's dtype; its values count for nothing."""

    def __getitem__(self, index):
        return _widen(self.copy, self.carrier)[index]


@jax.custom_vjp
def _widen(copy, carrier):
    return copy.astype(carrier.dtype)


_widen.defvjp(lambda copy, carrier: (_widen(copy, carrier), copy), lambda copy, grad: (jnp.zeros_like(copy), grad))
