"""Checkpoints of a run: written in the background, committed whole or not at all, read onto any mesh."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from moejax.checkpoint import layout as layouts

ITEMS = {"state": ocp.StandardCheckpointHandler, "host": ocp.JsonCheckpointHandler}


class MissingCheckpointError(FileNotFoundError):
    """A checkpoint was asked for by name and is not there. The message lists those that are."""


class Checkpointer:
    """The checkpoints in one folder, one subfolder per step.

    A step's folder gets its name only when all of it is on disk (orbax renames it at the end), so a process that is killed
    leaves the older checkpoints, and never one that looks whole and is not. With several processes each writes its shards;
    all must call `save`, `wait` and `close` together.
    """

    def __init__(self, folder: str | Path, *, optimizer: str, keep: int = 2, every: int = 0):
        """
        Args:
          folder: made if missing. Several processes must see the same folder.
          optimizer: kind of optimizer; part of the layout.
          keep: newest checkpoints that stay.
          every: steps between checkpoints; 0: none is ever due.
        """
        self.folder = Path(folder).absolute()
        self.optimizer = optimizer
        self.every = every
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_handlers={name: handler() for name, handler in ITEMS.items()},
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
        )

    def due(self, step: int) -> bool:
        """Whether `step` is one of those after which a checkpoint is kept."""
        return self.every > 0 and step % self.every == 0

    def save(self, step: int, state: Any, host_state: dict[str, Any]) -> None:
        """Starts to write; returns once the arrays are copied, so that the caller may donate them.

        Args:
          step: steps done so far; one that is there already is an error.
          state: tree of arrays, each sharded as it likes.
          host_state: json values (position of the data, ...); that of process 0 is kept.
        """
        host = {"layout": layouts.layout(state, self.optimizer), "host_state": host_state}
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)), force=True)

    def steps(self) -> Sequence[int]:
        """Steps of the whole checkpoints in the folder, oldest first."""
        return _steps_in(self.folder)

    def latest(self) -> int | None:
        """Newest whole checkpoint, or None; process 0 looks for all, since a shared folder may show itself late."""
        newest = max(self.steps(), default=-1)
        if jax.process_count() > 1:
            newest = int(multihost_utils.broadcast_one_to_all(np.int32(newest)))
        return newest if newest >= 0 else None

    def find(self, resume: str) -> Path | None:
        """Where a run starts from.

        Args:
          resume: "auto" (the newest in the folder, if any), "never", or the path of a checkpoint.

        Returns:
          The checkpoint to restore, or None for a fresh start.

        Raises:
          MissingCheckpointError: the path is no checkpoint.
          FileExistsError: the folder holds checkpoints that are newer than the start; a later "auto" would mix two histories.
        """
        newest = self.latest()
        if resume == "auto":
            return None if newest is None else self.folder / str(newest)
        path = None if resume == "never" else Path(resume).absolute()
        if path is not None and not _is_whole(path):
            raise MissingCheckpointError(f"There is no checkpoint {path}; {_there(path)}.")
        start = -1 if path is None or not path.name.isdigit() else int(path.name)
        if newest is not None and newest > start:
            raise FileExistsError(
                f"checkpoint.resume={resume!r}, but {self.folder} holds step {newest} of an earlier run. "
                "Give the run another --name, remove that folder, or resume with 'auto'."
            )
        return path

    def restore(self, which: int | str | Path, *, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint, whatever mesh wrote it.

        Args:
          which: a step in this folder, or the path of a checkpoint.
          like: tree of `jax.ShapeDtypeStruct` with the shardings that the arrays shall have.

        Returns:
          The state, shaped like `like`, and the host state.

        Raises:
          MissingCheckpointError: there is no such checkpoint.
          LayoutError: it holds other arrays than `like`; found before any tensor is read.
        """
        return restore(self.folder / str(which) if isinstance(which, int) else Path(which), like=like, optimizer=self.optimizer)

    def wait(self) -> None:
        """Blocks until what was saved is on disk; raises what went wrong in the background."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and frees the background threads."""
        self._manager.wait_until_finished()
        self._manager.close()


def restore(path: Path, *, like: Any, optimizer: str) -> tuple[Any, dict[str, Any]]:
    """Reads the checkpoint at `path`; see `Checkpointer.restore`."""
    path = path.absolute()
    if not _is_whole(path):
        raise MissingCheckpointError(f"There is no checkpoint {path}; {_there(path)}.")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**{name: handler() for name, handler in ITEMS.items()})) as reader:
        host = reader.restore(path, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
        layouts.check(host["layout"], layouts.layout(like, optimizer), where=str(path))
        state = reader.restore(path, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
    return state, host["host_state"]


def _is_whole(path: Path) -> bool:
    return path.name.isdigit() and (path / "host").is_dir() and (path / "state").is_dir()


def _steps_in(folder: Path) -> list[int]:
    return sorted(int(child.name) for child in folder.iterdir() if _is_whole(child))


def _there(path: Path) -> str:
    """What the nearest folder that exists holds."""
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    if (folder / "checkpoints").is_dir():  # a run's folder
        folder /= "checkpoints"
    steps = _steps_in(folder)
    return f"in {folder} are {', '.join(map(str, steps))}" if steps else f"{folder} holds no checkpoint"


def abstract(state: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays: what `restore` wants as `like`."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), state)
