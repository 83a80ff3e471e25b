"""Capacities that follow what is dropped, and experts that are copied or move: what training does stays the same."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from moejax.config.moe import AdaptiveConfig, CopiesConfig
from moejax.config.training import OptimConfig
from moejax.moe import copies
from moejax.train import control as controls

COPIES = CopiesConfig(every=2, per_device=1, gain=0.0)
MOMENTUM = OptimConfig(kind="adamw", learning_rate=0.01, clip_norm=1.0, warmup_steps=0, schedule="constant", weight_decay=0.1)
"""Moments must move with their experts, and the norm must count each expert once."""


def model(**moe):
    """A dense layer's place and two stacked sparse ones, in float64."""
    return tiny.model("gqa", num_layers=3, num_dense_layers=1, dense_hidden=16, precision=tiny.FLOAT64, moe=tiny.moe(**moe))


def batches(num, rows=8):
    return [tiny.batch(rows, seed=seed) for seed in range(num)]


def rebalanced(config, state, mesh):
    """What a run does between steps: decides, and moves weights and moments."""
    control, sources, values = controls.decide(config, jax.device_get(state.control), num_devices=mesh.shape["expert"])
    weights = state.params, state.opt_state
    with jax.set_mesh(mesh):
        if sources:
            places = jax.tree.map(lambda array: array.sharding, weights)
            weights = jax.jit(controls.move_experts, out_shardings=places)(weights, sources)
    state = dataclasses.replace(state, params=weights[0], opt_state=weights[1], control=jax.device_put(control, state.step.sharding))
    return state, sources, values


def at_home(params, control):
    """Weights of experts in the experts' own order."""

    def of(path, leaf):
        names = [step.key for step in path]
        if "experts" not in names:
            return leaf
        position = np.asarray(control[names[0]][names[1]]["tables"].position_E)
        return np.take_along_axis(leaf, position.reshape(*position.shape, *(1,) * (leaf.ndim - position.ndim)), axis=position.ndim - 1)

    return jax.tree_util.tree_map_with_path(of, jax.device_get(params))


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("move", [False, True], ids=["copies", "copies and other homes"])
def test_training_with_copies_and_other_homes_is_training_without(move, accumulation):
    settings = dataclasses.replace(COPIES, move=move)
    with jax.enable_x64(True):
        plain = tiny.trainer(model(), optim=MOMENTUM, fsdp=2, expert=4, accumulation=accumulation)
        data = batches(5, rows=8 * accumulation)  # a row on each device
        want, want_told = plain.run(data)
        config = model(copies=settings, node_size=2 if move else 0)
        trainer = tiny.trainer(config, optim=MOMENTUM, fsdp=2, expert=4, accumulation=accumulation)
        state, told, moved, used = trainer.state, [], 0, 0
        for first in (0, 2, 4):
            state, more = trainer.run(data[first : first + 2], state)
            told += more
            state, sources, values = rebalanced(config, state, trainer.mesh)
            moved += len(sources)
            used += sum((places["tables"].copy_SC >= 0).sum() for places in jax.device_get(state.control)["unit"].values())
            assert values["device_load_after"] <= values["device_load_before"]
        assert used > 0 and (moved > 0) == move
        for ours, theirs in zip(told, want_told, strict=True):
            np.testing.assert_allclose(ours.scalars["objective"], theirs.scalars["objective"], rtol=1e-10)
            np.testing.assert_allclose(ours.scalars["gradient_norm"], theirs.scalars["gradient_norm"], rtol=1e-10)
            assert ours.scalars["expert_load_max_over_mean"] == theirs.scalars["expert_load_max_over_mean"]
        error, path = tiny.worst(at_home(state.params, jax.device_get(state.control)), jax.device_get(want.params))
        assert error < 1e-9, path


def test_experts_that_are_chosen_together_come_to_one_node():
    """Two groups of four experts, even and odd, over two nodes of two devices: every pair is apart before, none after."""
    config = model(copies=dataclasses.replace(COPIES, move=True, per_device=0), node_size=2)
    control = controls.init_control(config, 4)
    same_EE = np.float32(np.arange(8)[:, None] % 2 == np.arange(8) % 2) * 10
    control["unit"]["0"] |= {"load_E": np.full((2, 8), 40, np.float32), "together_EE": np.stack([same_EE] * 2)}
    new, sources, _ = controls.decide(config, control, num_devices=4)
    for layer in range(2):
        plan = copies.plan_of(jax.tree.map(lambda leaf, layer=layer: leaf[layer], new["unit"]["0"]["tables"]), num_devices=4)
        assert [set(node % 2) for node in np.split(plan.expert_at_E, 2)] in ([{0}, {1}], [{1}, {0}])
        np.testing.assert_array_equal(sources["unit"]["0"][layer], plan.expert_at_E)
    assert not new["unit"]["0"]["together_EE"].any() and not new["unit"]["0"]["load_E"].any()


