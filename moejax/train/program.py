"""The train step of a run, made from the parts of its config; the same for training and for planning."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from moejax.config.errors import require
from moejax.config.model import ModelConfig
from moejax.config.tiers import TiersConfig
from moejax.config.training import LossConfig, OptimConfig, TrainConfig
from moejax.memory.policy import Saved
from moejax.model import language_model
from moejax.model.context import Switches
from moejax.model.objective import switches_for
from moejax.model.transformer import stages
from moejax.optim import groups
from moejax.optim.build import build
from moejax.optim.pieces import WeightUpdate, cut
from moejax.train.file_moments import Gradients, gradient_step
from moejax.train.host_moments import host_step
from moejax.train.state import TrainState
from moejax.train.step import StepOutput, train_step


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A step and what belongs to it."""

    step: Callable[..., tuple[TrainState, StepOutput | Gradients]]
    """(state, batches, below or None) -> (next state, what the step tells); see `train_step`. With moments in files: `gradient_step`."""
    optimizer: optax.GradientTransformation
    """Its init makes the state's moments."""
    rules: Any
    """What each weight is trained with, keyed like the weights."""
    switches: Switches
    """What the model is asked for besides logits."""
    updates: list[WeightUpdate]
    """The optimizer's update cut into pieces; [] where it is done as a whole, on moments that lie on the devices."""
    num_frozen: int = 0
    """Stages of the model below the first weight that learns; what they make of a batch may be handed to the step (moejax.train.frozen)."""
    moments_in_files: bool = False
    """Whether `step` gives gradients alone, for `FileMoments` to move the weights by."""

    def lower(self, state, batches, below: dict | None = None) -> jax.stages.Lowered:
        """The step, lowered for arrays, or their shapes, where they lie; the state's memory is reused for the next one."""
        places = jax.tree.map(lambda array: array.sharding, state)
        told = Gradients(places.params, places.step, places.step, None) if self.moments_in_files else None
        return jax.jit(self.step, donate_argnums=0, out_shardings=(places, told)).lower(
            state, batches, *(() if below is None else (below,))
        )


def make_program(
    model: ModelConfig,
    losses: LossConfig,
    optim: OptimConfig,
    train: TrainConfig,
    tiers: TiersConfig = TiersConfig(),
    *,
    saved: Saved | None = None,
    windows: bool = False,
) -> Program:
    """The step that a config asks for; `saved`: what each layer keeps for its backward pass; `windows`: data.windows."""
    like = language_model.shapes(model)
    rules = groups.assign(optim, like, train_only=train.train_only)
    optimizer = build(optim, steps=train.steps, params_like=like, train_only=train.train_only)
    past_keys = train.carry_keys if windows else None
    switches = switches_for(losses, saved=saved, debug=train.debug, rebuild=train.rebuild_metadata, past_keys=past_keys)
    parts = {
        "config": model,
        "losses": losses,
        "trainable": jax.tree.map(lambda rule: rule.trainable, rules),
        "switches": switches,
    }
    if tiers.optimizer == "device":
        num_frozen = frozen_stages(model, rules, train)
        step = functools.partial(train_step, optimizer=optimizer, clip_norm=optim.clip_norm, num_frozen=num_frozen, **parts)
        return Program(step, optimizer, rules, switches, [], num_frozen)
    updates = cut(optim, rules, like, steps=train.steps)
    if tiers.optimizer == "host":
        return Program(functools.partial(host_step, updates=updates, **parts), optimizer, rules, switches, updates)
    return Program(functools.partial(gradient_step, **parts), optimizer, rules, switches, updates, moments_in_files=True)


def frozen_stages(model: ModelConfig, rules, train: TrainConfig) -> int:
    """Stages of the model below the first weight that learns.

    Args:
      rules: of `groups.assign`.

    Raises:
      ConfigError: there is none, and train.frozen_cache_mib wants to keep what they make.
    """
    num_frozen = language_model.num_frozen(model, jax.tree.map(lambda rule: rule.trainable, rules))
    require(
        num_frozen > 0 or not train.frozen_cache_mib,
        f"train.frozen_cache_mib={train.frozen_cache_mib}, but no layer is frozen: train.train_only={train.train_only!r} must leave out the "
        f"embedding and the first layers ({'/'.join(stages(model)[0]).rstrip('/')} is the first of them).",
    )
    return num_frozen


def with_capacity(model: ModelConfig, capacity_factor: float) -> ModelConfig:
    """The model with buffers of that size."""
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, capacity_factor=capacity_factor))
