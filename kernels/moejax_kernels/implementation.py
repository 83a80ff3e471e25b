"""Which implementation of an op runs. A name never falls back; None picks the fastest that runs here, and says so once."""

import functools
import importlib
import logging
from collections.abc import Mapping
from typing import Literal

Implementation = Literal["reference", "xla", "triton_gpu", "mosaic_gpu"]
log = logging.getLogger("moejax_kernels")


class UnsupportedError(ValueError):
    """The named implementation cannot run these inputs on this device; the message says why and what would."""


def later(module: str, name: str):
    """A function whose module is imported when it is first called: GPU kernels need packages that a CPU run does not have."""

    def call(*args, **kwargs):
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


def choose(op: str, asked: Implementation | None, available: dict, *, why_not: Mapping[str, str | None] | None = None):
    """The function that implements `op`.

    Args:
      op: name of the op, for messages.
      asked: an implementation by name, or None.
      available: name -> function, the fastest first.
      why_not: name -> why it cannot run these inputs here, and what would; None or left out where it can.

    Raises:
      UnsupportedError: `asked` is not among `available`, or cannot run.
    """
    why_not = why_not or {}
    if asked is None:
        name = next(name for name in available if not why_not.get(name))
        CHOSEN[op] = name
        _say(op, name)
        return available[name]
    if asked not in available:
        raise UnsupportedError(f"{op}: implementation={asked!r} does not exist here; available are {', '.join(available)}.")
    if reason := why_not.get(asked):
        raise UnsupportedError(f"{op}: {asked} {reason}")
    return available[asked]


@functools.cache
def _say(op: str, name: str) -> None:
    log.info("%s runs as %s", op, name)


CHOSEN: dict[str, str] = {}
"""Op -> implementation that None picked last in this process; a run prints it when it starts."""
