"""Named results in bytes and seconds, and the choice among them that fits a budget."""

import dataclasses
from collections.abc import Iterable, Mapping

from moejax.config.errors import ConfigError
from moejax.config.memory import CHOSEN, INPUTS, LEAN, Choice, MemoryConfig
from moejax.memory.policy import overrides


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One named result of one layer on one device."""

    result_bytes: int
    flops: float = 0.0
    """Of the matmuls that make it, from what is named before it."""
    sent_bytes: float = 0.0
    """What the device sends to others to make it."""

    def recompute_s(self, rates: MemoryConfig) -> float:
        """Seconds to make it again: its matmuls, or reading and writing as many bytes as it has where that takes longer; and the exchange."""
        matmuls_s, memory_s = self.flops / (rates.compute_tflops * 1e12), 2 * self.result_bytes / (rates.memory_gb_per_s * 1e9)
        return max(matmuls_s, memory_s) + self.sent_bytes / (rates.exchange_gb_per_s * 1e9)

    def copy_s(self, rates: MemoryConfig) -> float:
        """Seconds of its copy to the host, or back."""
        return self.result_bytes / (rates.copy_gb_per_s * 1e9)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A named result of all layers that make it alike."""

    name: str
    maker: str
    """Mixer, feed-forward, or `layer` for what every layer has."""
    layers: int
    cost: Cost
    """Of one layer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """A name's bytes and seconds over all layers."""

    name: str
    kept_bytes: int
    recompute_s: float
    copy_s: float

    @classmethod
    def of(cls, results: Iterable[Result], rates: MemoryConfig) -> dict[str, "Total"]:
        """By name."""
        totals: dict[str, Total] = {}
        for result in results:
            cost, layers = result.cost, result.layers
            before = totals.get(result.name, cls(name=result.name, kept_bytes=0, recompute_s=0.0, copy_s=0.0))
            totals[result.name] = cls(
                name=result.name,
                kept_bytes=before.kept_bytes + layers * cost.result_bytes,
                recompute_s=before.recompute_s + layers * cost.recompute_s(rates),
                copy_s=before.copy_s + layers * cost.copy_s(rates),
            )
        return totals


def fit(config: MemoryConfig, totals: Mapping[str, Total], *, beside_s: float) -> dict[str, Choice]:
    """What `auto` does with each name, so that what stays on the device fits `budget_gb`.

    Each name that may leave does so in the way that takes fewer seconds: a copy to the host, as long as all copies together fit beside the
    forward pass, or computing it again. The name that frees most bytes per second leaves first: what is dear per byte stays in device
    memory. At last, what left and would still fit comes back, the dearest per byte first.

    Args:
      totals: names that the model makes, by name.
      beside_s: seconds of the forward pass, beside which copies to the host run.

    Raises:
      ConfigError: what must stay is more than the budget.
    """
    given = overrides(config)
    choices: dict[str, Choice] = {name: given.get(name, "keep") for name in totals}
    room = config.budget_gb * 1e9 - sum(totals[name].kept_bytes for name, choice in choices.items() if choice == "keep")
    copies_s = sum(totals[name].copy_s for name, choice in choices.items() if choice == "offload")
    free = [total for name, total in totals.items() if name not in given]
    gone: list[Total] = []
    for total in sorted(free, key=lambda total: _freed_per_s(total, config), reverse=True):
        if room >= 0:
            break
        way = _way(total, hides=copies_s + total.copy_s <= beside_s)
        if way is None:
            continue
        choices[total.name], room = way, room + total.kept_bytes
        copies_s += total.copy_s if way == "offload" else 0.0
        gone.append(total)
    if room < 0:
        least_gb = config.budget_gb - room / 1e9
        raise ConfigError(
            f"memory.budget_gb={config.budget_gb} is too little: what must stay on a device takes {least_gb:g}. A larger budget fits, or "
            f"fewer tokens on a device at a time (more train.accumulation)."
        )
    for total in reversed(gone):
        if total.kept_bytes <= room:
            choices[total.name], room = "keep", room - total.kept_bytes
    return choices


def _way(total: Total, *, hides: bool) -> Choice | None:
    """How a name leaves the device; None: not at all."""
    if total.name in CHOSEN:
        return None  # few bytes, wanted first thing backward
    if total.name in INPUTS:
        return "offload" if hides else None
    return "offload" if hides and total.copy_s < total.recompute_s else "recompute"


def _freed_per_s(total: Total, rates: MemoryConfig) -> float:
    """Bytes, in the quicker way; 0 for what has none."""
    copy = rates.copy_gb_per_s * 1e9
    if not total.kept_bytes:
        return 0.0
    return copy if total.name in LEAN else max(copy, total.kept_bytes / total.recompute_s)
