"""A trace of some steps, for TensorBoard's profile page or Perfetto."""

from pathlib import Path

import jax


class Profiler:
    """Records steps first to last, both included, into folder/trace."""

    def __init__(self, folder: str | Path, steps: tuple[int, int] | None):
        self._folder, self._steps = Path(folder) / "trace", steps
        self._running = False
        self._first = self._last = 0

    def before(self, step: int) -> None:
        """Called before `step` is started; the first step is 1."""
        if self._steps is not None and self._steps[0] <= step <= self._steps[1] and not self._running:
            jax.profiler.start_trace(str(self._folder))
            self._running = True
            self._first = step

    def after(self, step: int) -> Path | None:
        """Called when the result of `step` is there; returns the trace's folder once it is written."""
        self._last = step
        if self._running and self._steps is not None and step >= self._steps[1]:
            return self.close()
        return None

    def summary(self) -> str | None:
        """Which steps were traced and where the trace lies, or why there is none; None if none was asked for. Call it after `close`."""
        if self._steps is None:
            return None
        first, last = self._steps
        if not self._first:
            return f"none: steps {first} to {last} were asked for, and the last step was {self._last}"
        traced = f"steps {self._first} to {min(last, self._last)} in {self._folder}"
        return traced if (self._first, min(last, self._last)) == self._steps else f"{traced}; steps {first} to {last} were asked for"

    def close(self) -> Path | None:
        """Ends a trace that is still being recorded."""
        if not self._running:
            return None
        self._running = False
        jax.profiler.stop_trace()
        return self._folder
