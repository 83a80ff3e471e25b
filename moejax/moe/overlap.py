"""Exchanges that hide behind work: chunks of tokens that travel in turn, and the shared expert beside them."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Trip(NamedTuple):
    """The steps of one chunk of tokens to their experts and back; `out` and `back` are exchanges."""

    packed_RD: Any
    """Rows ready to leave."""
    out: Callable[[Any], Any]
    """Rows as they left -> as they arrive."""
    work: Callable[[Any], Any]
    """Rows as they arrived -> what the experts make of them, ready to return."""
    back: Callable[[Any], Any]
    """-> at home."""
    finish: Callable[[Any], Any]
    """-> what came of it."""


class Beside(NamedTuple):
    """Work on the same tokens that needs no exchange: the shared expert. `leave(enter(x))` is computed beside the first and last exchange."""

    x_BLD: Any
    params: dict
    """Name -> weight and its spec."""
    enter: Callable[[dict, Any], Any]
    """(this device's shards of the weights, x) -> tree of rows; inside an island."""
    leave: Callable[[dict, Any], Any]
    """(shards, that tree) -> rows."""


def travel(trips: list[Trip], x_TD=None, enter: Callable[[Any], Any] = lambda x_TD: x_TD, leave: Callable[[Any], Any] = lambda rows: rows):
    """Runs trips so that each exchange can hide behind matmuls: chunk i + 1 leaves before chunk i is worked on, and returns meanwhile.

    The first exchange has `enter` beside it, the last `leave`; backward it is the same from the end, chunk by chunk. XLA's scheduler knows
    what can run beside what, but not which work it should keep for which exchange. Optimization barriers tell it (it turns them into
    control dependencies): the exchanges come in one order, one at a time, and each ends after the work meant for it. One trip is left to
    the scheduler.

    Args:
      x_TD: what `enter` works on, or None for nothing.

    Returns:
      what came of each trip, and leave(enter(x_TD)).
    """
    if len(trips) == 1:
        (trip,) = trips
        return [trip.finish(trip.back(trip.work(trip.out(trip.packed_RD))))], leave(enter(x_TD))
    first, last = trips[0], trips[-1]
    packed_RD, x_TD = _meet(first.packed_RD, x_TD)
    arrived_RD, inside = _meet(first.out(packed_RD), enter(x_TD))
    home = []
    for trip, following in itertools.pairwise(trips):
        packed_RD, inside = _meet(following.packed_RD, inside)
        next_RD, inside = _meet(following.out(packed_RD), inside)
        done_RD, inside = _meet(trip.work(arrived_RD), inside)
        home_RD, inside = _meet(trip.back(done_RD), inside)
        home.append(home_RD)
        arrived_RD = next_RD
    done_RD, inside = _meet(last.work(arrived_RD), inside)
    home_RD, y_TD = _meet(last.back(done_RD), leave(inside))
    return [trip.finish(home_RD) for trip, home_RD in zip(trips, [*home, home_RD], strict=True)], y_TD


def _meet(rows_RD, beside):
    """Neither is used before both are there; nor are their gradients, backward."""
    return jax.lax.optimization_barrier((rows_RD, beside))