def test_a_placement_can_be_read_back_from_its_tables():
    state = controls.init_control(model(copies=COPIES), 4)["unit"]["0"]
    layer = jax.tree.map(lambda leaf: leaf[0], state["tables"])
    plan = copies.plan_of(layer, num_devices=4)
    assert plan.expert_at_E.tolist() == list(range(8)) and (plan.copy_SC == -1).all()
    nothing = controls.init_control(model(copies=dataclasses.replace(COPIES, per_device=0, move=True)), 4)
    assert all(leaf.size for leaf in jax.tree.leaves(nothing)), "a checkpoint holds no array without entries"
    for ours, theirs in zip(jax.tree.leaves(copies.tables(plan)), jax.tree.leaves(layer), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def capacity_after(asks, config):
    """Factors after steps that drop a share of the rows and would have needed some factor."""
    capacity = {"factor": np.float32(1.5), "asked_more": np.int32(0), "asked_less": np.int32(0)}
    factors = []
    for drop_rate, needed in asks:
        capacity = controls.next_capacity(capacity, np.float32(drop_rate), np.float32(needed), config)
        factors.append(float(capacity["factor"]))
    return factors


def test_capacity_rises_after_drops_in_a_row_falls_after_spare_room_in_a_row_and_stays_between_its_bounds():
    config = AdaptiveConfig(highest=2.0, lowest=1.0, patience=2, drop_rate=0.01, spare=0.1, step=1.25)
    more, less, calm = (0.05, 2.5), (0.0, 0.5), (0.005, 1.6)
    np.testing.assert_allclose(
        capacity_after([more, calm, more, more, more, more, more, more], config), [1.5, 1.5, 1.5, 1.875, 1.875, 2, 2, 2]
    )
    np.testing.assert_allclose(capacity_after([less] * 7, config), [1.5, 1.2, 1.2, 1, 1, 1, 1])
    np.testing.assert_allclose(capacity_after([less, more, less, more], config), [1.5] * 4)


def test_buffers_are_few_and_hold_every_capacity():
    config = AdaptiveConfig(highest=4.0, lowest=1.0, buffers=2)
    assert config.sizes() == (2.0, 4.0)
    assert [controls.buffer_size(config, factor) for factor in (1.0, 2.0, 2.1, 4.0)] == [2.0, 2.0, 4.0, 4.0]


def test_layers_that_drop_get_room_and_the_metrics_show_it():
    adaptive = AdaptiveConfig(highest=4.0, lowest=0.5, patience=1, drop_rate=0.0, spare=0.99, step=2.0)
    config = tiny.model("gqa", num_layers=2, moe=tiny.moe(capacity_factor=0.5, adaptive=adaptive))
    wide = dataclasses.replace(config, moe=dataclasses.replace(config.moe, capacity_factor=4.0))
    trainer = tiny.trainer(wide, expert=4)
    start = dataclasses.replace(trainer.state, control=jax.device_put(controls.init_control(config, 4), trainer.state.step.sharding))
    _, told = trainer.run([tiny.batch()] * 4, start)
    factors = [out.scalars["capacity_factor_max"] for out in told]
    dropped = [out.scalars["dropped_rows"] for out in told]
    assert factors[0] == 1.0 and factors == sorted(factors) and factors[-1] > 1
    assert dropped[0] > 0 and dropped[-1] < dropped[0]
    assert all(0 <= out.scalars["dropped_weight_given"] <= out.scalars["dropped_weight"] for out in told)


def test_the_topology_bias_keeps_rows_at_home_until_it_has_faded():
    """Two nodes of two devices; at step 2 of 2 the choice is the one without a bias."""
    near = tiny.model("gqa", moe=tiny.moe(node_size=2, topology_near=0.2, topology_far=0.4, topology_anneal_steps=2))
    plain = tiny.model("gqa", moe=tiny.moe(node_size=2))
    still = dataclasses.replace(tiny.SGD, learning_rate=1e-12)  # the weights stay what they were
    told = {
        name: tiny.trainer(config, optim=still, expert=4).run([tiny.batch()] * 3)[1] for name, config in (("near", near), ("plain", plain))
    }
    rows = {name: [out.scalars["rows_across_nodes"] for out in steps] for name, steps in told.items()}
    assert rows["near"][0] < rows["near"][1] < rows["near"][2] == rows["plain"][2]
    kinds = ("rows_on_device", "rows_in_node", "rows_across_nodes")
    num_rows = (tiny.batch().segments.ids_BL >= 0).sum() * near.moe.experts_per_token
    assert all(sum(out.scalars[kind] for kind in kinds) == num_rows for steps in told.values() for out in steps)


def test_a_step_that_is_not_finite_leaves_the_control_as_it_was():
    config = tiny.model(
        "gqa", moe=tiny.moe(capacity_factor=0.5, adaptive=AdaptiveConfig(highest=1.0, lowest=0.5, patience=1), copies=COPIES)
    )
    trainer = tiny.trainer(config, expert=4)
    unembed_DV = trainer.state.params["unembed"]["weight_DV"]
    broken = dataclasses.replace(trainer.state, params=trainer.state.params | {"unembed": {"weight_DV": unembed_DV * np.nan}})
    state, _ = trainer.run([tiny.batch()], broken)
    assert int(state.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, state.control, broken.control)
    healthy, _ = trainer.run([tiny.batch()])
    assert jax.device_get(healthy.control)["head"]["0"]["load_E"].any()
