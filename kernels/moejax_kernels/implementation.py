"""Which implementation of an op runs. A name never falls back; None picks the fastest that runs here, and says so once."""

import functools
import logging
from typing import Literal

Implementation = Literal["reference", "xla", "triton_gpu", "mosaic_gpu"]
log = logging.getLogger("moejax_kernels")


class UnsupportedError(ValueError):
    """The named implementation cannot run these inputs on this device; the message says why and what would."""


def choose(op: str, asked: Implementation | None, available: dict):
    """The function that implements `op`.

    Args:
      op: name of the op, for messages.
      asked: an implementation by name, or None.
      available: name -> function, the fastest first.

    Raises:
      UnsupportedError: `asked` is not among `available`.
    """
    if asked is None:
        name = next(iter(available))
        _say(op, name)
        return available[name]
    if asked not in available:
        raise UnsupportedError(f"{op}: implementation={asked!r} does not exist here; available are {', '.join(available)}.")
    return available[asked]


@functools.cache
def _say(op: str, name: str) -> None:
    CHOSEN[op] = name
    log.info("%s runs as %s", op, name)


CHOSEN: dict[str, str] = {}
"""Op -> implementation that None picked in this process; a run prints it when it starts."""
