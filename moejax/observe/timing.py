"""Where a step's time goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("data", "compute", "checkpoint")


class StepTimer:
    """Seconds of one step, split into PARTS; what is in none of them is `other`.

    JAX returns before the device is done: wait for the step's result inside `with timer.part("compute")`.
    """

    def __init__(self) -> None:
        self._parts_s = dict.fromkeys(PARTS, 0.0)
        self._began_s = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time of the block to part `name`, one of PARTS."""
        if name not in self._parts_s:
            raise KeyError(f"{name!r} is no part of a step; parts are {', '.join(PARTS)}.")
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._parts_s[name] += time.perf_counter() - began_s

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap: `step_s`, `data_s`, `compute_s`, `checkpoint_s` and `other_s`; the clock starts anew."""
        now_s = time.perf_counter()
        total_s, parts_s = now_s - self._began_s, self._parts_s
        self._began_s, self._parts_s = now_s, dict.fromkeys(PARTS, 0.0)
        return {"step_s": total_s, **{f"{name}_s": value for name, value in parts_s.items()}, "other_s": total_s - sum(parts_s.values())}
