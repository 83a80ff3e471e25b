"""XLA flags that training on GPUs needs, by version of jaxlib: the one place that names them.

They go to the compiler with each program, not through the environment, so a run does not depend on how it was started. What each does was
read from programs compiled for 64 H200s (tests/aot/test_overlap.py); `since` is the first version with which that was done.
"""

import dataclasses
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

JAXLIB = importlib.metadata.version("jaxlib")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One compiler option, for the versions of jaxlib from `since` to before `until`."""

    name: str
    value: bool | int | str
    since: str
    until: str | None = None
    """None: the newest too."""
    why: str


TABLE = (
    Flag(
        name="xla_gpu_enable_latency_hiding_scheduler",
        value=True,
        since="0.11.2",
        why="puts work between the start and the end of a collective; without it a transfer is mostly waited for",
    ),
    Flag(
        name="xla_gpu_experimental_parallel_collective_overlap_limit",
        value=4,
        since="0.11.2",
        why="an expert exchange, gathers of the next weights and counters may be under way together; with the default of 1, and with 2, a "
        "gather that is under way takes an exchange of the MoE chain its place beside the matmuls",
    ),
)
OFFLOADING = (
    *TABLE,
    Flag(
        name="xla_gpu_experimental_parallel_async_compute_limit",
        value=64,
        since="0.11.2",
        why="slices that come from the host count as asynchronous computations, of which two may be under way: with the default the third of a "
        "layer's results waits for the first instead of for its layer (tests/aot/test_offload.py)",
    ),
)
"""For programs that copy between the memories of device and host."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What a compiler is given, and what it refused."""

    taken: dict[str, Any]
    rejected: dict[str, str]
    """Name -> the compiler's words."""

    def lines(self) -> list[str]:
        """For a person; none where there is nothing to say."""
        spell = lambda value: str(value).lower()
        lines = [f"XLA flags {', '.join(f'{name}={spell(value)}' for name, value in self.taken.items())}"] if self.taken else []
        return lines + [f"{'':9} rejected by jaxlib {JAXLIB}: {name} ({words})" for name, words in self.rejected.items()]


def wanted(version: str, table: tuple[Flag, ...] = TABLE) -> list[Flag]:
    """Flags for a version of jaxlib."""
    at = _number(version)
    return [flag for flag in table if _number(flag.since) <= at and (flag.until is None or at < _number(flag.until))]


def options_for(device: Any, table: tuple[Flag, ...] = TABLE) -> Options:
    """Options of a device's programs: none but for GPUs. Each is tried on a small program, since XLA drops flags without notice."""
    if "NVIDIA" not in device.device_kind:
        return Options({}, {})
    flags = wanted(JAXLIB, table)
    refused = {flag.name: why for flag in flags if (why := _refusal(device, flag)) is not None}
    return Options({flag.name: flag.value for flag in flags if flag.name not in refused}, refused)


def _refusal(device: Any, flag: Flag) -> str | None:
    """Why the compiler does not take a flag; None if it does."""
    mesh = Mesh(np.array([device]), ("one",))
    like = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    try:
        with jax.set_mesh(mesh):
            jax.jit(lambda x: x + 1).lower(like).compile({flag.name: flag.value})
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        return str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    return None


def _number(version: str) -> tuple[int, ...]:
    """Of "0.11.2.dev3": (0, 11, 2)."""
    parts = version.split("+")[0].split(".")[:3]
    return tuple(int("".join(digit for digit in part if digit.isdigit()) or 0) for part in parts)
