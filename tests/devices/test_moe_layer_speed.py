"""The three ways of experiments/moe_layer_speed do the same work."""

import jax
import pytest
from scripts import scripts

from moejax.parallel.mesh import mesh_from


@pytest.fixture
def experiment():
    with scripts("experiments/moe_layer_speed", "run") as (module,):
        yield module


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
