"""Checkpoints on one device: whole or not at all, equal bit for bit, and never the wrong one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax.checkpoint import store
from moejax.checkpoint.layout import LayoutError
from moejax.checkpoint.store import Checkpointer, MissingCheckpointError, abstract

OPTIMIZER = optax.adamw(1e-2)


def start():
    params = {"up_DF": jax.random.normal(jax.random.key(0), (16, 32)), "scale_D": jnp.ones(16, jnp.bfloat16)}
    return {"params": params, "moments": OPTIMIZER.init(params), "step": jnp.int32(0)}


@jax.jit
def train(state, key):
    def loss(params):
        return jnp.sum(jnp.square(params["scale_D"].astype(jnp.float32) @ params["up_DF"] - jax.random.normal(key, (32,))))

    updates, moments = OPTIMIZER.update(jax.grad(loss)(state["params"]), state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments, "step": state["step"] + 1}


def run(state, steps, first=0):
    for step in range(first, first + steps):
        state = train(state, jax.random.fold_in(jax.random.key(1), step))
    return state


def test_n_and_n_steps_equal_two_n_steps_bit_for_bit(tmp_path):
    half = run(start(), 3)
    writer = Checkpointer(tmp_path, optimizer="adamw")
    writer.save(3, half, {"data": {"row": 7}})
    writer.close()
    reader = Checkpointer(tmp_path, optimizer="adamw")
    restored, host_state = reader.restore(reader.latest(), like=abstract(start()))
    reader.close()
    assert host_state == {"data": {"row": 7}}
    chex.assert_trees_all_equal(run(restored, 3, first=3), run(start(), 6))


def test_the_caller_may_give_the_arrays_away_as_soon_as_save_returns(tmp_path):
    increase = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {"large": jnp.zeros((1024, 1024)), "small": jnp.zeros(3)}
    checkpoints = Checkpointer(tmp_path, optimizer="sgd", keep=3)
    for step in range(3):
        checkpoints.save(step, state, {})
        state = increase(state)
        jax.block_until_ready(state)
    checkpoints.wait()
    for step in range(3):
        restored, _ = checkpoints.restore(step, like=abstract(state))
        assert all(np.all(np.asarray(array) == step) for array in jax.tree.leaves(restored))
    checkpoints.close()


def test_only_the_newest_are_kept_and_a_step_is_due_every_n(tmp_path):
    checkpoints = Checkpointer(tmp_path, optimizer="sgd", keep=2, every=10)
    for step in (10, 20, 30):
        checkpoints.save(step, {"x": jnp.full(2, float(step))}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [20, 30] and checkpoints.latest() == 30
    assert [step for step in range(1, 31) if checkpoints.due(step)] == [10, 20, 30]
    checkpoints.close()


@pytest.fixture
def two_saved(tmp_path):
    checkpoints = Checkpointer(tmp_path / "checkpoints", optimizer="sgd")
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.ones(2)}, {})
    checkpoints.wait()
    yield checkpoints
    checkpoints.close()


def test_a_missing_checkpoint_is_fatal_and_lists_what_exists(two_saved):
    with pytest.raises(MissingCheckpointError, match=r"There is no checkpoint .*checkpoints/7; in .*checkpoints are 1, 2\."):
        two_saved.restore(7, like={"x": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(MissingCheckpointError, match="holds no checkpoint"):
        two_saved.find(str(two_saved.folder / "1" / "host"))


def test_another_layout_is_fatal_before_a_tensor_is_read(two_saved, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(store.ocp.StandardCheckpointHandler, "restore", refuse)
    with pytest.raises(LayoutError, match=r"x: stored float32\[2\], the run has float32\[3\]"):
        two_saved.restore(2, like={"x": jax.ShapeDtypeStruct((3,), jnp.float32)})


def test_a_run_starts_where_it_was_told_to(two_saved, tmp_path):
    assert two_saved.find("auto") == two_saved.folder / "2"
    assert two_saved.find(str(two_saved.folder / "2")) == two_saved.folder / "2"
    other = Checkpointer(tmp_path / "other", optimizer="sgd")
    assert other.find("auto") is None and other.find("never") is None
    assert other.find(str(two_saved.folder / "1")) == two_saved.folder / "1"
    other.close()


@pytest.mark.parametrize("resume", ["never", "1"])
def test_two_histories_are_never_mixed_in_one_folder(two_saved, resume):
    with pytest.raises(FileExistsError, match=r"checkpoint\.resume=.* holds step 2 of an earlier run\. Give the run another --name"):
        two_saved.find(resume if resume == "never" else str(two_saved.folder / resume))


def save_for_ever(folder):
    """The victim: saves a state that is all `step`, as fast as it can."""
    checkpoints = Checkpointer(folder, optimizer="sgd", keep=2)
    for step in range((checkpoints.latest() or 0) + 1, 100_000):
        checkpoints.save(step, {"x": jnp.full((256, 1024), float(step)), "y": jnp.full(5, float(step))}, {"step": step})
        if step % 3 == 0:
            checkpoints.wait()
            sys.stdout.write(f"{step}\n")
            sys.stdout.flush()


def test_a_process_killed_while_it_saves_leaves_the_older_checkpoint_whole(tmp_path):
    like = {"x": jax.ShapeDtypeStruct((256, 1024), jnp.float32), "y": jax.ShapeDtypeStruct((5,), jnp.float32)}
    wait_s = random.Random(0)
    newest = 0
    for _ in range(2):
        victim = subprocess.Popen(
            [sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
        sure = int(victim.stdout.readline())
        time.sleep(wait_s.uniform(0, 0.3))
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        checkpoints = Checkpointer(tmp_path, optimizer="sgd")
        step = checkpoints.latest()
        assert step >= sure > newest
        state, host_state = checkpoints.restore(step, like=like)
        checkpoints.close()
        assert host_state == {"step": step} and all(np.all(np.asarray(array) == step) for array in state.values())
        newest = step
    assert [path.name for path in tmp_path.iterdir() if not path.name.isdigit()] == []  # what was half written is swept up


if __name__ == "__main__":
    save_for_ever(Path(sys.argv[1]))
