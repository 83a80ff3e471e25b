"""One optimizer step: gradients over all microbatches, clipping, update, router bias."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from moejax.config.model import ModelConfig
from moejax.config.training import LossConfig
from moejax.losses import router_bias
from moejax.model.context import Switches
from moejax.model.objective import Report, objective, totals
from moejax.model.past import Past, goes_on
from moejax.model.transformer import Below
from moejax.optim.clip import clip, global_norm
from moejax.train.control import control_metrics, told, update
from moejax.train.masters import differentiable
from moejax.train.state import TrainState


def gradients(
    config: ModelConfig,
    losses: LossConfig,
    params: dict,
    batches,
    switches: Switches,
    *,
    control: dict | None = None,
    trainable: dict | None = None,
    past: Past | None = None,
    below: Below | None = None,
):
    """Loss, gradients and report of a global batch.

    Args:
      batches: a Batch whose arrays are [A, B / A, ...]: A microbatches.
      control: what layers are told (`control.told`).
      trainable: bools keyed like the weights; the gradients of the others are 0 and cost nothing. None: all are.
      past: what the batch before left, for one microbatch alone; no gradient goes there.
      below: what the first stages of the model make of the batch (`language_model.lower`), for one microbatch alone.

    Returns:
      loss, gradients in the weights' dtype, Report; the same for every A and every mesh, up to rounding.
    """
    whole = totals(batches)
    num_microbatches = batches.tokens_BL.shape[0]
    hold = lambda weight, learns: weight if learns else jax.lax.stop_gradient(weight)
    held = lambda params: params if trainable is None else jax.tree.map(hold, params, trainable)
    params, read = differentiable(config, params)
    run = lambda params, batch, **told: objective(config, losses, read(held(params)), batch, whole, switches, **told)
    first = jax.tree.map(lambda array: array[0], batches)
    if num_microbatches == 1:
        run_first = lambda params: run(params, first, control=control, past=past, below=below)
        (loss, report), grads = jax.value_and_grad(run_first, has_aux=True)(params)
        return loss, grads, report
    if past is not None or below is not None:
        raise ValueError(f"a past and what lies below are those of one batch, not of {num_microbatches} microbatches; 1 fits.")
    control = with_whole_load(config, losses, functools.partial(run, control=control), params, batches, control)
    differentiate = jax.value_and_grad(lambda params, batch: run(params, batch, control=control), has_aux=True)

    def add(sums, batch):
        (loss, report), grads = differentiate(params, batch)
        return _add_up(sums, (loss, grads, report)), None

    (loss, report), grads = jax.eval_shape(differentiate, params, first)
    zeros = jax.tree.map(
        lambda like: jnp.ones(like.shape, bool) if like.dtype == bool else jnp.zeros(like.shape, like.dtype), (loss, grads, report)
    )
    return jax.lax.scan(add, zeros, batches)[0]


def _add_up(sums, parts):
    """Sums; flags are true if all are."""
    return jax.tree.map(lambda a, b: a & b if a.dtype == bool else a + b, sums, parts)


def with_whole_load(config: ModelConfig, losses: LossConfig, run, params, batches, control: dict | None):
    """What layers are told, where they balance by it with the rows per expert of the whole global batch: `run(params, batch)`, an
    `objective`, routes every microbatch once without gradients.

    Under the soft constraint this first pass weighs by each microbatch's own loads, so the counts behind the first sparse layer are
    those of slightly other weights.
    """
    if losses.balance != "global" and config.moe.router.overload_strength == 0:
        return control
    control = control or {}

    def load_of(batch):
        layers = run(params, batch)[1].layers
        return {
            section: {place: _counted(layer) for place, layer in places.items() if "load_E" in layer} for section, places in layers.items()
        }

    first = jax.tree.map(lambda array: array[0], batches)
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), jax.eval_shape(load_of, first))
    loads = jax.lax.scan(lambda sums, batch: (_add_up(sums, load_of(batch)), None), zeros, batches)[0]
    return {
        section: {place: control.get(section, {}).get(place, {}) | {"global_load_E": load} for place, load in places.items()}
        for section, places in loads.items()
    }


def _counted(layer: dict):
    """Rows per expert as balancing sees them."""
    return layer.get("counted_E", layer["load_E"])


LAYER_METRICS = {
    "weight_lost": "dropped_weight",
    "weight_given": "dropped_weight_given",
    "overloaded": "overloaded_experts",
    "scaled_rows": "overloaded_rows",
    "removed_weight": "overloaded_weight",
}
"""What layers report -> metric, summed over layers."""


class StepOutput(NamedTuple):
    """What a step tells."""

    scalars: dict
    """Metrics, units in their names."""
    finite_layers: dict | None = None
    """Debug alone: whether the outputs of each layer's mixer and feed-forward are finite, bool [2] by section and place."""
    finite_gradients: dict | None = None
    """Debug alone: whether each weight's gradient is finite."""


