"""Where the first number that is not finite was made."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from moejax.config.model import ResidualConfig
from moejax.config.run import Plan, RunConfig, layer_plan
from moejax.model import language_model
from moejax.train.report import first_non_finite

CONFIG = tiny.model("gqa", num_layers=5, num_dense_layers=1, dense_hidden=16, residual=ResidualConfig(kind="block_attnres", block_size=1))


def plan(config) -> Plan:
    return Plan(config=RunConfig(name="any", model=config), layers=layer_plan(config), rows_per_device=1)


def outputs(config):
    """Flags of a forward pass that was finite."""
    layers = layer_plan(config)
    flat = {section: {str(i): np.ones(2, bool) for i in range(len(getattr(layers, section)))} for section in ("head", "tail")}
    return flat | {"unit": {str(i): np.ones((layers.num_units, 2), bool) for i in range(len(layers.unit))}}


def first(config, *bad):
    """What is said if the gradients whose paths begin with one of `bad` are not finite."""
    finite = lambda path, _: not jax.tree_util.keystr(path, simple=True, separator="/").startswith(bad)
    return first_non_finite(plan(config), outputs(config), jax.tree_util.tree_map_with_path(finite, language_model.shapes(config)))


def test_the_gradient_that_backward_made_first_is_named_not_those_that_it_spoilt():
    assert layer_plan(CONFIG).num_units == 4 and len(layer_plan(CONFIG).head) == 1
    forward = ("embed", "head/0/mixer_norm", "head/0/mixer/", "head/0/feed_forward_norm", "head/0/feed_forward/", "unit/0/mixer_residual")
    forward += ("unit/0/mixer/", "unit/0/feed_forward/", "final_residual", "final_norm", "unembed")
    for at, born in enumerate(forward):  # backward spoils all that lies before it in the forward pass
        said = first(CONFIG, *forward[: at + 1])
        assert said is not None and said.startswith(f"the gradient of {born}") and "while all activations are finite" in said


def test_of_several_layers_in_the_tail_the_last_is_named():
    config = tiny.model("gqa", "gqa", "mla", "gdn")
    assert layer_plan(config).num_units == 2 and len(layer_plan(config).tail) == 2
    said = first(config, "embed", "unit", "tail")
    assert said is not None and said.startswith("the gradient of tail/1/feed_forward/")


def test_finite_gradients_are_not_named_and_activations_come_first():
    assert first(CONFIG, "nothing") is None
    layers = outputs(CONFIG)
    layers["unit"]["0"][1] = [True, False]
    gradients = jax.tree.map(lambda _: False, language_model.shapes(CONFIG))
    assert first_non_finite(plan(CONFIG), layers, gradients) == "layer 2, feed-forward (moe)"


@pytest.mark.parametrize("kind", ["plain", "mhc", "block_attnres"])
def test_every_weight_has_its_place_in_backward(kind):
    config = dataclasses.replace(CONFIG, residual=ResidualConfig(kind=kind))
    for path in tiny.leaves(jax.tree.map(lambda _: 0, language_model.shapes(config))):
        said = first(config, path)
        assert said is not None and said.startswith(f"the gradient of {path} ")
