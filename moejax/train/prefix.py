"""Microbatches that go on from one prefix: what it leaves is computed once for all of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config.model import ModelConfig
from moejax.config.training import LossConfig
from moejax.memory.cached import cached
from moejax.model import language_model
from moejax.model.context import Switches
from moejax.model.objective import objective, totals
from moejax.model.past import Past
from moejax.train.step import with_whole_load

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

    The loss, and what routers balance by, is that of the microbatches alone. A prefix ends one token before the first that has a target:
    that token opens every microbatch's row, its position being the prefix's length.

    Args:
      prefix: a Batch [B, P].
      batches: a Batch whose arrays are [A, B, L]; positions of first tokens come right behind the prefix's last ones (`start_B` of
        `Batch.build`). That is checked of numpy arrays. Others may have no values yet (arguments of a jitted function), and a row whose
        position does not fit is read as if there were no prefix: check them before, with `require_to_go_on`.
      switches: past_keys of P or more, for the whole prefix to be seen; layers that see a window need its tokens but one.
      way: what is done for the layers that share. "once": the prefix runs once, the gradients to what it left are summed over the
        microbatches, and it runs backward once. "rebuild": forward once, and each microbatch rebuilds it for its backward pass, so that
        nothing of the prefix's inside is kept (`moejax.memory.cached`). "each": every microbatch runs it anew.
      shared: whether a layer, by section and place, shares; the others' keys and states are computed anew by each microbatch.
      control: what layers are told.
      unroll: microbatches written out one after the other in the program's loop.

    Returns:
      as `moejax.train.step.gradients`; the same for every way, up to rounding.

    Raises:
      ValueError: past_keys do not reach over the prefix, or a row of the microbatches does not go on from its prefix.
    """
    _require_keys(config, prefix.tokens_BL.shape[1], switches.past_keys)
    if all(isinstance(array, np.ndarray) for array in jax.tree.leaves((prefix, batches))):
        require_to_go_on(prefix, batches)
    return _gradients(config, losses, params, prefix, batches, switches, way, shared, control, unroll)


def _gradients(config, losses, params, prefix, batches, switches, way: Way, shared, control, unroll):
    whole = totals(batches)
    run_prefix = functools.partial(_run_prefix, config, prefix, switches, control)
    leave = lambda params: _select(run_prefix(params).layers, shared)
    ends = jax.tree.map(jax.lax.stop_gradient, dataclasses.replace(run_prefix(params), layers={}))

    def loss_of(params, given, batch, *, control):
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
    if batches.tokens_BL.shape[0] > 1:
        run = lambda params, batch: loss_of(params, given, batch, control=control)
        control = with_whole_load(config, losses, run, params, batches, control)
    differentiate = jax.value_and_grad(functools.partial(loss_of, control=control), argnums=0 if pull is None else (0, 1), has_aux=True)
    (loss, report), grads = _sum_over(functools.partial(differentiate, params, given), batches, unroll)
    if pull is not None:
        grads, of_given = grads
        grads = jax.tree.map(jnp.add, grads, pull(of_given)[0])
    return loss, grads, report


def require_to_go_on(prefix, batches) -> None:
    """Raises ValueError if a row of the microbatches does not begin right behind its prefix. Arrays as `prefix_gradients` takes them, on
    the host; rows of padding do not begin."""
    next_B = np.where(np.asarray(prefix.segments.ids_BL)[:, -1] >= 0, np.asarray(prefix.positions_BL)[:, -1] + 1, -1)
    first_AB, padding_AB = np.asarray(batches.positions_BL)[..., 0], np.asarray(batches.segments.ids_BL)[..., 0] < 0
    wrong = np.argwhere((first_AB != next_B) & ~padding_AB)
    if wrong.size:
        microbatch, row = wrong[0]
        ends = "with padding" if next_B[row] < 0 else f"at position {next_B[row] - 1}"
        raise ValueError(
            f"prefix_gradients: row {row} of microbatch {microbatch} begins at position {first_AB[microbatch, row]}, and its prefix ends "
            f"{ends}; rows begin one token behind the prefix's last one (start_B of Batch.build)."
        )


def _run_prefix(config: ModelConfig, prefix, switches: Switches, control: dict | None, params: dict) -> Past:
    past = language_model.forward(config, params, prefix, switches, control=control).past
    assert past is not None  # there are past_keys
    return past


def _require_keys(config: ModelConfig, length: int, past_keys: int | None) -> None:
    def reach(mixer: str) -> int:
        if mixer in ("kda", "gdn"):
            return 0
        return min(config.gqa.window - 1, length) if mixer == "gqa" and config.gqa.window else length

    needed = max(map(reach, config.mixers))
    if past_keys is None or past_keys < needed:
        raise ValueError(
            f"prefix_gradients: switches.past_keys={past_keys} leaves out what the model's layers ({', '.join(sorted(set(config.mixers)))}) "
            f"see of a prefix of {length} tokens; {needed} or more fit."
        )


def _select(layers: dict, wanted: Callable[[str, str], bool]) -> dict:
    return {section: {place: kept for place, kept in places.items() if wanted(section, place)} for section, places in layers.items()}


def _sum_over(function, batches, unroll: int):
    """Sums over microbatches; flags are true if all are."""
    like = jax.eval_shape(function, jax.tree.map(lambda array: array[0], batches))
    zeros = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, bool) if leaf.dtype == bool else jnp.zeros(leaf.shape, leaf.dtype), like)
    join = lambda total, part: total & part if total.dtype == bool else total + part
    return jax.lax.scan(lambda sums, batch: (jax.tree.map(join, sums, function(batch)), None), zeros, batches, unroll=unroll)[0]
