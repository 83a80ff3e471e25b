"""Counters and choices under recompute, and tokens that all want the same device."""

import concurrent.futures
import dataclasses

import jax
import numpy as np
import pytest
import tiny

from moejax.config.memory import LEAN
from moejax.config.training import LossConfig
from moejax.memory.policy import Saved
from moejax.model.objective import switches_for
from moejax.parallel.mesh import mesh_from
from moejax.train import step as steps

CONFIG = tiny.model("gqa", "gqa", precision=tiny.FLOAT64)
LOSSES = LossConfig(balance="sequence", balance_coef=0.1, router_z_coef=0.1)
TIMEOUT_S = 300


def run(params, **kwargs):
    with jax.enable_x64(True):
        return tiny.gradients(CONFIG, LOSSES, params, tiny.batch(), **kwargs)


def weights(**kwargs):
    with jax.enable_x64(True):
        return tiny.weights(CONFIG, **kwargs)


def with_routers(params, change):
    """The weights, with `change` applied to each router's leaves."""

    def of(path, leaf):
        return change(path[-1].key, leaf) if "router" in [key.key for key in path] else leaf

    return jax.tree_util.tree_map_with_path(of, params)


def loads(report):
    return report.layers["unit"]["0"]["load_E"]


@pytest.mark.parametrize("kwargs", [{}, pytest.param({"fsdp": 2, "expert": 4}, marks=pytest.mark.slow)], ids=str)
def test_recompute_counts_no_row_twice_and_changes_no_gradient(kwargs):
    params = weights(bias=0.1)
    loss, grads, report = run(params, **kwargs)
    again_loss, again, again_report = run(params, saved=Saved(), **kwargs)
    num_tokens = (tiny.batch().segments.ids_BL >= 0).sum()
    assert loads(report).sum(1).tolist() == [num_tokens * CONFIG.moe.experts_per_token] * CONFIG.num_layers
    np.testing.assert_array_equal(loads(again_report), loads(report))
    assert again_loss == pytest.approx(loss, rel=1e-13)
    assert tiny.worst(again, grads)[0] < 1e-12, tiny.worst(again, grads)


def test_ties_are_routed_to_the_lower_expert_with_and_without_recompute():
    params = with_routers(weights(), lambda name, leaf: np.zeros_like(leaf))
    _, grads, report = run(params)
    _, again, again_report = run(params, saved=Saved())
    num_tokens = int((tiny.batch().segments.ids_BL >= 0).sum())
    want = [num_tokens, num_tokens, *[0] * (CONFIG.moe.num_experts - 2)]
    assert loads(report).tolist() == loads(again_report).tolist() == [want] * CONFIG.num_layers
    assert tiny.worst(again, grads)[0] < 1e-12


@pytest.mark.parametrize("index", ["none", "sparse"])
def test_no_choice_of_experts_or_keys_and_no_dispatch_plan_is_recomputed(index):
    """The backward pass reads the saved choice and plan: a recomputed one could break ties differently."""
    mesh = mesh_from()
    config = dataclasses.replace(CONFIG, precision=tiny.FLOAT32) if index == "none" else tiny.model("dsa", "dsa_shared")
    losses, counts = dataclasses.replace(LOSSES, index=index), {}
    primitives = ("top_k", "scatter") if index == "none" else ("top_k",)  # masked attention scatters too, and runs again
    for saved in (None, Saved(), Saved((), LEAN)):
        with jax.set_mesh(mesh):
            run = lambda params, batch, saved=saved: steps.gradients(config, losses, params, batch, switches_for(losses, saved=saved))
            jaxpr = jax.jit(run).trace(tiny.lay(tiny.weights(config), config, mesh), tiny.put(tiny.batch(), mesh)).jaxpr
        counts[saved] = {name: str(jaxpr).count(f"= {name}[") for name in primitives}
    assert len({tuple(count.values()) for count in counts.values()}) == 1, counts
    assert counts[None]["top_k"] == {"none": 1, "sparse": 3}[index] and counts[None].get("scatter", 1) >= 1, counts


def test_all_tokens_on_one_devices_experts_end_in_time_and_right():
    params = with_routers(weights(), lambda name, leaf: np.where(np.arange(8) < 2, 100.0, 0.0) + leaf if name == "bias_E" else leaf)
    want_loss, want, want_report = run(params)
    num_tokens = int((tiny.batch().segments.ids_BL >= 0).sum())
    assert loads(want_report).tolist() == [[num_tokens, num_tokens, *[0] * 6]] * 2
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        loss, grads, report = pool.submit(run, params, fsdp=2, expert=4).result(timeout=TIMEOUT_S)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert tiny.worst(grads, want)[0] < 1e-9
    np.testing.assert_array_equal(loads(report), loads(want_report))
