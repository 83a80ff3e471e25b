"""Steps with moments and master weights in host memory or in files are those with all on the devices, bit for bit."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
import tiny

from moejax.config.mesh import MeshConfig
from moejax.config.model import PrecisionConfig
from moejax.config.run import RunConfig
from moejax.config.tiers import TiersConfig
from moejax.config.training import LossConfig, OptimConfig, TrainConfig
from moejax.parallel.mesh import make_mesh
from moejax.stages.tiers import Tiers
from moejax.train.program import make_program

BFLOAT16 = PrecisionConfig(params="float32", compute="bfloat16")
MODEL = tiny.model("kda", "gqa", "kda", "gqa", precision=BFLOAT16)
LOSSES = LossConfig(bias_update="sign", balance="sequence")
WHERE = {
    "device": TiersConfig(),
    "host": TiersConfig(optimizer="host"),
    "files": TiersConfig(optimizer="files"),
    "masters on host": TiersConfig(optimizer="host", master_weights=True),
    "masters in files": TiersConfig(optimizer="files", master_weights=True),
}


class Training:
    """Steps as a run does them."""

    def __init__(self, tiers: TiersConfig, kind: str, folder, mesh: dict, model, options: dict):
        optim = OptimConfig(kind=kind, learning_rate=1e-2, warmup_steps=2, clip_norm=0.2)  # clipping takes part in every step
        losses = dataclasses.replace(LOSSES, index="sparse" if "dsa" in model.mixers else "none")
        config = RunConfig(name="tiers", model=model, losses=losses, optim=optim, train=TrainConfig(steps=10), tiers=tiers)
        self.mesh = make_mesh(MeshConfig(**mesh), jax.devices()[: int(np.prod(list(mesh.values())))])
        program = make_program(model, losses, optim, config.train, tiers)
        with jax.set_mesh(self.mesh):
            self.tiers = Tiers(config, program, self.mesh, folder, compiler_options=options)
            self.state = self.tiers.fresh(seed=0)
            lowered = program.lower(self.state, tiny.put(tiny.batch(), self.mesh, 2))
            self.step = self.tiers.step(lowered.compile(compiler_options=options))

    def run(self, batches) -> list[dict]:
        told = []
        with jax.set_mesh(self.mesh):
            for batch in batches:
                self.state, out = self.step(self.state, tiny.put(batch, self.mesh, 2))
                told.append(jax.device_get(out.scalars))
        return told

    def leaves(self):
        return tiny.leaves(self.tiers.whole(self.state))


@contextlib.contextmanager
def compared(names, kind, folder, mesh, model=MODEL, options=tiny.QUICK_TO_COMPILE):
    """Runs that have been seen to be the same after five steps."""
    batches = [tiny.batch(seed=seed) for seed in range(5)]
    runs = {name: Training(WHERE[name], kind, folder / name, mesh, model, options) for name in ("device", *names)}
    try:
        check(runs, batches)
        yield runs
    finally:
        for run in runs.values():
            run.tiers.close()


def check(runs, batches):
    begun = runs["device"].leaves()
    told = {name: run.run(batches) for name, run in runs.items()}
    want = runs["device"].leaves()
    still = [path for path in want if np.array_equal(want[path], begun[path]) and "skipped" not in path]
    assert not still
    for name in runs:
        got = runs[name].leaves()
        assert {path: array.dtype for path, array in got.items()} == {path: array.dtype for path, array in want.items()}
        different = [path for path in want if not np.array_equal(got[path], want[path])]
        assert not different, (name, len(different), len(want), different[:5])
        assert told[name] == told["device"]


def test_five_steps_are_the_same_bits_wherever_the_state_lies(tmp_path):
    with compared(
        ["host", "masters in files"], "muon", tmp_path, {"fsdp": 2, "expert": 2}, tiny.model("gqa", "gqa", precision=BFLOAT16)
    ) as runs:
        files, host = runs["masters in files"], runs["host"]
        assert all(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(host.state.opt_state) if leaf.ndim)
        assert all(leaf.ndim == 0 for leaf in jax.tree.leaves(files.state.opt_state))
        narrow = {path for path, array in tiny.leaves(files.state.params).items() if array.dtype == "bfloat16"}
        assert narrow == files.tiers.rounded and any("experts" in path for path in narrow) and any("mixer" in path for path in narrow)
        before = files.leaves()
        params = {**files.state.params, "final_norm": {"scale_D": files.state.params["final_norm"]["scale_D"] * np.nan}}
        files.state = dataclasses.replace(files.state, params=params)
        files.run([tiny.batch(seed=9)])  # not finite: moves nothing, and is counted
        after = files.leaves()
        changed = {path for path in before if not np.array_equal(before[path], after[path])}
        assert changed == {"step", "skipped", "skipped_in_a_row", "params/final_norm/scale_D"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh"), [("adamw", {"fsdp": 2, "expert": 2}), ("muon", {"fsdp": 1})], ids=str)
def test_all_places_and_optimizers(kind, mesh, tmp_path):
    with compared([name for name in WHERE if name != "device"], kind, tmp_path, mesh):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_bits_do_not_depend_on_what_the_compiler_merges(kind, tmp_path):
    with compared(["host", "files"], kind, tmp_path, {"fsdp": 1}, options=tiny.FULLY_OPTIMISED):
        pass


@pytest.mark.slow
def test_every_mixer_reads_rounded_copies_as_it_reads_master_weights(tmp_path):
    """Were a weight of `rounded` read in float32 anywhere, the step would be another."""
    mixers = ("gqa", "mla", "dsa", "gdn", "kda")
    model = tiny.model(*mixers, *mixers, moe=tiny.moe(latent_width=8, shared_gate=True), precision=BFLOAT16)
    with compared(["masters on host"], "adamw", tmp_path, {"fsdp": 1}, model) as runs:
        assert len(runs["masters on host"].state.master) > 40
