"""What `jax.checkpoint` does with each named result."""

import dataclasses
from collections.abc import Mapping

import jax

from moejax.config.memory import BALANCED, LEAN, RESULTS, Choice, MemoryConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """Names of results that wait for the backward pass; all others are computed again, those without a name too."""

    kept: tuple[str, ...] = LEAN
    """In the device's memory."""
    offloaded: tuple[str, ...] = ()
    """In pinned host memory."""


def policy(saved: Saved):
    """The same for `jax.checkpoint`."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved.kept,
        names_which_can_be_offloaded=saved.offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )


def by_preset(config: MemoryConfig) -> dict[str, Choice]:
    """What a config other than `auto` does with each name."""
    kept = {"fast": tuple(RESULTS), "balanced": BALANCED, "lean": LEAN}[config.preset]
    choices: dict[str, Choice] = {name: "keep" if name in kept else "recompute" for name in RESULTS}
    return choices | overrides(config)


def overrides(config: MemoryConfig) -> dict[str, Choice]:
    """What a config says name by name."""
    return {name: choice for choice, names in config.overrides().items() for name in names}


def saved(config: MemoryConfig, choices: Mapping[str, Choice]) -> Saved | None:
    """What the choices save; None where `fast` stands unchanged: there a layer is not put under `jax.checkpoint`."""
    if config.preset == "fast" and all(choice == "keep" for choice in choices.values()):
        return None
    of = lambda wanted: tuple(name for name, choice in choices.items() if choice == wanted)
    return Saved(of("keep"), of("offload"))