class Measured(NamedTuple):
    """What a step knows before any weight moves."""

    grads: dict
    """Not clipped."""
    norm: Any
    """Global norm of the gradients that count."""
    finite: Any
    """Whether weights shall move: loss and norm are finite."""
    rest: TrainState
    """The next state, but for what the optimizer moves."""
    out: StepOutput


def measure(
    state: TrainState,
    batches,
    below: dict | None = None,
    *,
    config: ModelConfig,
    losses: LossConfig,
    trainable: dict,
    switches: Switches,
    num_frozen: int = 0,
) -> Measured:
    """Gradients and all that follows from a batch without the optimizer: counters, control, router biases, metrics.

    A non-finite loss or gradient leaves biases and control as they were; what its rows leave is forgotten. Arguments as `train_step` has them.
    """
    loss, grads, report = gradients(
        config,
        losses,
        state.params,
        batches,
        switches,
        control=told(config, state.control, step=state.step),
        trainable=trainable,
        past=state.past or None,
        below=None if below is None else Below(below, num_frozen),
    )
    norm = global_norm(grads, trainable=trainable)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    params = move_biases(state.params, report, losses, num_chosen=config.moe.experts_per_token)
    skip = (~finite).astype(jnp.int32)
    rest = dataclasses.replace(
        state,
        params=keep_if(finite, params, state.params),
        step=state.step + 1,
        skipped=state.skipped + skip,
        skipped_in_a_row=(state.skipped_in_a_row + skip) * skip,
        control=keep_if(finite, update(config, state.control, report.layers, num_microbatches=batches.tokens_BL.shape[0]), state.control),
        # rows have moved on: after a step that is not finite they begin anew, from nothing
        past=jax.tree.map(lambda left: jnp.where(finite, left, 0), report.past) if state.past else {},
    )
    out = StepOutput(step_metrics(loss, norm, report, totals(batches), rest, losses))
    if batches.segments.copies_BL is not None:
        out.scalars["computed_tokens"] = jnp.sum(batches.segments.ids_BL >= 0).astype(jnp.float32)
    if state.past:
        first_B = batches.positions_BL[0, :, 0]
        going_on_B = goes_on(state.past, first_B)
        out.scalars["rows_going_on"], out.scalars["rows_cut_off"] = jnp.sum(going_on_B), jnp.sum((first_B > 0) & ~going_on_B)
    if switches.debug:
        flags = {section: {place: layer["finite_2"] for place, layer in layers.items()} for section, layers in report.layers.items()}
        out = StepOutput(out.scalars, flags, jax.tree.map(lambda grad: jnp.isfinite(grad).all(), grads))
    return Measured(grads, norm, finite, rest, out)


def keep_if(finite, new, old):
    """`new` after a step that counts, else `old`; leaves that are the same array stay."""
    return jax.tree.map(lambda n, o: n if n is o else jnp.where(finite, n, o), new, old)


