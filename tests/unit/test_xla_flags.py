"""The table of XLA flags: which version gets which, and that only GPUs get any."""

import jax
import pytest

from moejax.parallel.xla_flags import OFFLOADING, Flag, Options, options_for, wanted

FLAGS = (
    Flag(name="old", value=True, since="0.4.0", until="0.7.0", why=""),
    Flag(name="new", value=2, since="0.7.0", why=""),
)


@pytest.mark.parametrize(
    ("version", "names"),
    [("0.3.25", []), ("0.4.0", ["old"]), ("0.6.2", ["old"]), ("0.7.0", ["new"]), ("0.11.2", ["new"]), ("0.11.3.dev20261130", ["new"])],
)
def test_a_version_gets_the_flags_of_its_range(version, names):
    assert [flag.name for flag in wanted(version, FLAGS)] == names


def test_a_cpu_gets_none():
    assert options_for(jax.devices("cpu")[0]) == Options({}, {})
    assert options_for(jax.devices("cpu")[0]).lines() == []


def test_what_is_taken_and_what_is_rejected_is_printed():
    lines = Options({"a": True, "b": 2}, {"c": "No such compile option: 'c'"}).lines()
    assert lines[0] == "XLA flags a=true, b=2"
    assert "c (No such compile option: 'c')" in lines[1]


def test_a_name_stands_once_for_each_version_and_says_why():
    assert all(flag.why for flag in OFFLOADING)
    for flag in OFFLOADING:
        names = [other.name for other in wanted(flag.since, OFFLOADING)]
        assert names.count(flag.name) == 1
