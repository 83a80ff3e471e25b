"""Runs whose moments lie in host memory or in files: the same checkpoints, bit for bit, also after a kill in the middle of a write."""

import os
import subprocess
import sys

import commands
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny

from moejax.observe import metrics

FLAGS = (
    *("--mesh.simulate_devices", "2", "--mesh.expert", "1", "--optim.kind", "muon", "--train.eval_batches", "1"),
    *("--checkpoint.every", "2", "--observe.tensorboard", "False"),
)
KILLED = """
import os, signal, sys
from moejax.memory import shelf
from moejax import cli

written, of_all = 0, 0
pour, drain = shelf._pour, shelf.Shelf.drain

def drain_and_count(self):
    global of_all
    drain(self)
    of_all = of_all or written

def pour_and_die(file, part):
    global written
    written += 1
    if of_all and written >= 5.5 * of_all:  # half of what the 5th step writes is written
        file.write(memoryview(part.reshape(-1).view("uint8"))[: part.nbytes // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    pour(file, part)

shelf.Shelf.drain, shelf._pour = drain_and_count, pour_and_die
cli.main(sys.argv[1:])
"""


def final(folder):
    """Path -> array of the newest checkpoint, read without knowing its layout, and its step."""
    whole = [child for child in (folder / "runs" / "smallest" / "checkpoints").iterdir() if child.name.isdigit()]
    newest = max(whole, key=lambda child: int(child.name))
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        like = jax.tree.map(lambda meta: np.zeros(meta.shape, meta.dtype), reader.metadata(newest / "state").item_metadata.tree)
        return tiny.leaves(reader.restore(newest / "state", args=ocp.args.StandardRestore(like))), int(newest.name)


def losses(folder):
    return [line["loss_nats"] for line in metrics.read(folder / "runs" / "smallest") if "loss_nats" in line]


def train(folder, *flags, steps=6):
    code, out, err = commands.moejax("train", folder / "smallest.py", *FLAGS, "--train.steps", steps, *flags)
    assert code in (0, 1), out + err
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run with all on the devices: its final checkpoint and losses."""
    folder = tmp_path_factory.mktemp("device")
    commands.write_config(folder)
    train(folder)
    return *final(folder), losses(folder)


def check(folder, whole):
    got, steps = final(folder)
    want, want_steps, want_losses = whole
    assert (steps, losses(folder)) == (want_steps, want_losses)
    assert got.keys() == want.keys() and len(want) > 30
    for path in want:
        np.testing.assert_array_equal(got[path], want[path], err_msg=path)


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_a_write_goes_on_from_its_checkpoint(whole, tmp_path):
    commands.write_config(tmp_path)
    flags = (*FLAGS, "--train.steps", "6", "--tiers.optimizer", "files", "--tiers.folder", str(tmp_path / "nvme"))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(commands.CACHE),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, "train", str(tmp_path / "smallest.py"), *flags], env=environment, capture_output=True, text=True
    )
    assert killed.returncode == -9, killed.stdout + killed.stderr
    saved = final(tmp_path)[1]  # that of step 4 may not have been whole yet
    assert saved in (2, 4) and list((tmp_path / "nvme").rglob("*.record"))
    out = train(tmp_path, "--tiers.optimizer", "files", "--tiers.folder", str(tmp_path / "nvme"))
    assert f"after step {saved}" in out and "tiers     state: device " in out
    check(tmp_path, whole)
    assert not list((tmp_path / "nvme").rglob("*.record"))
    line = [line for line in metrics.read(tmp_path / "runs" / "smallest") if "state_files_bytes" in line][-1]
    assert line["state_files_bytes"] > 10_000 and line["tiers_read_s"] > 0 and line["tiers_write_s"] > 0


@pytest.mark.slow
def test_moments_in_host_memory_go_on_where_those_on_devices_stopped_and_files_after_them(whole, tmp_path):
    commands.write_config(tmp_path)
    train(tmp_path, steps=2)
    assert ", host " in train(tmp_path, "--tiers.optimizer", "host", steps=4)
    train(tmp_path, "--tiers.optimizer", "files")
    check(tmp_path, whole)
