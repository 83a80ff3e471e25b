"""The routing of a layer: what all devices must know of each other's choices, and what distance does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from moejax_kernels.segments import Segments

from moejax.config.moe import RouterConfig
from moejax.losses.router_bias import margin_histogram
from moejax.moe import topology
from moejax.moe.layer_routing import choose_layer, weigh_layer
from moejax.moe.router import choose, route, weigh
from moejax.moe.statistics import routing_statistics
from moejax.moe.topology import Topology
from moejax.parallel.axes import ROWS
from moejax.parallel.mesh import mesh_from

B, L, E, K = 8, 16, 8, 2
CONSTRAINED = RouterConfig(score="sigmoid", correction_bias=True, overload_strength=1.0, overload_threshold=1.2)
NEAR = RouterConfig(score="sigmoid", correction_bias=True, topology_near=0.05, topology_far=0.3, topology_anneal_steps=10)
HOMES = np.array([3, 0, 2, 2, 1, 0, 3, 1], np.int32)  # experts that were moved


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def draw(seed=0):
    """Logits with popular experts, a correction bias, documents with padding, and a gradient of the weights."""
    rng = np.random.default_rng(seed)
    logits_BLE = rng.normal(size=(B, L, E)) + np.linspace(-1.5, 1.5, E)
    ids_BL = np.zeros((B, L), int)
    ids_BL[-2, L // 2 :] = -1
    ids_BL[-1] = -1
    return logits_BLE, rng.normal(0, 0.05, E), Segments.build(ids_BL), rng.normal(size=(B, L, K))


def run(config, logits_BLE, bias_E, segments, dprobs_BLK, *, devices=(1, 1), whole_load_E=None, constrain=True, **distances):
    """Routing, load, report, and the gradient of sum(dprobs * weights), on fsdp x expert devices."""
    mesh = mesh_from(fsdp=devices[0], expert=devices[1])

    @jax.jit
    def both(logits_BLE, segments, distances):
        def total(logits_BLE):
            known = Topology(devices_per_node=2, **distances) if distances else None
            choice, load_E, report = choose_layer(logits_BLE, bias_E, segments, experts_per_token=K, config=config, topology=known)
            routing, more = weigh_layer(choice, load_E, config=config, constrain=constrain, whole_load_E=whole_load_E)
            return jnp.sum(routing.probs_BLK * dprobs_BLK), (routing, load_E, report | more)

        (_, told), dlogits_BLE = jax.value_and_grad(total, has_aux=True)(logits_BLE)
        return *told, dlogits_BLE

    with jax.set_mesh(mesh):
        rows = jax.device_put((logits_BLE, segments), NamedSharding(mesh, ROWS))
        return jax.device_get(both(*rows, distances))


def factor_by_hand(load_E, config):
    passed_E = load_E / (config.overload_threshold * load_E.mean())
    return np.where(passed_E > 1, 1 / np.maximum(passed_E, 1) ** config.overload_strength, 1)


@functools.cache
def on_one_device(config=CONSTRAINED):
    with jax.enable_x64(True):
        return run(config, *draw())


def test_the_soft_constraint_scales_overloaded_experts_by_global_counts_before_renormalisation():
    logits_BLE, _, segments, _ = draw()
    routing, load_E, report, _ = on_one_device()
    ids_RK = routing.ids_BLK[segments.ids_BL >= 0]
    np.testing.assert_array_equal(load_E, np.bincount(ids_RK.ravel(), minlength=E))
    factor_E, over_E = factor_by_hand(load_E, CONSTRAINED), load_E > 1.2 * load_E.mean()
    assert 0 < over_E.sum() < E and np.all((factor_E < 1) == over_E)
    scores_RK = np.take_along_axis(1 / (1 + np.exp(-logits_BLE[segments.ids_BL >= 0])), ids_RK, 1)
    scaled_RK = scores_RK * factor_E[ids_RK]
    np.testing.assert_allclose(routing.probs_BLK[segments.ids_BL >= 0], scaled_RK / scaled_RK.sum(1, keepdims=True), rtol=1e-12)
    assert np.all(routing.probs_BLK[segments.ids_BL < 0] == 0)
    assert report["overloaded"] == over_E.sum() and report["scaled_rows"] == load_E[over_E].sum()
    np.testing.assert_allclose(report["removed_weight"], (1 - scaled_RK.sum(1) / scores_RK.sum(1)).sum(), rtol=1e-12)


def test_the_soft_constraint_leaves_selection_and_sum_and_its_factor_has_no_gradient():
    logits_BLE, bias_E, segments, dprobs_BLK = draw()
    routing, load_E, _, dlogits_BLE = on_one_device()
    free, _, nothing, _ = run(CONSTRAINED, *draw(), constrain=False)
    np.testing.assert_array_equal(routing.ids_BLK, free.ids_BLK)
    np.testing.assert_allclose(routing.probs_BLK.sum(-1), segments.ids_BL >= 0, rtol=1e-12)
    assert nothing == {} and free.removed_BL is None
    constant_E = jnp.asarray(factor_by_hand(load_E, CONSTRAINED))

    def total(logits_BLE):
        choice = choose(logits_BLE, bias_E, segments.ids_BL >= 0, experts_per_token=K, config=CONSTRAINED)
        return jnp.sum(weigh(choice, config=CONSTRAINED, factor_E=constant_E).probs_BLK * dprobs_BLK)

    want_BLE = jax.grad(total)(logits_BLE)
    np.testing.assert_allclose(dlogits_BLE, want_BLE, rtol=1e-10, atol=1e-15)
    assert np.abs(want_BLE).max() > 0.01


@pytest.mark.parametrize("config", [RouterConfig(score="sigmoid", correction_bias=True), CONSTRAINED], ids=["absent", "outside training"])
def test_without_the_soft_constraint_every_bit_is_the_routers(config):
    logits_BLE, bias_E, segments, dprobs_BLK = draw()
    low = logits_BLE.astype(np.float32), bias_E.astype(np.float32), segments, dprobs_BLK.astype(np.float32)
    routing, _, report, _ = run(config, *low, constrain=config is not CONSTRAINED)
    plain = jax.jit(functools.partial(route, experts_per_token=K, config=config))(low[0], low[1], segments.ids_BL >= 0)
    for name in ("ids_BLK", "probs_BLK", "scores_BLE", "ranked_BLE"):
        np.testing.assert_array_equal(getattr(routing, name), getattr(plain, name))
    assert report == {}


def test_padding_has_no_part_in_loads_factors_or_weights():
    logits_BLE, *rest = draw()
    routing, load_E, report, dlogits_BLE = on_one_device()
    padding_BL = rest[1].ids_BL < 0
    again, again_E, again_report, again_dlogits_BLE = run(CONSTRAINED, np.where(padding_BL[..., None], 50.0, logits_BLE), *rest)
    np.testing.assert_array_equal(again.probs_BLK, routing.probs_BLK)
    np.testing.assert_array_equal(again_E, load_E)
    np.testing.assert_array_equal(again_dlogits_BLE, dlogits_BLE)
    assert again_report == report and np.all(dlogits_BLE[padding_BL] == 0)


def test_the_soft_constraint_looks_at_the_whole_batch_where_that_is_known():
    load_E = on_one_device()[1]
    whole_E = np.roll(load_E, 3) * 4
    routing, _, report, _ = run(CONSTRAINED, *draw(), whole_load_E=whole_E)
    over_E = factor_by_hand(whole_E, CONSTRAINED) < 1
    assert report["scaled_rows"] == load_E[over_E].sum() and report["overloaded"] == over_E.sum()
    assert np.abs(routing.probs_BLK - on_one_device()[0].probs_BLK).max() > 0.01


@pytest.mark.parametrize("devices", [(2, 4), (1, 2)], ids=str)
def test_every_mesh_routes_as_one_device(devices):
    want, got = on_one_device(), run(CONSTRAINED, *draw(), devices=devices)
    np.testing.assert_array_equal(got[0].ids_BLK, want[0].ids_BLK)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)


def test_each_device_prefers_near_experts_and_rows_are_counted_by_distance():
    logits_BLE, bias_E, segments, _ = draw()
    far = {}
    for factor in (None, 0.0, 0.5, 1.0):
        known = {"home_device_E": HOMES} | ({} if factor is None else {"factor": jnp.float32(factor)})
        routing, load_E, report, _ = run(NEAR, *draw(), devices=(2, 4), **known)
        rows_3 = np.zeros(3, int)
        for row in range(B):  # rows lie on fsdp first, then on expert
            distance_E = np.where(row % 4 == HOMES, 0, np.where(row % 4 // 2 == HOMES // 2, 1, 2))
            offset_E = -np.float32(factor or 0) * np.float32([0, 0.05, 0.3])[distance_E]
            choice_LE = 1 / (1 + np.exp(-logits_BLE[row])) + offset_E + bias_E
            ids_LK = np.argsort(-choice_LE, axis=1)[:, :K]
            valid_L = segments.ids_BL[row] >= 0
            np.testing.assert_array_equal(routing.ids_BLK[row], np.where(valid_L[:, None], ids_LK, -1))
            rows_3 += np.bincount(distance_E[ids_LK[valid_L]].ravel(), minlength=3)
        assert report["distance_rows_3"].tolist() == rows_3.tolist() and report["distance_rows_3"].dtype == np.int32
        assert rows_3.sum() == load_E.sum()
        far[factor] = rows_3[2]
    assert far[None] == far[0.0] > far[0.5] > far[1.0] > 0


def test_quantile_margins_are_those_of_the_choice_that_distance_moved():
    """An expert that rose by a little more than a margin would have won that token."""
    logits_BLE, bias_E, segments, _ = draw()
    known = {"home_device_E": jnp.asarray(HOMES), "factor": jnp.float32(1)}
    routing = run(NEAR, *draw(), devices=(2, 4), **known)[0]
    with jax.set_mesh(mesh_from()):
        got_EN = routing_statistics(routing, jnp.asarray(bias_E), segments, kind="none", z=False, histogram=True)["margins_EN"]
    device_B = np.arange(B)[:, None] % 4
    offset_BE = np.float32([0, -0.05, -0.3])[np.where(device_B == HOMES, 0, np.where(device_B // 2 == HOMES // 2, 1, 2))]
    moved_RE = (1 / (1 + np.exp(-logits_BLE)) + offset_BE[:, None])[segments.ids_BL >= 0]
    want_EN = margin_histogram(jnp.asarray(moved_RE), bias_E, np.ones(len(moved_RE), bool), K)
    np.testing.assert_array_equal(got_EN, want_EN)


def test_on_one_device_every_expert_is_near():
    known = {"home_device_E": topology.contiguous_homes(E, 1), "factor": jnp.float32(1)}
    routing, load_E, report, _ = run(NEAR, *draw(), **known)
    np.testing.assert_array_equal(routing.ids_BLK, run(NEAR, *draw())[0].ids_BLK)
    assert report["distance_rows_3"].tolist() == [load_E.sum(), 0, 0]


def test_distances_and_annealing_follow_their_definitions():
    homes_E = topology.contiguous_homes(12, 6)
    assert homes_E.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    distance_E = topology.distance(homes_E, 3, devices_per_node=3)
    assert distance_E.tolist() == [2, 2, 2, 2, 2, 2, 0, 0, 1, 1, 1, 1]
    bias_E = topology.distance_bias(distance_E, config=NEAR, factor=0.5)
    np.testing.assert_allclose(bias_E, np.array([0, -0.025, -0.15])[distance_E], rtol=1e-6)
    factors = [float(jax.jit(functools.partial(topology.anneal, num_steps=10))(step)) for step in (0, 5, 10, 11)]
    np.testing.assert_allclose(factors, [1, 0.5, 0, 0], rtol=1e-6)
    assert float(topology.anneal(10**6, num_steps=0)) == 1
