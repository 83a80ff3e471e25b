"""Layers that are stacked and scanned are the layers one by one, and a deep model compiles as fast as a shallow one."""

import dataclasses
import time

import jax
import numpy as np
import pytest
import tiny

from moejax.config.model import ResidualConfig
from moejax.config.run import layer_plan
from moejax.config.training import LossConfig

CASES = {
    "hybrid with a shared choice of keys": tiny.model("gqa", "dsa", "dsa_shared", num_layers=6),
    "mhc": tiny.model("gqa", num_layers=3, residual=ResidualConfig(kind="mhc", num_streams=2)),
    "block_attnres": tiny.model("gqa", num_layers=7, residual=ResidualConfig(kind="block_attnres", block_size=2)),
    "dense first layer": tiny.model("gqa", "mla", num_layers=5, num_dense_layers=1, dense_hidden=16),
}


def one_by_one(config, tree):
    """Sections of stacked layers as a head of single ones."""
    plan, head = layer_plan(config), {}
    for number in range(config.num_layers):
        section, place, stack = plan.place(number)
        head[str(number)] = jax.tree.map(lambda leaf, stack=stack: leaf if stack is None else leaf[stack], tree[section][str(place)])
    return {name: node for name, node in tree.items() if name not in ("unit", "tail")} | {"head": head}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loss_loads_and_gradients_of_scanned_layers_equal_those_of_unrolled_ones(name):
    assert layer_plan(CASES[name]).num_units >= 2
    with jax.enable_x64(True):
        config = dataclasses.replace(CASES[name], precision=tiny.FLOAT64)
        params, batch, losses = tiny.weights(config, bias=0.1), tiny.batch(), LossConfig(balance="switch", balance_coef=0.1)
        twin = dataclasses.replace(config, scan_layers=False)
        assert layer_plan(twin).num_units == 0
        loss, grads, report = tiny.gradients(config, losses, params, batch)
        want_loss, want, want_report = tiny.gradients(twin, losses, one_by_one(config, params), batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-12)
    assert tiny.worst(one_by_one(config, grads), want)[0] < 1e-9
    reports = one_by_one(config, report.layers)["head"]
    for number, want_layer in want_report.layers["head"].items():
        np.testing.assert_array_equal(reports[number].get("load_E", 0), want_layer.get("load_E", 0))


@pytest.mark.slow
@pytest.mark.usefixtures("no_compilation_cache")
def test_48_layers_compile_as_fast_as_12():
    """In seconds of processor time, which other programs on the machine do not change; the compilation cache is off."""

    def seconds(num_layers, *mixers):
        trainer = tiny.trainer(tiny.model(*mixers, num_layers=num_layers), LossConfig(balance="sequence"), tiny.OptimConfig())
        with jax.set_mesh(trainer.mesh):
            batch = tiny.put(tiny.batch(), trainer.mesh)
            began_s = time.process_time()
            trainer.step.lower(trainer.state, batch).compile()
        return time.process_time() - began_s

    seconds(1, "gqa")  # what the first compilation alone pays
    shallow_s, deep_s = (seconds(num_layers, "kda", "dsa") for num_layers in (12, 48))
    assert deep_s <= 1.3 * shallow_s, f"{deep_s:.1f} s against {shallow_s:.1f} s"
