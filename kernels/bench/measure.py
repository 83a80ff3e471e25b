"""Interleaved timings of compiled functions on a shared machine, and their temporaries."""

import dataclasses
import time
from collections.abc import Callable

import jax


@dataclasses.dataclass
class Row:
    """One way of computing the same thing, forward and backward."""

    op: str
    case: str
    way: str
    temporary_bytes: int
    output_bytes: int
    cpu_s: float = float("inf")
    """Least user CPU time of a call, all threads together."""
    wall_s: float = float("inf")
    """Least time on the clock of a call."""


def value_and_gradients(function: Callable, arrays, cotangents):
    """Compiled `function(*arrays)` with the gradients of all float arrays, and its arguments."""
    floats = [at for at, array in enumerate(arrays) if jax.numpy.issubdtype(array.dtype, jax.numpy.floating)]

    def run(arrays, cotangents):
        def of_floats(*some):
            every = list(arrays)
            for at, array in zip(floats, some, strict=True):
                every[at] = array
            return function(*every)

        out, pull = jax.vjp(of_floats, *(arrays[at] for at in floats))
        return out, pull(cotangents)

    return jax.jit(run).lower(arrays, cotangents).compile(), (arrays, cotangents)


def compare(op: str, case: str, ways: dict[str, tuple], *, rounds: int, seconds: float = 0.0) -> list[Row]:
    """Runs all ways in turn, at least `rounds` times and for at least so many seconds, and keeps the best of each.

    What others do on the machine meanwhile hits all ways, but not alike: what lives in a cache suffers most, and for seconds on end.
    Each runs twice in its turn and the second run counts: the first fetches memory that the others gave back.

    Args:
      ways: name -> (compiled function, arguments).
    """
    rows = []
    for way, (compiled, _) in ways.items():
        memory = compiled.memory_analysis()
        rows.append(Row(op, case, way, memory.temp_size_in_bytes, memory.output_size_in_bytes))
    until_s = time.perf_counter() + seconds
    while rounds > 0 or time.perf_counter() < until_s:
        rounds -= 1
        for row, (compiled, arguments) in zip(rows, ways.values(), strict=True):
            jax.block_until_ready(compiled(*arguments))
            cpu, wall = time.process_time(), time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            row.cpu_s, row.wall_s = min(row.cpu_s, cpu), min(row.wall_s, wall)
    return rows
