"""What the layers of a run keep for the backward pass: the config's choices against the bytes and seconds of each result."""

import dataclasses

from moejax.config.errors import require
from moejax.config.memory import Choice, MemoryConfig
from moejax.config.model import ModelConfig
from moejax.config.run import Plan
from moejax.memory.policy import Saved, by_preset, saved
from moejax.memory.results import Result, Total, fit
from moejax.model import counting
from moejax.model.saved import Setting, results


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedPlan:
    """A choice for every named result of a model."""

    results: tuple[Result, ...]
    totals: dict[str, Total]
    """By name."""
    choices: dict[str, Choice]
    """By name."""
    saved: Saved | None
    """What the layers are told."""

    def chosen_bytes(self, choice: Choice) -> int:
        """Bytes on each device of the results of one choice."""
        return sum(total.kept_bytes for name, total in self.totals.items() if self.choices[name] == choice)


def plan_saved(plan: Plan, *, gpu: bool, model: ModelConfig | None = None) -> SavedPlan:
    """Chooses for every named result.

    Args:
      gpu: whether the step is for GPUs, whose kernels keep other results.
      model: the model as it is compiled; None: the plan's.

    Raises:
      ConfigError: a choice for a result that no layer makes, or a budget that nothing fits.
    """
    config, memory, model = plan.config, plan.config.memory, model or plan.config.model
    length = config.data.seq_len
    setting = Setting(rows=plan.rows_per_device, length=length, expert_devices=config.mesh.expert, gpu=gpu, index=config.losses.index)
    found = tuple(results(model, setting))
    totals = Total.of(found, memory)
    _require_made(memory, totals)
    if memory.preset == "auto":
        kinds = {kind for layer in model.layers() for kind in (layer.mixer, layer.feed_forward)}
        flops = sum(part.flops for part in counting.count(model, length) if part.name in kinds)
        choices: dict[str, Choice] = fit(memory, totals, beside_s=setting.tokens * flops / (memory.compute_tflops * 1e12))
    else:
        choices = {name: choice for name, choice in by_preset(memory).items() if name in totals}
    return SavedPlan(results=found, totals=totals, choices=choices, saved=saved(memory, choices))


def _require_made(memory: MemoryConfig, totals: dict[str, Total]) -> None:
    for choice, names in memory.overrides().items():
        for name in names:
            require(
                name in totals, f"memory.{choice} names {name!r}, which no layer of this model makes; these are made: {', '.join(totals)}."
            )


def table_lines(plan: SavedPlan, memory: MemoryConfig) -> list[str]:
    """The results with their choices, for a person."""
    head = f"{'saved':9} {'result':14} {'of':10} {'layers':>6} {'MiB a layer':>12} {'MiB a device':>13} {'choice':10} {'ms':>9}"
    lines = [head]
    for name, choice in plan.choices.items():
        for result in (result for result in plan.results if result.name == name):
            cost, layers = result.cost, result.layers
            seconds = {"keep": 0.0, "offload": cost.copy_s(memory), "recompute": cost.recompute_s(memory)}[choice] * layers
            lines.append(
                f"{'':9} {name:14} {result.maker:10} {layers:6} {cost.result_bytes / 2**20:12.2f} {layers * cost.result_bytes / 2**20:13.2f} "
                f"{choice:10} {1e3 * seconds:9.3f}"
            )
    return [*lines, f"{'':9} {summary(plan)}"]


def summary(plan: SavedPlan) -> str:
    """Totals by choice, in one line."""
    kept, offloaded, again = (plan.chosen_bytes(choice) / 2**20 for choice in ("keep", "offload", "recompute"))
    total_s = lambda choice, field: sum(getattr(plan.totals[name], field) for name, chosen in plan.choices.items() if chosen == choice)
    return (
        f"a device: {kept:.1f} MiB kept; {offloaded:.1f} MiB to the host and back, {1e3 * total_s('offload', 'copy_s'):.3f} ms each way; "
        f"{again:.1f} MiB computed again, {1e3 * total_s('recompute', 'recompute_s'):.3f} ms"
    )
