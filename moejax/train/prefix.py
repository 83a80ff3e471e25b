"""Microbatches that go on from one prefix: what it leaves is computed once for all of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from moejax.config.model import ModelConfig
from moejax.config.training import LossConfig
from moejax.memory.cached import cached
from moejax.model import language_model
from moejax.model.context import Switches
from moejax.model.objective import objective, totals
from moejax.model.past import Past

Way = Literal["each", "rebuild", "once"]


def prefix_gradients(
    config: ModelConfig,
    losses: LossConfig,
    params: dict,
    prefix,
    batches,
    switches: Switches,
    *,
    way: Way = "once",
    shared: Callable[[str, str], bool] = lambda section, place: True,
    control: dict | None = None,
    unroll: int = 1,
):
    """Loss, gradients and report of microbatches whose rows all go on from the rows of one prefix.

    The loss is that of the microbatches alone. A prefix ends one token before the first that has a target: that token opens every
    microbatch's row, its position being the prefix's length.

    Args:
      prefix: a Batch [B, P].
      batches: a Batch whose arrays are [A, B, L]; positions of first tokens come right behind the prefix's last ones.
      switches: past_keys of P or more, for the whole prefix to be seen.
      way: what is done for the layers that share. "once": the prefix runs once, the gradients to what it left are summed over the
        microbatches, and it runs backward once. "rebuild": forward once, and each microbatch rebuilds it for its backward pass, so that
        nothing of the prefix's inside is kept (`moejax.memory.cached`). "each": every microbatch runs it anew.
      shared: whether a layer, by section and place, shares; the others' keys and states are computed anew by each microbatch.
      control: what layers are told.
      unroll: microbatches written out one after the other in the program's loop.

    Returns:
      as `moejax.train.step.gradients`; the same for every way, up to rounding.
    """
    whole = totals(batches)

    run_prefix = functools.partial(_run_prefix, config, prefix, switches, control)
    leave = lambda params: _select(run_prefix(params).layers, shared)
    ends = jax.tree.map(jax.lax.stop_gradient, dataclasses.replace(run_prefix(params), layers={}))

    def loss_of(params, given, batch):
        if way == "each":
            given = leave(params)
        elif way == "rebuild":
            given = cached(leave)(given, (params,))
        others = _select(run_prefix(params).layers, lambda section, place: not shared(section, place))
        past = dataclasses.replace(ends, layers={section: given[section] | others[section] for section in given})
        loss, report = objective(config, losses, params, batch, whole, switches, control=control, past=past)
        return loss, dataclasses.replace(report, past=None)

    given, pull = None, None
    if way == "once":
        given, pull = jax.vjp(leave, params)
    elif way == "rebuild":
        given = jax.lax.stop_gradient(leave(params))
    differentiate = jax.value_and_grad(loss_of, argnums=0 if pull is None else (0, 1), has_aux=True)
    (loss, report), grads = _sum_over(functools.partial(differentiate, params, given), batches, unroll)
    if pull is not None:
        grads, of_given = grads
        grads = jax.tree.map(jnp.add, grads, pull(of_given)[0])
    return loss, grads, report


def _run_prefix(config: ModelConfig, prefix, switches: Switches, control: dict | None, params: dict) -> Past:
    past = language_model.forward(config, params, prefix, switches, control=control).past
    if past is None:
        raise ValueError(f"prefix_gradients: switches.past_keys is None; the prefix's length, {prefix.tokens_BL.shape[1]}, fits.")
    return past


def _select(layers: dict, wanted: Callable[[str, str], bool]) -> dict:
    return {section: {place: kept for place, kept in places.items() if wanted(section, place)} for section, places in layers.items()}


def _sum_over(function, batches, unroll: int):
    """Sums over microbatches; flags are true if all are."""
    like = jax.eval_shape(function, jax.tree.map(lambda array: array[0], batches))
    zeros = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, bool) if leaf.dtype == bool else jnp.zeros(leaf.shape, leaf.dtype), like)
    join = lambda total, part: total & part if total.dtype == bool else total + part
    return jax.lax.scan(lambda sums, batch: (jax.tree.map(join, sums, function(batch)), None), zeros, batches, unroll=unroll)[0]
