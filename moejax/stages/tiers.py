"""Where the state of a run's optimizer lies, and its way to the devices, to files and into checkpoints."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from moejax.config.run import RunConfig
from moejax.memory.shelf import Shelf
from moejax.observe.memory import tree_bytes
from moejax.train.file_moments import FileMoments
from moejax.train.masters import joined, rounded, split_arrays, split_shapes
from moejax.train.program import Program
from moejax.train.state import TrainState, Where, init_state, past_shapes, placed_shapes, state_shardings


class Tiers:
    """The three places that `tiers.optimizer` names, as the loop sees them; checkpoints of all are the same."""

    def __init__(self, config: RunConfig, program: Program, mesh: Mesh, folder: Path, *, compiler_options: dict[str, Any]):
        """
        Args:
          folder: the run's.

        Raises:
          ShelfBusyError: another run keeps its moments in the same files.
        """
        self.where: Where = config.tiers.optimizer
        self.model, self.mesh, self.optimizer = config.model, mesh, program.optimizer
        self.rounded = rounded(self.model, program.updates) if config.tiers.master_weights else frozenset()
        self.compute = config.model.precision.compute
        self.past_shapes = functools.cache(lambda: past_shapes(config.model, config.data, config.train))  # for when the mesh is set
        self.files: FileMoments | None = None
        if self.where == "files":
            own = Path(config.tiers.folder or folder / "tiers") / f"process{jax.process_index()}"
            places = state_shardings(self.model, self.optimizer, mesh)
            shelf = Shelf(own, ahead=config.tiers.ahead)
            self.files = FileMoments(program.updates, places, shelf, rounded=self.rounded, compiler_options=compiler_options)

    def fresh(self, seed: int) -> TrainState:
        """The state to begin a run with."""
        state = init_state(self.model, self.optimizer, self.mesh, seed, self.past_shapes(), moments=self.where)
        if self.files is not None:
            state = dataclasses.replace(state, opt_state=self.files.begin(state.params))
        return self._split(state)

    def like(self) -> TrainState:
        """Shapes and places of a whole state, as checkpoints have it; what does not lie on the devices is in host memory there."""
        whole = placed_shapes(self.model, self.optimizer, self.mesh, self.past_shapes(), moments_on_host=self.where != "device")
        return joined(split_shapes(whole, self.rounded, self.compute))

    def resumed(self, state: TrainState) -> TrainState:
        """The state to go on with, from a whole one."""
        if self.files is not None:
            state = dataclasses.replace(state, opt_state=self.files.take(state.params, state.opt_state))
        return self._split(state)

    def whole(self, state: TrainState) -> TrainState:
        """The state with all master weights and moments as arrays."""
        if self.files is not None:
            opt_state, masters = self.files.whole(state.opt_state, self.like())
            state = dataclasses.replace(state, opt_state=opt_state, master=masters)
        return joined(state)

    def _split(self, state: TrainState) -> TrainState:
        return split_arrays(state, self.rounded, self.compute, masters=self.files is None)

    def step(self, compiled: jax.stages.Compiled):
        """(state, batches) -> (next state, what the step tells), from the compiled program."""
        return compiled if self.files is None else self.files.around(compiled)

    def values(self, state: TrainState) -> dict[str, float]:
        """Metrics of the run that keeps moments elsewhere: bytes of its state on the fullest device, beside that in host memory, and in this
        process's files; of files the seconds that reading and writing took since the last call, and those of them that the step waited for."""
        if self.where == "device":
            return {}
        on_device = {"state_device_bytes": float(tree_bytes(state))}
        if self.files is None:
            return on_device | {"state_host_bytes": float(tree_bytes(state, on_host=True))}
        shelf = self.files.shelf
        return on_device | {"state_files_bytes": float(shelf.bytes())} | {f"tiers_{name}": value for name, value in shelf.seconds().items()}

    def lines(self, state: TrainState) -> list[str]:
        """For a person; none if all is on the devices."""
        sizes = [(name.split("_")[1], value) for name, value in self.values(state).items() if name.endswith("_bytes")]
        return [f"{'tiers':9} state: " + ", ".join(f"{where} {size / 2**20:.1f} MiB" for where, size in sizes)] if sizes else []

    def close(self) -> None:
        """Ends threads and removes scratch files."""
        if self.files is not None:
            self.files.shelf.close()
