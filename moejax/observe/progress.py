"""What a person sees while a run goes on."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SHOWN = (
    ("loss_nats", "loss", ".4f"),
    ("tokens_per_s", "tok/s", ",.0f"),
    ("expert_load_max_over_mean", "load max/mean", ".2f"),
    ("dropped_rows", "dropped", ",.0f"),
    ("heldout_nats", "held out", ".4f"),
)
"""Metrics shown, where present: name, label, format."""


class ProgressBar:
    """A bar on a terminal, a line every `every` steps elsewhere, so that logs stay readable."""

    def __init__(self, console: Console, *, steps: int, first: int = 0, every: int = 10, shown: bool = True):
        """
        Args:
          console: where to write.
          steps: steps in all.
          first: steps done before this process began.
          every: steps between two lines where there is no terminal.
          shown: False in all processes but one.
        """
        self._console, self._steps, self._first, self._every, self._shown = console, steps, first, every, shown
        self._since: tuple[int, float] | None = None  # the first step seen and when: what came before it was compiling
        self._bar: Progress | None = None
        if shown and console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=steps, completed=first)
            self._bar.start()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the numbers of `step` (steps done so far)."""
        text = "  ".join(f"{label} {values[name]:{style}}" for name, label, style in SHOWN if name in values)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif self._shown and (step % self._every == 0 or step in (self._first + 1, self._steps)):
            self._console.print(f"step {step}/{self._steps}  {text}  {self._left(step)} left", highlight=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        if self._since is None or step == self._since[0]:
            self._since = step, time.monotonic()
            return "?"
        first, began_s = self._since
        seconds = (time.monotonic() - began_s) / (step - first) * (self._steps - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

    def close(self) -> None:
        """Leaves the last state of the bar on the terminal."""
        if self._bar is not None:
            self._bar.stop()
