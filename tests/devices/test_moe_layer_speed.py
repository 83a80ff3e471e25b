"""The three ways of experiments/moe_layer_speed do the same work."""

import importlib
import pathlib
import sys

import jax
import pytest

from moejax.parallel.mesh import mesh_from

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "moe_layer_speed"


@pytest.fixture
def experiment(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("layers", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("run")
    for name in ("layers", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_values_and_gradients_of_the_measured_layers_are_the_same(experiment):
    shape = 24, 16, 8
    arrays = experiment.inputs(*shape)
    bucket, capacity = experiment.room(*arrays[:2])
    found = experiment.ways(*shape, bucket=bucket, capacity=capacity)
    with jax.set_mesh(mesh_from(expert=experiment.DEVICES)):
        assert experiment.worst_difference(found, experiment.compiled(found, *arrays)) < 1e-5


def test_an_experiment_whose_buffers_are_too_small_is_no_comparison(experiment):
    shape = 24, 16, 8
    arrays = experiment.inputs(*shape)
    bucket, capacity = experiment.room(*arrays[:2])
    found = {"one-hot einsums": experiment.ways(*shape, bucket=bucket, capacity=capacity - 1)["one-hot einsums"]}
    with jax.set_mesh(mesh_from(expert=experiment.DEVICES)):
        arrays = experiment.compiled(found, *arrays)
        with pytest.raises(ValueError, match="dropped"):
            experiment.worst_difference(found, arrays)
