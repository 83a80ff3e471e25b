"""What a run writes down: metrics, its folder, times, the bar, the trace."""

import io
import json
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from moejax.observe import metrics, run_folder
from moejax.observe.metrics import MetricsWriter
from moejax.observe.profile import Profiler
from moejax.observe.progress import ProgressBar
from moejax.observe.timing import StepTimer


def test_each_step_is_one_line_with_its_numbers(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(1, {"loss": jnp.float32(2.5), "load_E": np.array([1, 3]), "step_s": 0.25})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())  # flushed before it is closed
    writer.close()
    assert line["step"] == 1 and line["loss"] == 2.5 and line["load_E"] == [1, 3] and line["step_s"] == 0.25
    assert abs(line["wall_s"] - time.time()) < 60
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_numbers_that_are_not_finite_are_null_in_the_file_and_nan_when_read(tmp_path):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    for resumed_step in (0, 1):  # rewritten once more by the second life
        writer = MetricsWriter(tmp_path, tensorboard=False, resumed_step=resumed_step)
        writer.write(resumed_step + 1, {"loss": jnp.float32(jnp.nan), "norm": float("inf"), "margins": np.array([1.0, np.nan])})
        writer.close()
    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["norm"], line["margins"]) for line in lines] == [(n, None, None, [1.0, None]) for n in (1, 2)]
    for line in metrics.read(tmp_path):
        assert np.isnan([line["loss"], line["norm"], line["margins"][1]]).all() and line["margins"][0] == 1.0


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(1, 8):
        writer.write(step, {"loss": 1.0})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # killed while it wrote
    assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    writer = MetricsWriter(tmp_path, tensorboard=False, resumed_step=5)
    writer.write(6, {"loss": 2.0})
    writer.close()
    assert [(line["step"], line["loss"]) for line in metrics.read(tmp_path)][4:] == [(5, 1.0), (6, 2.0)]
    assert not (tmp_path / "tensorboard").exists()


def test_a_fresh_run_drops_the_lines_of_an_earlier_one(tmp_path):
    for loss in (1.0, 2.0):
        writer = MetricsWriter(tmp_path, tensorboard=False)
        writer.write(1, {"loss": loss})
        writer.close()
    assert [line["loss"] for line in metrics.read(tmp_path)] == [2.0]


def test_the_run_folder_holds_config_versions_and_git_state(tmp_path):
    folder = run_folder.make(tmp_path, "mine", config_json='{"name": "mine"}', source=tmp_path)
    assert folder == tmp_path / "mine"
    assert json.loads((folder / "config.json").read_text()) == {"name": "mine"}
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["packages"]["jax"] == jax.__version__ and versions["devices"] == {"kind": "cpu", "count": 8, "processes": 1}
    git = json.loads((folder / "git.json").read_text())
    assert git["commit"] is None and "not a git repository" in git["why"]


def test_the_git_state_names_commit_and_changes(tmp_path):
    def git(*args):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *args], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one\n")
    git("add", "file")
    git("commit", "-m", "first")
    clean = run_folder.git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False and clean["diff_stat"] == ""
    (tmp_path / "file").write_text("two\n")
    changed = run_folder.git_state(tmp_path)
    assert changed["commit"] == clean["commit"] and changed["dirty"] is True and "file | 2 +-" in changed["diff_stat"]


def test_what_is_recorded_is_moejax_wherever_the_run_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = run_folder.make(tmp_path, "mine", config_json="{}")
    here = subprocess.run(["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True, text=True)
    git = json.loads((folder / "git.json").read_text())
    assert git["commit"] == (here.stdout.strip() or None) and ("why" in git) == bool(here.returncode)


def test_a_package_installed_inside_another_project_has_no_commit(tmp_path):
    subprocess.run(["git", "init", tmp_path], check=True, capture_output=True)
    package = tmp_path / "packages" / "moejax"
    package.mkdir(parents=True)
    state = run_folder.git_state(package)
    assert state["commit"] is None and "which tracks no file of it" in state["why"]


def test_a_machine_without_git_is_stated(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_folder.git_state(tmp_path) == {"commit": None, "why": "git is not installed"}


def test_the_parts_of_a_step_add_up():
    timer = StepTimer()
    with timer.part("data"):
        time.sleep(0.02)
    for _ in range(2):
        with timer.part("compute"):
            time.sleep(0.02)
    lap = timer.lap()
    assert lap["data_s"] >= 0.02 and lap["compute_s"] >= 0.04 and lap["checkpoint_s"] == 0 and lap["other_s"] >= 0
    assert lap["step_s"] == pytest.approx(lap["data_s"] + lap["compute_s"] + lap["checkpoint_s"] + lap["other_s"])
    assert timer.lap()["compute_s"] == 0
    with pytest.raises(KeyError, match="parts are data, compute, checkpoint"), timer.part("sleep"):
        pass


def progress(*, terminal, shown=True):
    out = io.StringIO()
    bar = ProgressBar(Console(file=out, force_terminal=terminal, width=160), steps=30, first=10, every=10, shown=shown)
    for step in range(11, 31):
        bar.update(step, {"loss_nats": 1.23456, "tokens_per_s": 3512.4, "expert_load_max_over_mean": 1.3, "dropped_rows": 0})
    bar.close()
    return out.getvalue()


def test_where_there_is_no_terminal_some_steps_are_plain_lines():
    lines = progress(terminal=False).splitlines()
    assert [line.split()[1] for line in lines] == ["11/30", "20/30", "30/30"]
    assert "loss 1.2346  tok/s 3,512  load max/mean 1.30  dropped 0" in lines[0] and lines[-1].endswith("0:00 left")


def test_on_a_terminal_there_is_a_bar():
    text = progress(terminal=True)
    assert "30/30" in text and "loss 1.2346" in text and "dropped 0" in text


def test_only_one_process_shows_anything():
    assert progress(terminal=False, shown=False) == progress(terminal=True, shown=False) == ""


def test_the_steps_that_were_asked_for_are_traced(tmp_path):
    profiler = Profiler(tmp_path, (2, 3))
    running, written = [], []
    for step in range(1, 6):
        profiler.before(step)
        running.append(profiler._running)
        jnp.ones(4).sum().block_until_ready()
        written.append(profiler.after(step))
    assert running == [False, True, True, False, False] and written == [None, None, tmp_path / "trace", None, None]
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    assert profiler.summary() == f"steps 2 to 3 in {tmp_path / 'trace'}"
    assert Profiler(tmp_path, None).close() is None and Profiler(tmp_path, None).summary() is None


@pytest.mark.parametrize(
    "asked, said",
    [((5, 6), "none: steps 5 to 6 were asked for, and the last step was 3"), ((3, 6), "steps 3 to 3 in {}; steps 3 to 6 were asked for")],
)
def test_a_run_that_ends_before_the_steps_to_be_traced_says_so(tmp_path, monkeypatch, asked, said):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    profiler = Profiler(tmp_path, asked)
    for step in range(1, 4):
        profiler.before(step)
        profiler.after(step)
    profiler.close()
    assert profiler.summary() == said.format(tmp_path / "trace")
    assert calls == ([] if asked == (5, 6) else ["start", "stop"])


def test_what_changed_since_the_last_start_is_told(tmp_path):
    old, new = {"a": {"b": 1, "c": [1, 2]}, "d": None}, {"a": {"b": 2, "c": [1, 2]}, "d": None}
    assert run_folder.changes(tmp_path, json.dumps(new)) == []
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert run_folder.changes(tmp_path, json.dumps(new)) == ["a.b: 1 -> 2"]
