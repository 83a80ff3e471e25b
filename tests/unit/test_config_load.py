"""Config files and the command line."""

import dataclasses
import json
import textwrap

import pytest

from moejax.config.errors import ConfigError
from moejax.config.load import SHORTHANDS, fields, help_text, load_config, override, to_json
from moejax.config.run import RunConfig

START = """from moejax.config.run import RunConfig
from moejax.config.mesh import MeshConfig
from moejax.config.training import OptimConfig
"""
BASE = RunConfig(name="base")


def file(folder, body, name="a.py"):
    path = folder / name
    path.write_text(START + textwrap.dedent(body))
    return path


def test_a_config_file_is_loaded_by_its_path_and_overridden(tmp_path):
    path = file(tmp_path, "def config():\n    return RunConfig(name='mine', mesh=MeshConfig(expert=2))\n")
    assert load_config(path).mesh.expert == 2
    assert load_config(path, ["--mesh.expert", "4"]) == RunConfig(name="mine", mesh=dataclasses.replace(BASE.mesh, expert=4))


def test_a_missing_file_is_answered_with_those_that_are_there(tmp_path):
    file(tmp_path, "", "tiny.py")
    with pytest.raises(ConfigError, match=r"no config file .*tinny\.py; in .* lies: .*tiny\.py"):
        load_config(tmp_path / "tinny.py")
    with pytest.raises(ConfigError, match=r"in .* lies: .*tiny\.py"):
        load_config(tmp_path / "folder" / "other.py")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1\n", r"a\.py has no function config\(\)"),
        ("def config():\n    return {'name': 'a'}\n", r"a\.py: config\(\) returned dict, it must return a RunConfig"),
        ("def config():\n    return 1 / 0\n", r"a\.py, line 5: ZeroDivisionError: division by zero"),
        ("def config(:\n", r"a\.py, line 4: SyntaxError"),
        ("import no_such_module\n", r"a\.py, line 4: ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "def config():\n    return RunConfig(name='a', mesh=MeshConfig(experts=2))\n",
            r"a\.py, line 5: TypeError.*'experts'\. Its fields .* expert,",
        ),
        ("def config():\n    return RunConfig(name='a', mesh=MeshConfig(expert='2'))\n", r"mesh\.expert='2' is no whole number"),
        ("def config():\n    return RunConfig(name='a', mesh=MeshConfig(simulate_devices='2'))\n", r"simulate_devices='2' is no number"),
        ("def config():\n    return RunConfig(name='a', mesh=MeshConfig(expert=-2))\n", r"^mesh\.expert=-2 must be at least 1"),
        (
            "def config():\n    return RunConfig(name='a', optim=OptimConfig(kind='adam'))\n",
            r"^optim\.kind='adam' is no value of 'adamw', 'muon', 'sgd'\.$",
        ),
        ("def config():\n    return RunConfig(name='a', mesh=3)\n", r"^mesh=3 is no MeshConfig\.$"),
        ("def config():\n    return RunConfig(name=3)\n", r"^name=3 is no text \(str\)\.$"),
    ],
)
def test_a_wrong_file_says_where_and_what(tmp_path, body, message):
    with pytest.raises(ConfigError, match=message):
        load_config(file(tmp_path, body))


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (["--mesh.expert", "4"], "mesh.expert", 4),
        (["--mesh.expert=4"], "mesh.expert", 4),
        (["--mesh.fsdp", "-1"], "mesh.fsdp", -1),
        (["--model.moe.num_experts", "32"], "model.moe.num_experts", 32),
        (["--model.moe.num-experts", "32"], "model.moe.num_experts", 32),
        (["--model.mixers", "kda", "kda", "gqa"], "model.mixers", ("kda", "kda", "gqa")),
        (["--optim.learning_rate", "1e-3"], "optim.learning_rate", 1e-3),
        (["--optim.kind", "muon"], "optim.kind", "muon"),
        (["--name", "other"], "name", "other"),
        (["--observe.profile="], "observe.profile", ""),
        (["--train.debug"], "train.debug", True),
        (["--train.debug", "True"], "train.debug", True),
        (["--train.debug=false"], "train.debug", False),
        (["--observe.no-tensorboard"], "observe.tensorboard", False),
        (["--data.sources.0.weight", "2"], "data.sources.0.weight", 2.0),
        (["--profile", "10:13"], "observe.profile", "10:13"),
        (["--dump"], "observe.dump", True),
        (["--debug"], "train.debug", True),
        (["--resume", "runs/a/checkpoints/10"], "checkpoint.resume", "runs/a/checkpoints/10"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_any_field_is_overridden_on_the_command_line(args, field, value):
    got = override(BASE, args)
    for part in field.split("."):
        got = got[int(part)] if part.isdigit() else getattr(got, part)
    assert got == value and type(got) is type(value)


def test_values_that_only_fit_together_are_checked_together():
    moe = override(BASE, ["--model.moe.num_experts", "2", "--model.moe.experts_per_token", "1"]).model.moe
    assert (moe.num_experts, moe.experts_per_token) == (2, 1)
    with pytest.raises(ConfigError, match=r"moe\.experts_per_token=4 must lie between 1 and moe\.num_experts=2"):
        override(BASE, ["--model.moe.num_experts", "2"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--mesh.expret", "4"],
            r"--mesh\.expret: there is no such field\. Did you mean --mesh\.expert.*mesh has: pipe, data, fsdp, expert",
        ),
        (["--model.num_experts", "4"], r"Did you mean --model\.moe\.num_experts"),
        (
            ["--model.moe.router.scroe", "x"],
            r"Did you mean --model\.moe\.router\.score.*model\.moe\.router has: score, logit_bias, correction_bias",
        ),
        (["--data.sources.1.path", "x"], r"data\.sources has: 0"),
        (["--zzz"], r"--zzz: there is no such field\. At the top are: name, out_dir, mesh"),
        (["--mesh", "4"], r"--mesh is a group of fields, set one of them\. mesh has: pipe"),
        (["--mesh.expert", "four"], r"--mesh\.expert: 'four' is no whole number \(int\)"),
        (["--mesh.expert", "4", "2"], r"--mesh\.expert: '4 2' is no whole number"),
        (["--mesh.expert"], r"--mesh\.expert: nothing is no whole number"),
        (["--train.steps", "1.5"], r"--train\.steps: '1\.5' is no whole number"),
        (["--optim.clip_norm", "much"], r"--optim\.clip_norm: 'much' is no number \(float\)"),
        (["--optim.kind", "adam"], r"--optim\.kind: 'adam' is no value of 'adamw', 'muon', 'sgd'"),
        (["--train.debug", "maybe"], r"--train\.debug: 'maybe' is no True or False \(bool\)"),
        (["--mesh.expert", "2", "--mesh.expert=4"], r"--mesh\.expert is given twice"),
        (["mesh.expert=2"], r"'mesh\.expert=2' belongs to no --key"),
        (["--no-mesh"], r"there is no such field|group of fields"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_override_names_the_key_and_what_is_legal(args, message):
    with pytest.raises(ConfigError, match=message):
        override(BASE, args)


def test_every_field_can_be_named_and_is_explained():
    text = help_text(BASE)
    names = [name for name in fields(BASE) if not name.startswith("data.sources") and name != "optim.groups"]
    assert [name for name in names if name.replace("_", "-") not in text.replace("_", "-").replace("-no-", "-")] == []
    assert set(SHORTHANDS.values()) <= set(fields(BASE))


def test_the_resolved_config_is_plain_json():
    written = json.loads(to_json(override(BASE, ["--mesh.expert", "4"])))
    assert written["mesh"]["expert"] == 4 and written["data"]["sources"][0]["kind"] == "stdlib"
