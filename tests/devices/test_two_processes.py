"""Two processes of four devices are one process of eight: data, loss, checkpoints, resume; and the end when one is lost."""

import signal
import socket
import time

import commands
import numpy as np
import pytest

from moejax.observe import metrics
from moejax.parallel.watch import EXIT_LOST

FLAGS = ("--train.eval_batches", "2", "--observe.tensorboard", "False")
SGD = ("--optim.kind", "sgd", "--optim.learning_rate", "0.5")
TIMEOUT_S = 900


def start_pair(config, *flags, optim=SGD):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        commands.start(
            "train",
            config,
            *FLAGS,
            *optim,
            *flags,
            "--mesh.simulate_devices",
            "4",
            "--processes.coordinator",
            f"127.0.0.1:{port}",
            "--processes.num_processes",
            "2",
            "--processes.process_id",
            i,
        )
        for i in range(2)
    ]


def run_pair(config, *flags, optim=SGD):
    pair = start_pair(config, *flags, optim=optim)
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in pair]
    finally:
        for process in pair:
            process.kill()
            process.communicate()
    assert pair[0].returncode == pair[1].returncode and pair[0].returncode in (0, 1), "\n".join(out + err for out, err in outputs)
    return outputs


def run_one(config, *flags):
    code, out, err = commands.moejax("train", config, *FLAGS, *SGD, *flags, timeout_s=TIMEOUT_S)
    assert code in (0, 1), out + err
    return out


def curve(folder, name="loss_nats"):
    return [line[name] for line in metrics.read(folder / "runs" / "smallest") if name in line]


def heldout(out):
    return float(out.split("held out")[1].split()[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps of one process with eight devices."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_one(commands.write_config(folder), "--train.steps", "6")


def test_two_processes_train_as_one_and_one_goes_on_where_they_stopped(whole, tmp_path):
    folder, _ = whole
    config = commands.write_config(tmp_path)
    outputs = run_pair(config, "--train.steps", "3")
    assert ["held out" in out for out, _ in outputs] == [True, False]  # the first process alone speaks
    assert "resumed" in run_one(config, "--train.steps", "6")
    for name in ("tokens", "targets"):
        assert curve(tmp_path, name) == curve(folder, name)
    np.testing.assert_allclose(curve(tmp_path), curve(folder), rtol=1e-6)


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped(whole, tmp_path):
    folder, out = whole
    config = commands.write_config(tmp_path)
    run_one(config, "--train.steps", "3")
    outputs = run_pair(config, "--train.steps", "6")
    assert "resumed" in outputs[0][0]
    np.testing.assert_allclose(curve(tmp_path), curve(folder), rtol=1e-6)
    assert heldout(outputs[0][0]) == pytest.approx(heldout(out), rel=1e-4)


@pytest.mark.slow
def test_microbatches_of_two_processes_train_as_one(tmp_path):
    config = commands.write_config(tmp_path)
    flags = ("--train.steps", "4", "--train.accumulation", "2", "--data.batch_size", "16")
    run_pair(config, *flags)
    (tmp_path / "one").mkdir()
    one = commands.write_config(tmp_path / "one")
    run_one(one, *flags)
    np.testing.assert_allclose(curve(tmp_path), curve(tmp_path / "one"), rtol=1e-6)


@pytest.mark.slow
def test_two_processes_keep_their_moments_in_files_of_their_own(tmp_path):
    """And go on from their checkpoint, with the losses of two processes that keep them on the devices."""
    curves = {}
    for where in ("device", "files"):
        folder = tmp_path / where
        folder.mkdir()
        config = commands.write_config(folder)
        for steps in (2, 4):
            outputs = run_pair(config, "--train.steps", steps, "--tiers.optimizer", where, optim=("--optim.kind", "muon"))
        assert "resumed" in outputs[0][0]
        curves[where] = curve(folder)
    assert curves["files"] == curves["device"] and len(curves["files"]) == 4
    assert {path.name for path in (tmp_path / "files" / "runs" / "smallest" / "tiers").iterdir()} == {"process0", "process1"}


@pytest.mark.slow
def test_when_one_of_two_dies_the_other_names_it_and_ends(tmp_path):
    pair = start_pair(commands.write_config(tmp_path), "--train.steps", "100000", "--processes.timeout_s", "10")
    lines = tmp_path / "runs" / "smallest" / metrics.FILE_NAME
    until_s = time.monotonic() + TIMEOUT_S
    while not (lines.exists() and len(metrics.read(lines.parent)) > 2):
        assert time.monotonic() < until_s and pair[0].poll() is None, pair[0].communicate()
        time.sleep(0.1)
    pair[1].send_signal(signal.SIGKILL)
    _, err = pair[0].communicate(timeout=60)
    pair[1].communicate()
    assert pair[0].returncode == EXIT_LOST and "moejax: process 1 of 2" in err
