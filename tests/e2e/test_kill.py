"""A run that is killed again and again: it always goes on, and loses at most what came after its last save."""

import re
import signal
import time

import commands
import numpy as np
import pytest

from moejax.observe import metrics

EVERY, STEPS = 5, 60
FLAGS = ("--train.steps", str(STEPS), "--checkpoint.every", str(EVERY), "--train.eval_batches", "1", "--observe.tensorboard", "False")
PATIENCE_S = 900


class Life:
    """One start of the run."""

    def __init__(self, folder, number):
        self.run, self.log = folder / "runs" / "smallest", folder / f"life{number}.log"
        self.saved_before = self.newest()
        self.process = commands.start("train", folder / "smallest.py", *FLAGS, output=self.log)

    def newest(self) -> int:
        """Step of the newest whole checkpoint, 0 if there is none."""
        folder = self.run / "checkpoints"
        return max((int(child.name) for child in folder.iterdir() if child.name.isdigit()), default=0) if folder.exists() else 0

    def last_step(self) -> int:
        """Last step that the metrics tell of."""
        return max((line["step"] for line in metrics.read(self.run)), default=0) if (self.run / metrics.FILE_NAME).exists() else 0

    def wait(self, condition, pause_s=0.0):
        """Until `condition()` holds or the run ends, and then a little longer."""
        until_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and not condition():
            assert time.monotonic() < until_s, self.log.read_text()[-3000:]
            time.sleep(0.005)
        time.sleep(pause_s)

    def text(self) -> str:
        return self.log.read_text()

    def check_start(self):
        """The log says where the run began: at the newest checkpoint that there was."""
        told = re.search(r"resumed from \S+ after step (\d+)", self.text())
        assert (int(told[1]) if told else 0) == self.saved_before, self.text()
        if not told:
            assert "fresh weights" in self.text()


def kill_and_restart(folder, num_kills, seed):
    """Kills at random moments: while starting, between any two steps, while saving. Then a run to the end."""
    rng = np.random.default_rng(seed)
    commands.write_config(folder)
    for number in range(num_kills):
        life = Life(folder, number)
        if number and rng.random() < 0.2:
            life.wait(lambda: True, rng.uniform(0, 5))  # imports, loading, compiling
        else:
            target = life.saved_before + rng.integers(1, 2 * EVERY + 3)
            life.wait(lambda target=target, life=life: life.last_step() >= target, rng.uniform(0, 0.05))
        life.process.send_signal(signal.SIGKILL)
        life.process.wait()
        if life.process.returncode == 0:
            break  # it was faster than the signal
        # a save is over before the next begins, so what is lost is less than the steps of two saves
        assert life.last_step() - life.newest() < 2 * EVERY
        if "start  " in life.text():
            life.check_start()
    life = Life(folder, num_kills)
    assert life.process.wait(timeout=PATIENCE_S) == 0, life.text()
    life.check_start()
    lines = [line for line in metrics.read(life.run) if "loss_nats" in line]  # the last line is the evaluation's
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return lines


def test_sigterm_and_two_kills_at_random_moments_do_not_end_a_run(tmp_path):
    commands.write_config(tmp_path)
    life = Life(tmp_path, "asked")
    life.wait(lambda: life.last_step() >= 3)
    life.process.send_signal(signal.SIGTERM)
    assert life.process.wait(timeout=PATIENCE_S) == 0
    saved = life.newest()
    assert f"SIGTERM: saved after step {saved} " in life.text() and saved == life.last_step() < STEPS, life.text()
    kill_and_restart(tmp_path, 2, seed=0)


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_no_loss(tmp_path):
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    killed, whole = kill_and_restart(tmp_path / "killed", 10, seed=1), kill_and_restart(tmp_path / "whole", 0, seed=1)
    assert [line["loss_nats"] for line in killed] == [line["loss_nats"] for line in whole]
