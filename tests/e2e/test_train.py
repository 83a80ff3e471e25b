"""The command line on a very small run: what it prints, writes and returns."""

import json
from pathlib import Path

import commands
import pytest

from moejax import cli
from moejax.observe import metrics

FAST = ("--train.steps", "3", "--train.eval_batches", "1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run: its folder, exit code and output."""
    folder = tmp_path_factory.mktemp("train")
    config = commands.write_config(folder)
    code, out, err = commands.moejax("train", config, "--profile", "3:4", "--dump", "--observe.sample_tokens", "8")
    return folder / "runs" / "smallest", code, out, err


def test_a_run_that_learns_more_than_counting_succeeds_and_says_so(trained):
    _, code, out, err = trained
    assert code == 0, out + err
    for text in (
        "fsdp 2 x expert 4",
        "parameters,",
        "active a token",
        "kernels ",
        "grouped_mlp xla",
        "bytes ",
        "optimizer adamw",
        "start     fresh weights, seed 0",
        "held out  ",
        "order-2 byte Markov model on the same targets",
        "sample    after ",
        "profile   steps 3 to 4 in ",
    ):
        assert text in out, (text, out, err)


def test_the_run_folder_holds_config_versions_git_state_and_metrics(trained):
    folder, *_ = trained
    config, versions, git = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "versions", "git"))
    assert config["model"]["moe"]["num_experts"] == 4 and config["mesh"]["fsdp"] == 2  # resolved: -1 is gone
    assert versions["devices"] == {"kind": "cpu", "count": 8, "processes": 1} and versions["packages"]["jax"]
    assert "commit" in git
    *lines, last = metrics.read(folder)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert last["step"] == 40 and last["heldout_nats"] < last["markov_nats"]
    assert lines[-1]["loss_nats"] < lines[0]["loss_nats"]
    for name in (
        "tokens_per_s",
        "step_s",
        "data_s",
        "compute_s",
        "checkpoint_s",
        "expert_load_max_over_mean",
        "dropped_rows",
        "gradient_norm",
    ):
        assert name in lines[-1], sorted(lines[-1])
    assert all(line["dropped_rows"] == 0 for line in lines)
    assert list((folder / "tensorboard").glob("events*"))
    assert [child.name for child in (folder / "checkpoints").iterdir()] == ["40"]


def test_profile_and_dump_leave_a_trace_and_the_program(trained):
    folder, *_ = trained
    assert list((folder / "trace").rglob("*.xplane.pb"))
    assert "ENTRY" in (folder / "step.hlo.txt").read_text() and "temp_size" in (folder / "step.memory.txt").read_text()


def test_a_model_that_learns_less_than_counting_fails(tmp_path, capsys):
    config = commands.write_config(tmp_path, text=str(Path(cli.__file__).parent / "*" / "*.py"))
    assert cli.main(["train", str(config), *FAST]) == 1
    assert "the model did not learn more than counting does" in capsys.readouterr().out


def test_a_named_checkpoint_that_is_missing_ends_the_run_before_it_starts(tmp_path, capsys):
    config = commands.write_config(tmp_path)
    assert cli.main(["train", str(config), *FAST, "--resume", str(tmp_path / "nowhere" / "3")]) == 2
    said = capsys.readouterr()
    assert "There is no checkpoint" in said.err and "held out" not in said.out


def test_show_prints_the_plan_without_touching_a_device(tmp_path):
    config = commands.write_config(tmp_path)
    code, out, err = commands.moejax("show", config, JAX_PLATFORMS="nonexistent")
    assert code == 0, err
    assert "fsdp 2 x expert 4" in out and "2 x (gqa+moe)" in out and '"num_experts": 4' in out
    assert not (tmp_path / "runs").exists()


def test_show_memory_lists_what_each_layer_keeps_and_what_it_costs(tmp_path, capsys):
    config = str(commands.write_config(tmp_path))
    assert (
        cli.main(
            ["show", config, "--memory", "--memory.preset", "lean", "--memory.offload", "layer_input", "--memory.copy_gb_per_s", "0.001"]
        )
        == 0
    )
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" " * 10)}
    assert rows["layer_input"][1] == "layer" and rows["layer_input"][-2] == "offload" and float(rows["layer_input"][-1]) > 0
    assert rows["attention"][1] == "gqa" and rows["attention"][-2] == "recompute"
    assert rows["dispatch_plan"][1] == "moe" and rows["dispatch_plan"][-2:] == ["keep", "0.000"]


@pytest.mark.parametrize(
    "args, text",
    [
        (("--memory.offload", "chunk_states"), "memory.offload names 'chunk_states', which no layer of this model makes"),
        (("--mesh.expert", "3"), "expert=3 needs a multiple of 3 devices"),
        (("--model.moe.num_experts", "6"), "mesh.expert=4 must divide model.moe.num_experts=6"),
        (("--model.moe.nmu_experts", "8"), "nmu_experts"),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["show", "train"])
def test_a_wrong_flag_is_named_before_anything_runs(command, args, text, tmp_path, capsys):
    assert cli.main([command, str(commands.write_config(tmp_path)), *args]) == 2
    assert text in capsys.readouterr().err


def test_doctor_finds_what_it_needs_on_this_machine(capsys):
    assert cli.main(["doctor"]) == 0
    assert "jax" in capsys.readouterr().out
