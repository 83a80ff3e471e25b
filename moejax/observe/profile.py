"""A trace of some steps, for TensorBoard's profile page or Perfetto."""

from pathlib import Path

import jax


class Profiler:
    """Records steps first to last, both included, into folder/trace."""

    def __init__(self, folder: str | Path, steps: tuple[int, int] | None):
        self._folder, self._steps = Path(folder) / "trace", steps
        self._running = False

    def before(self, step: int) -> None:
        """Called before `step` is started; the first step is 1."""
        if self._steps is not None and self._steps[0] <= step <= self._steps[1] and not self._running:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after(self, step: int) -> Path | None:
        """Called when the result of `step` is there; returns the trace's folder once it is written."""
        if self._running and self._steps is not None and step >= self._steps[1]:
            return self.close()
        return None

    def close(self) -> Path | None:
        """Ends a trace that is still being recorded."""
        if not self._running:
            return None
        self._running = False
        jax.profiler.stop_trace()
        return self._folder
