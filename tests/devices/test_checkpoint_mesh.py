"""Checkpoints across meshes and numbers of processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.checkpoint.store import Checkpointer, abstract

SPECS = {"dense_DF": P(("fsdp", "expert")), "experts_EDF": P("expert", "fsdp"), "norm_D": P(), "bias_E": P("expert")}
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def mesh_of(fsdp, expert):
    return jax.make_mesh((fsdp, expert), ("fsdp", "expert"), devices=jax.devices()[: fsdp * expert], axis_types=(AxisType.Auto,) * 2)


def start(mesh):
    """Weights, moments and counters, sharded over the mesh; every process builds its part from the same numbers."""
    rng = np.random.default_rng(0)
    shapes = {"dense_DF": (16, 8), "experts_EDF": (4, 8, 6), "norm_D": (16,), "bias_E": (4,)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def put(name, value):
        return jax.make_array_from_callback(value.shape, NamedSharding(mesh, SPECS[name]), lambda index: value[index])

    params = {name: put(name, value) for name, value in values.items()}
    step = jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda index: np.int32(3))
    moments = {name: put(name, 0.5 * value) for name, value in values.items()}
    return {"params": params, "moments": moments, "step": step}


@jax.jit
def train(state):
    """Each sum rounds once, whatever the mesh and however a process compiles: powers of two are exact, fused or not."""
    moments = jax.tree.map(lambda m, p: 0.5 * m + p, state["moments"], state["params"])
    params = jax.tree.map(lambda p, m: p - 0.125 * m, state["params"], moments)
    return {"params": params, "moments": moments, "step": state["step"] + 1}


def test_a_checkpoint_of_8_devices_is_the_same_on_4_and_on_1(tmp_path):
    state = train(start(mesh_of(2, 4)))
    want = jax.tree.map(np.asarray, train(train(state)))
    for fsdp, expert in ((2, 2), (1, 1)):
        checkpoints = Checkpointer(tmp_path / str(fsdp * expert), optimizer="sgd")
        checkpoints.save(1, state, {})
        checkpoints.wait()
        like = abstract(start(mesh_of(fsdp, expert)))
        restored, _ = checkpoints.restore(1, like=like)
        checkpoints.close()
        jax.tree.map(lambda got, shape: got.sharding == shape.sharding or pytest.fail(f"{got.sharding}"), restored, like)
        chex.assert_trees_all_equal(jax.tree.map(np.asarray, restored), jax.tree.map(np.asarray, state))
        state = restored  # 8 -> 4 -> 1
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, train(train(state))), want)


def test_two_processes_write_what_one_and_two_read(tmp_path):
    run_pair("save", tmp_path)
    check(tmp_path)
    run_pair("check", tmp_path)


def save(folder):
    checkpoints = Checkpointer(folder, optimizer="sgd")
    for step in (1, 2, 3):
        checkpoints.save(step, train(start(mesh_of(2, 4))), {"step": step})
    checkpoints.close()


def check(folder):
    checkpoints = Checkpointer(folder, optimizer="sgd")
    want = train(start(mesh_of(2, 4)))
    newest = checkpoints.find("auto")
    assert newest == folder / "3" and checkpoints.steps() == [2, 3]
    got, host_state = checkpoints.restore(newest, like=abstract(want))
    checkpoints.close()
    assert host_state == {"step": 3}
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        for mine, yours in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            assert mine.index == yours.index and np.array_equal(mine.data, yours.data)


def run_pair(task, folder):
    """Runs `task` in two processes of four CPU devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = [
        subprocess.Popen(
            [sys.executable, __file__, task, str(folder), str(port), str(i)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for i in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], "\n".join(errors)[-3000:]


if __name__ == "__main__":
    from moejax.config.mesh import ProcessConfig
    from moejax.parallel import processes

    processes.simulate_devices(4)
    processes.initialize(ProcessConfig(coordinator=f"127.0.0.1:{sys.argv[3]}", num_processes=2, process_id=int(sys.argv[4])))
    {"save": save, "check": check}[sys.argv[1]](Path(sys.argv[2]))
