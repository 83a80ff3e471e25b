"""What a run carries from step to step."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config.data import DataConfig
from moejax.config.model import ModelConfig
from moejax.config.training import TrainConfig
from moejax.data.batch import Batch
from moejax.model import language_model
from moejax.model.context import Switches
from moejax.model.past import Past
from moejax.parallel.axes import ROWS, on_host
from moejax.train.control import init_control

Where = Literal["device", "host", "files"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Weights, moments and counters."""

    params: dict
    """What the model reads; rounded where `master` has the weight itself."""
    opt_state: Any
    step: Any
    """int32, global batches seen."""
    skipped: Any
    """int32, steps skipped for a non-finite loss or gradient."""
    skipped_in_a_row: Any
    """int32, of which the last ones in a row."""
    control: dict = dataclasses.field(default_factory=dict)
    """What layers are told besides the batch and what that is decided from (moejax.train.control); {} if nothing changes."""
    past: Any = dataclasses.field(default_factory=dict)
    """What the rows of the batch before left (moejax.model.past.Past), with data.windows; else {}."""
    master: dict = dataclasses.field(default_factory=dict)
    """Master weights, by path, that lie in host memory while `params` has copies of them (moejax.train.masters)."""


def past_shapes(model: ModelConfig, data: DataConfig, train: TrainConfig) -> Past | None:
    """Shapes and dtypes of what the rows of a batch leave, None without data.windows. Call with the mesh set."""
    if not data.windows:
        return None
    zeros_BL = np.zeros((data.batch_size, data.seq_len), np.int32)
    leave = lambda params: language_model.forward(model, params, Batch.build(zeros_BL, zeros_BL), Switches(past_keys=train.carry_keys)).past
    return jax.eval_shape(leave, language_model.shapes(model))


def past_shardings(past: Past | None, mesh: Mesh) -> Any:
    """Rows lie where the batch's do; they are the second dim of what is stacked along the depth."""
    stacked = lambda path: len(path) > 1 and path[1].key == "unit"
    place = lambda path, _: NamedSharding(mesh, P(None, *ROWS) if stacked(path) else ROWS)
    return {} if past is None else jax.tree_util.tree_map_with_path(place, past)


def state_shapes(
    config: ModelConfig, optimizer: optax.GradientTransformation, *, num_devices: int = 1, past: Past | None = None
) -> TrainState:
    """Shapes and dtypes of a state; `num_devices`: size of mesh.expert, `past`: shapes of the past."""
    params = language_model.shapes(config)
    counter = jax.ShapeDtypeStruct((), jnp.int32)
    control = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), init_control(config, num_devices))
    return TrainState(params, jax.eval_shape(optimizer.init, params), counter, counter, counter, control, {} if past is None else past)


def state_shardings(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, past: Past | None = None, *, moments_on_host: bool = False
) -> TrainState:
    """Moments lie as their weights do, in device memory or in the host's; counters are everywhere."""
    params, everywhere = language_model.shardings(config, mesh), NamedSharding(mesh, P())
    place_of = {tuple(step.key for step in steps): place for steps, place in jax.tree_util.tree_leaves_with_path(params)}

    def place(steps, leaf):
        """optax keeps moments in copies of the weights' tree: the last keys of a moment's path are its weight's path."""
        names = tuple(getattr(step, "key", None) for step in steps)
        found = next((place_of[names[first:]] for first in range(len(names)) if names[first:] in place_of), everywhere)
        if not leaf.ndim:
            return everywhere
        return on_host(found) if moments_on_host else found

    opt_state = jax.tree_util.tree_map_with_path(place, state_shapes(config, optimizer).opt_state)
    control = jax.tree.map(lambda _: everywhere, init_control(config, mesh.shape["expert"]))
    return TrainState(params, opt_state, everywhere, everywhere, everywhere, control, past_shardings(past, mesh))


def placed_shapes(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, past: Past | None = None, *, moments_on_host: bool = False
) -> TrainState:
    """Shapes, dtypes and places of a state."""
    return jax.tree.map(
        lambda like, place: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place),
        state_shapes(config, optimizer, num_devices=mesh.shape["expert"], past=past),
        state_shardings(config, optimizer, mesh, past, moments_on_host=moments_on_host),
    )


def init_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    past: Past | None = None,
    *,
    moments: Where = "device",
) -> TrainState:
    """A fresh state, made where it lies; {} for moments in files. `past`: shapes of the past."""
    params = language_model.init(config, mesh, seed)
    places = state_shardings(config, optimizer, mesh, past, moments_on_host=moments == "host")
    opt_state = jax.jit(optimizer.init, out_shardings=places.opt_state)(params) if moments != "files" else {}
    zero = jax.device_put(jnp.zeros((), jnp.int32), places.step)
    control = jax.device_put(init_control(config, mesh.shape["expert"]), places.step)
    nothing = jax.tree.map(lambda like, place: jnp.zeros(like.shape, like.dtype, device=place), {} if past is None else past, places.past)
    return TrainState(params, opt_state, zero, jnp.copy(zero), jnp.copy(zero), control, nothing)