def train_step(
    state: TrainState,
    batches,
    below: dict | None = None,
    *,
    config: ModelConfig,
    losses: LossConfig,
    optimizer: optax.GradientTransformation,
    clip_norm: float,
    trainable: dict,
    switches: Switches,
    num_frozen: int = 0,
) -> tuple[TrainState, StepOutput]:
    """The next state and what the step tells. A non-finite loss or gradient leaves weights, moments, biases and control as they were,
    and what its rows leave is forgotten.

    Args:
      batches: a Batch whose arrays are [A, B / A, ...].
      below: what the first `num_frozen` stages of the model make of the batch, or None.
      clip_norm: largest global norm of the gradients; 0: no clipping.
      trainable: bools keyed like the weights; frozen ones stay out of the norm.
    """
    seen = measure(state, batches, below, config=config, losses=losses, trainable=trainable, switches=switches, num_frozen=num_frozen)
    clipped = clip(seen.grads, seen.norm, clip_norm)  # one NaN makes all of them NaN
    updates, opt_state = optimizer.update(clipped, state.opt_state, state.params)
    params = jax.tree.map(lambda weight, update: weight + update.astype(weight.dtype), seen.rest.params, updates)
    new = dataclasses.replace(
        seen.rest, params=keep_if(seen.finite, params, state.params), opt_state=keep_if(seen.finite, opt_state, state.opt_state)
    )
    return new, seen.out


def move_biases(params: dict, report: Report, losses: LossConfig, *, num_chosen: int) -> dict:
    """Moves every layer's correction bias by what the whole global batch asked for."""
    if losses.bias_update == "none":
        return params

    def move(steps, weight):
        names = [step.key for step in steps]
        if names[-2:] != ["router", "bias_E"]:
            return weight
        seen = report.layers[names[0]][names[1]]
        if losses.bias_update == "sign":
            return router_bias.sign_update(weight, _counted(seen), losses.bias_rate)
        return router_bias.quantile_update(weight, seen["margins_EN"], num_chosen)

    return jax.tree_util.tree_map_with_path(move, params)


def step_metrics(loss, norm, report: Report, whole, state: TrainState, losses: LossConfig) -> dict:
    """Scalars of one step, units in their names."""
    per = lambda total, count: total / jnp.where(count > 0, count, 1)
    metrics = {
        "objective": loss,
        "loss_nats": report.nll / whole.averaged(losses),
        "gradient_norm": norm,
        "balance_loss": report.balance,
        "z": report.z / whole.averaged(losses),
        "router_z": per(report.router_z, whole.tokens),
        "index_kl_nats": per(report.index_kl, whole.tokens),
        "tokens": whole.tokens,
        "targets": whole.targets,
        "skipped_steps": state.skipped,
        "skipped_in_a_row": state.skipped_in_a_row,
    }
    layers = [layer for section in report.layers.values() for layer in section.values() if "load_E" in layer]
    if layers:
        imbalance = [jnp.max(layer["load_E"].max(-1) / jnp.maximum(layer["load_E"].mean(-1), 1e-9)) for layer in layers]
        metrics["expert_load_max_over_mean"] = jnp.max(jnp.stack(imbalance))
        as_float = lambda array: array.astype(jnp.promote_types(array.dtype, jnp.float32))  # int32 counts of many layers pass 2**31
        total = lambda name: sum(jnp.sum(as_float(layer[name])) for layer in layers if name in layer)
        metrics["dropped_rows"] = total("dropped")
        for name, metric in LAYER_METRICS.items():
            if any(name in layer for layer in layers):
                metrics[metric] = total(name)
        if any("distance_rows_3" in layer for layer in layers):
            rows_3 = jnp.sum(jnp.stack([as_float(layer["distance_rows_3"]).reshape(-1, 3).sum(0) for layer in layers]), 0)
            metrics |= {"rows_on_device": rows_3[0], "rows_in_node": rows_3[1], "rows_across_nodes": rows_3[2]}
    metrics |= control_metrics(state.control)
    return metrics
