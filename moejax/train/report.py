"""What a run says of itself before it starts, and where it went wrong."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from moejax_kernels.implementation import CHOSEN

from moejax.config.model import LayerKind, LayerPlan
from moejax.config.run import Plan
from moejax.model import counting, language_model
from moejax.model.transformer import stages
from moejax.optim import groups
from moejax.train.program import frozen_stages

_SECTIONS = ("unembed", "final_norm", "final_residual", "tail", "unit", "head", "embed")
_SUBLAYERS = ("feed_forward", "feed_forward_norm", "feed_forward_residual", "mixer", "mixer_norm", "mixer_residual")


def plan_lines(plan: Plan) -> list[str]:
    """Mesh, batch, layers, parameters and FLOPs by part; needs no device."""
    config, layers = plan.config, plan.layers
    axes = " x ".join(f"{axis} {size}" for axis, size in config.mesh.sizes().items() if size > 1) or "one device"
    rows = [
        ("mesh", axes),
        (
            "batch",
            f"{config.data.batch_size} rows x {config.data.seq_len} tokens, {config.train.accumulation} microbatches of "
            f"{plan.rows_per_device} rows a device",
        ),
        ("layers", _spell_layers(layers)),
    ]
    parts = counting.count(config.model, config.data.seq_len)
    total, active, flops = (sum(getattr(part, name) for part in parts) for name in ("params", "active", "flops"))
    rows.append(("weights", f"{total:,} parameters, {active:,} active a token"))
    rows.append(
        ("FLOPs", f"{flops:,.0f} forward, {counting.train_flops_per_token(config.model, config.data.seq_len):,.0f} in training, a token")
    )
    if config.train.frozen_cache_mib:
        rules = groups.assign(config.optim, language_model.shapes(config.model), train_only=config.train.train_only)
        frozen = [
            section + f"/{place}" * bool(place)
            for section, place in stages(config.model)[: frozen_stages(config.model, rules, config.train)]
        ]
        rows.append(("frozen", f"{', '.join(frozen)}: what they make of rows is kept, and the step starts from there"))
    lines = [f"{name:9} {text}" for name, text in rows]
    lines.append(f"{'':9} {'part':20} {'layers':>6} {'parameters':>19} {'active':>17} {'FLOPs a token':>17}")
    lines += [f"{'':9} {part.name:20} {part.layers:6} {part.params:19,} {part.active:17,} {part.flops:17,.0f}" for part in parts]
    return lines


def describe(plan: Plan, rules: Any, *, state: int, **compiled: int) -> str:
    """The plan, optimizer groups, bytes per device and chosen kernels, once the step is compiled."""
    lines = plan_lines(plan)
    for label, tensors, params, rate, decay in groups.table(rules, language_model.shapes(plan.config.model)):
        lines.append(f"{'optimizer':9} {label}: {params:,} parameters in {tensors} tensors, peak rate {rate:g}, decay {decay:g}")
    sizes = ", ".join(f"{name.removesuffix('_bytes')} {size / 2**20:.1f} MiB" for name, size in compiled.items())
    lines.append(f"{'bytes':9} a device: weights and moments {state / 2**20:.1f} MiB; step: {sizes}")
    lines.append(f"{'kernels':9} " + ", ".join(f"{op} {name}" for op, name in sorted(CHOSEN.items())))
    return "\n".join(lines)


def _spell_layers(layers: LayerPlan) -> str:
    spell = lambda kinds: ", ".join(f"{kind.mixer}+{kind.feed_forward}" for kind in kinds)
    body = f"{layers.num_units} x ({spell(layers.unit)})" if layers.num_units else ""
    return "; ".join(part for part in (spell(layers.head), body, spell(layers.tail)) if part)


def first_non_finite(plan: Plan, layers: Mapping[str, Any], gradients: Any) -> str | None:
    """The first sublayer whose output is not finite, else the first weight whose gradient is not; None if all are finite.

    Backward goes from the output to the embedding, so the first weight is the one nearest to the output.

    Args:
      layers: flags of each layer's mixer and feed-forward, [2] or stacked [n, 2], by section and place.
      gradients: a flag per weight, keyed like the weights.
    """
    kinds: tuple[LayerKind, ...] = plan.config.model.layers()
    for number, kind in enumerate(kinds):
        section, place, stack = plan.layers.place(number)
        flags = np.asarray(layers[section][str(place)])
        for name, finite in zip(
            (f"mixer ({kind.mixer})", f"feed-forward ({kind.feed_forward})"), flags if stack is None else flags[stack], strict=True
        ):
            if not finite:
                return f"layer {number}, {name}"
    bad = sorted((path for path, finite in _leaves(gradients) if not finite), key=_backward_order)
    return f"the gradient of {bad[0]} ({len(bad)} weights in all), while all activations are finite" if bad else None


def _backward_order(path: str) -> tuple[int, ...]:
    """When backward reaches a weight; those of one sublayer at once, those of a stack with its last layer."""
    section, *inside = path.split("/")
    place = (-int(inside[0]), _SUBLAYERS.index(inside[1])) if section in ("tail", "unit", "head") else ()
    return (_SECTIONS.index(section), *place)


def _leaves(tree: Any, path: str = ""):
    for name, node in tree.items():
        here = f"{path}/{name}" if path else name
        yield from _leaves(node, here) if isinstance(node, Mapping) else [(here, bool(node))]
