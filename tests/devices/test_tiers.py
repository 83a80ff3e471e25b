"""Steps with moments in host memory and in files are those with moments on the devices, bit for bit."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from moejax.config.tiers import TiersConfig
from moejax.config.training import LossConfig, OptimConfig, TrainConfig
from moejax.memory.shelf import Shelf
from moejax.parallel.mesh import mesh_from
from moejax.train.file_moments import FileMoments
from moejax.train.program import make_program
from moejax.train.state import init_state, placed_shapes, state_shardings

MODEL = tiny.model("kda", "gqa", "kda", "gqa")
LOSSES = LossConfig(bias_update="sign", balance="sequence")
TRAIN = TrainConfig(steps=10)


def optim(kind: str) -> OptimConfig:
    """Clipping takes part in every step."""
    return OptimConfig(kind=kind, learning_rate=1e-2, warmup_steps=2, clip_norm=0.2)


class Tier:
    """A step whose moments lie somewhere, as a run sets it up."""

    def __init__(self, where, kind, folder, **mesh_sizes):
        self.mesh = mesh_from(**mesh_sizes)
        self.where, self.like = where, None
        self.program = make_program(MODEL, LOSSES, optim(kind), TRAIN, TiersConfig(optimizer=where))
        places = state_shardings(MODEL, self.program.optimizer, self.mesh)
        with jax.set_mesh(self.mesh):
            params = tiny.lay(tiny.weights(MODEL), MODEL, self.mesh)
            state = init_state(MODEL, self.program.optimizer, self.mesh, 0, moments=where)
            self.state = dataclasses.replace(state, params=params)
            if where == "files":
                self.moments = FileMoments(self.program.updates, places, Shelf(folder, ahead=2), compiler_options=tiny.QUICK_TO_COMPILE)
                self.state = dataclasses.replace(self.state, opt_state=self.moments.begin(params))
            lowered = self.program.lower(self.state, tiny.put(tiny.batch(), self.mesh))
            self.step = lowered.compile(compiler_options=tiny.QUICK_TO_COMPILE)
            if where == "files":
                self.step = self.moments.around(self.step)

    def run(self, batches):
        told = []
        with jax.set_mesh(self.mesh):
            for batch in batches:
                self.state, out = self.step(self.state, tiny.put(batch, self.mesh))
                told.append(jax.device_get(out.scalars))
        return told

    def whole(self):
        """The state with all moments."""
        if self.where != "files":
            return self.state
        like = placed_shapes(MODEL, self.program.optimizer, self.mesh, moments_on_host=True)
        return dataclasses.replace(self.state, opt_state=self.moments.whole(self.state.opt_state, like.opt_state))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"fsdp": 2, "expert": 2}], ids=["1 device", "4 devices"])
def test_five_steps_are_the_same_bits_wherever_moments_lie(kind, mesh, tmp_path):
    batches = [tiny.batch(seed=seed) for seed in range(5)]
    tiers = {where: Tier(where, kind, tmp_path / where, **mesh) for where in ("device", "host", "files")}
    told = {where: tier.run(batches) for where, tier in tiers.items()}
    want = tiny.leaves(tiers["device"].whole())
    assert any("skipped" not in path and np.any(array) for path, array in want.items())
    for where in ("host", "files"):
        got = tiny.leaves(tiers[where].whole())
        assert got.keys() == want.keys()
        different = [path for path in want if not np.array_equal(got[path], want[path])]
        assert not different, (where, len(different), len(want), different[:5])
        assert told[where] == told["device"]
