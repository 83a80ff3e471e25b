"""Microbatches that go on from one prefix: what it leaves is computed once for all of them."""

import dataclasses
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

    def run_prefix(params) -> Past:
        return language_model.forward(config, params, prefix, switches, control=control).past  # type: ignore[return-value]

    choose = lambda layers, wanted: {
        section: {place: kept for place, kept in places.items() if shared(section, place) == wanted} for section, places in layers.items()
    }
    leave = lambda params: choose(run_prefix(params).layers, True)
    ends = jax.tree.map(jax.lax.stop_gradient, dataclasses.replace(run_prefix(params), layers={}))

    def loss_of(params, given, batch):
        if way == "each":
            given = leave(params)
        elif way == "rebuild":
            given = cached(leave)(given, (params,))
        others = choose(run_prefix(params).layers, False)
        layers = {section: given[section] | others[section] for section in given}
        past = dataclasses.replace(ends, layers=layers)
        loss, report = objective(config, losses, params, batch, whole, switches, control=control, past=past)
        return loss, dataclasses.replace(report, past=None)

    given, pull = jax.vjp(leave, params) if way == "once" else (None if way == "each" else jax.lax.stop_gradient(leave(params)), None)
    differentiate = jax.value_and_grad(loss_of, argnums=(0, 1) if way == "once" else 0, has_aux=True)
    first = jax.tree.map(lambda array: array[0], batches)
    sums = jax.tree.map(
        lambda like: jnp.ones(like.shape, bool) if like.dtype == bool else jnp.zeros(like.shape, like.dtype),
        jax.eval_shape(differentiate, params, given, first),
    )
    join = lambda total, part: total & part if total.dtype == bool else total + part
    add = lambda sums, batch: (jax.tree.map(join, sums, differentiate(params, given, batch)), None)
    ((loss, report), grads), _ = jax.lax.scan(add, sums, batches, unroll=unroll)
    if pull is not None:
        grads, of_given = grads
        grads = jax.tree.map(jnp.add, grads, pull(of_given)[0])
    return loss, grads, report
