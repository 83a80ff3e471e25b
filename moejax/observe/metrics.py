"""Numbers of a run, one json line a step, and the same for TensorBoard."""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends to metrics.jsonl in a run's folder; only process 0 writes. Names carry their unit (`step_s`, `lr`, `tokens_per_s`)."""

    def __init__(self, folder: str | Path, *, tensorboard: bool, resumed_step: int = 0):
        """
        Args:
          folder: the run's folder; must exist.
          tensorboard: write event files to folder/tensorboard too.
          resumed_step: steps that the restored checkpoint has seen; later lines of an earlier life are taken out.
        """
        self._file = self._board = None
        if jax.process_index() != 0:
            return
        path = Path(folder) / FILE_NAME
        _truncate(path, resumed_step)
        self._file = path.open("a")
        if tensorboard:
            self._board = SummaryWriter(str(Path(folder) / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line: `step`, `wall_s` (seconds since 1970) and the values, scalars or lists of numbers; not finite ones are null."""
        if self._file is None:
            return
        plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
        self._file.write(_to_json({"step": step, "wall_s": time.time()} | plain))
        self._file.flush()
        if self._board is not None:
            for name, value in plain.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes what TensorBoard still holds."""
        for part in (self._file, self._board):
            if part is not None:
                part.close()


def read(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, null as nan; a last line that a killed process left half written does not count."""
    lines = (Path(folder) / FILE_NAME).read_text().splitlines(keepends=True)
    return [_from_null(json.loads(line)) for line in lines if line.endswith("\n")]


def _truncate(path: Path, last_step: int) -> None:
    """Keeps the lines up to `last_step`; written to a new file first, so that a kill in between loses nothing."""
    if not path.exists():
        return
    kept = [_to_json(line) for line in read(path.parent) if line["step"] <= last_step]
    new = path.with_suffix(".new")
    new.write_text("".join(kept))
    new.replace(path)


def _to_json(line: Mapping[str, Any]) -> str:
    return json.dumps(_to_null(line), allow_nan=False) + "\n"


def _to_null(value: Any) -> Any:
    """JSON knows neither nan nor infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _within(value, _to_null)


def _from_null(value: Any) -> Any:
    return math.nan if value is None else _within(value, _from_null)


def _within(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: change(part) for name, part in value.items()}
    return [change(part) for part in value] if isinstance(value, list | tuple) else value
