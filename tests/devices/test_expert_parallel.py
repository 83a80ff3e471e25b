"""The chain from dispatch to combine on pretended devices: every transport and mesh equals the definition, values and gradients."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from moejax_kernels import group_ranks, grouped_mlp

from moejax.config.moe import MoEConfig, RouterConfig
from moejax.moe import copies, placement
from moejax.moe import expert_parallel as expert_parallel_
from moejax.moe.expert_parallel import expert_parallel
from moejax.parallel.axes import ROWS
from moejax.parallel.axes import spec as spec_of
from moejax.parallel.mesh import mesh_from

EXPERTS, CHOSEN, WIDTH, HIDDEN, BATCH, LENGTH = 16, 3, 8, 4, 8, 12
AXES = {"gate_EDF": ("expert", "embed", "mlp"), "up_EDF": ("expert", "embed", "mlp"), "down_EFD": ("expert", "mlp", "embed")}
CONFIG = MoEConfig(num_experts=EXPERTS, experts_per_token=CHOSEN)
MESHES = ({}, {"expert": 2}, {"expert": 4}, {"expert": 8}, {"fsdp": 2, "expert": 4}, {"data": 2, "fsdp": 2, "expert": 2})
HIERARCHICAL = ({"expert": 4}, {"expert": 8}, {"fsdp": 2, "expert": 4})
CHOICES = ("skewed", "one device's experts", "none but the first row's")
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
"""Of each tensor's peak: rounding of sums of tens of terms in another order."""


def arrays(dtype: str, choice: str = "skewed", seed: int = 0):
    """x, ids, probs, weights, and a cotangent; the last row is half padding."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)
    popularity_E = 1 / np.arange(1, EXPERTS + 1)
    if choice == "one device's experts":
        popularity_E[CHOSEN:] = 0
    draw = lambda: rng.choice(EXPERTS, CHOSEN, replace=False, p=popularity_E / popularity_E.sum())
    ids_BLK = np.array([[draw() for _ in range(LENGTH)] for _ in range(BATCH)], np.int32)
    ids_BLK[-1, LENGTH // 2 :] = -1
    if choice == "none but the first row's":
        ids_BLK[1:] = -1
    weights = {
        "gate_EDF": normal(EXPERTS, WIDTH, HIDDEN),
        "up_EDF": normal(EXPERTS, WIDTH, HIDDEN),
        "down_EFD": normal(EXPERTS, HIDDEN, WIDTH),
    }
    return normal(BATCH, LENGTH, WIDTH), ids_BLK, rng.random((BATCH, LENGTH, CHOSEN)).astype(dtype), weights, normal(BATCH, LENGTH, WIDTH)


def apply_experts(weights, x_WD, sizes_x):
    return grouped_mlp(x_WD, weights["gate_EDF"], weights["up_EDF"], weights["down_EFD"], sizes_x)


@functools.cache
def compiled(config: MoEConfig, mesh):
    def run(x_BLD, ids_BLK, probs_BLK, weights, dy_BLD, control):
        def layer(x_BLD, probs_BLK, weights):
            placed = {name: (weights[name], spec_of(axes)) for name, axes in AXES.items()}
            options = {"apply_experts": apply_experts, "config": config, "control": control}
            y_BLD, _, report = expert_parallel(x_BLD, ids_BLK, probs_BLK, placed, **options)
            return y_BLD, report

        y_BLD, pull, report = jax.vjp(layer, x_BLD, probs_BLK, weights, has_aux=True)
        return y_BLD, pull(dy_BLD), report

    return jax.jit(run)


def run(config: MoEConfig, inputs, control=None, **sizes):
    """Values, gradients of x, probs and weights, and the report, on the host."""
    mesh = mesh_from(**sizes)
    with jax.set_mesh(mesh):
        return jax.device_get(compiled(config, mesh)(*on_mesh(mesh, inputs), control or {}))


def on_mesh(mesh, inputs):
    x, ids, probs, weights, dy = inputs
    rows = NamedSharding(mesh, ROWS)
    placed = {name: jax.device_put(weights[name], NamedSharding(mesh, spec_of(axes))) for name, axes in AXES.items()}
    return *jax.device_put((x, ids, probs), rows), placed, jax.device_put(dy, rows)


def definition(inputs):
    """Token after token, expert after expert, and its gradients by autodiff."""
    x, ids, probs, weights, dy = inputs

    @jax.jit
    def dense(x_BLD, probs_BLK, weights):
        of_expert = lambda gate, up, down: (jax.nn.silu(x_BLD @ gate) * (x_BLD @ up)) @ down
        every_EBLD = jax.vmap(of_expert)(weights["gate_EDF"], weights["up_EDF"], weights["down_EFD"])
        weight_BLE = jnp.sum((ids[..., None] == jnp.arange(EXPERTS)) * probs_BLK[..., None], 2)
        return jnp.einsum("EBLD,BLE->BLD", every_EBLD, weight_BLE)

    y_BLD, pull = jax.vjp(dense, x, probs, weights)
    return y_BLD, pull(dy)


def check(ours, theirs, tolerance):
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-30))


@pytest.mark.parametrize("sizes", [{}, {"expert": 8}])
def test_no_gradient_is_summed_over_axes_of_one_device(sizes):
    """XLA's CPU backend copies for such a sum: 52 MB of weight gradients in a step of configs/qwen3_moe_small_cpu.py."""
    mesh = mesh_from(**sizes)
    with jax.set_mesh(mesh):
        program = compiled(CONFIG, mesh).lower(*on_mesh(mesh, arrays("float32")), {}).compile().as_text()
    sums = [line for line in program.splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    assert len(sums) == 1 and "s32[]" in sums[0]  # rows without a place, for the report


def cases():
    for config, meshes in (
        (CONFIG, MESHES),
        (dataclasses.replace(CONFIG, overlap_chunks=3), MESHES[3:5]),
        *((dataclasses.replace(CONFIG, transport="hierarchical", node_size=size), HIERARCHICAL) for size in (2, 4)),
        (dataclasses.replace(CONFIG, transport="hierarchical", node_size=2, overlap_chunks=2), HIERARCHICAL[1:2]),
    ):
        for sizes in meshes:
            yield config, sizes


def label(value) -> str:
    if isinstance(value, MoEConfig):
        return f"{value.transport} {value.node_size or ''} {value.overlap_chunks} chunks"
    return " x ".join(f"{axis} {size}" for axis, size in value.items()) or "one device"


@pytest.mark.parametrize(("config", "sizes"), list(cases()), ids=label)
def test_every_transport_on_every_mesh_equals_the_definition(config, sizes):
    with jax.enable_x64():
        inputs = arrays("float64")
        *got, report = run(config, inputs, **sizes)
        check(got, definition(inputs), TOLERANCE["float64"])
        assert report["dropped"] == 0


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name, axis_index_groups=None):
    """What jax.lax.ragged_all_to_all documents, for devices that have none: everyone sees everything and takes what is its own."""
    assert axis_index_groups is None
    gather = lambda array: jax.lax.all_gather(array, axis_name)
    me, row_W = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
    operand_S, begin_SS, size_SS, target_SS = map(gather, (operand, input_offsets, send_sizes, output_offsets))
    for sender in range(operand_S.shape[0]):
        offset_W = row_W - target_SS[sender, me]
        mine_W = (offset_W >= 0) & (offset_W < size_SS[sender, me])
        rows_WD = operand_S[sender, jnp.clip(begin_SS[sender, me] + offset_W, 0, operand.shape[0] - 1)]
        output = jnp.where(mine_W[:, None], rows_WD, output)
    return output


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_ragged_sends_the_rows_that_are_there_and_nothing_else(factor, monkeypatch):
    """Offsets and sizes by the operation's definition; XLA's CPU backend has none, a GPU has."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    config = dataclasses.replace(CONFIG, transport="ragged", capacity_factor=factor)
    with jax.enable_x64():
        inputs = arrays("float64")
        *got, report = run(config, inputs, fsdp=2, expert=4)
        *want, want_report = run(dataclasses.replace(config, transport="all_to_all"), inputs, fsdp=2, expert=4)
        check(got, want, TOLERANCE["float64"])
        assert report["dropped"] == want_report["dropped"] and (report["dropped"] > 0) == (factor > 0)


@pytest.mark.parametrize("transport", ["all_to_all", "hierarchical"])
@pytest.mark.parametrize("choice", CHOICES)
def test_float32_and_awkward_choices_equal_the_definition(transport, choice):
    """All tokens to one device's experts, and devices whose tokens choose nothing, among them."""
    config = dataclasses.replace(CONFIG, transport=transport, node_size=2 if transport == "hierarchical" else 0)
    inputs = arrays("float32", choice)
    *got, report = run(config, inputs, fsdp=2, expert=4)
    check(got, definition(inputs), TOLERANCE["float32"])
    assert report["dropped"] == 0
    empty = np.bincount(inputs[1][inputs[1] >= 0], minlength=EXPERTS) == 0
    assert not any(array[empty].any() for array in got[1][2].values()), "an expert that nobody chose gets gradient 0"


def placed(inputs, expert_at_E):
    """The same layer with the weights where a placement wants them."""
    x, ids, probs, weights, dy = inputs
    return x, ids, probs, {name: array[expert_at_E] for name, array in weights.items()}, dy


def placement_for(ids_BLK, *, move: bool) -> placement.Plan:
    """Two copies on each of four devices for the busiest experts; with `move` other homes too."""
    load_E = np.bincount(ids_BLK[ids_BLK >= 0], minlength=EXPERTS)
    at_E = placement.place(load_E, num_devices=4) if move else np.arange(EXPERTS, dtype=np.int32)
    copy_SC, share_SC = placement.copies(load_E[at_E], num_devices=4, copies_per_device=2)
    assert (copy_SC >= 0).sum() >= 2
    return placement.Plan(expert_at_E=at_E, copy_SC=copy_SC, share_SC=share_SC)


HIERARCHY = {"transport": "hierarchical", "node_size": 2}


@pytest.mark.parametrize(
    "changes",
    [{}, HIERARCHY, {"capacity_factor": 8.0, "overlap_chunks": 2}, HIERARCHY | {"capacity_factor": 8.0, "overlap_chunks": 2}],
    ids=str,
)
@pytest.mark.parametrize("move", [False, True], ids=["copies", "copies and other homes"])
def test_copies_and_other_homes_change_no_value_and_no_gradient(move, changes):
    """Gradients of copies are summed at home: they equal those of the experts that nobody copied."""
    config = dataclasses.replace(CONFIG, **changes)
    with jax.enable_x64():
        inputs = arrays("float64")
        plan = placement_for(inputs[1], move=move)
        control, at_E = {"tables": copies.tables(plan)}, plan.expert_at_E
        if config.capacity_factor:
            control["capacity_factor"] = np.float32(config.capacity_factor)
        y_BLD, (dx, dprobs, dweights), report = run(config, placed(inputs, at_E), control, fsdp=2, expert=4)
        want_y, (want_dx, want_dprobs, want_dweights) = definition(inputs)
        check((y_BLD, dx, dprobs), (want_y, want_dx, want_dprobs), TOLERANCE["float64"])
        check(dweights, {name: array[at_E] for name, array in want_dweights.items()}, TOLERANCE["float64"])
        assert report["dropped"] == 0
        if config.node_size:
            assert report["distance_rows_3"].sum() == (inputs[1] >= 0).sum()


def test_copies_even_out_what_devices_compute():
    """896 experts of lognormal popularity on 64 devices, 2,048 tokens on each: rows counted after the slots were chosen."""
    rng = np.random.default_rng(1)
    num_experts, num_devices, tokens, chosen = 896, 64, 2048, 16
    popularity_E = rng.lognormal(0, 1, num_experts)
    draw = lambda: rng.choice(num_experts, (num_devices, tokens, chosen), p=popularity_E / popularity_E.sum()).astype(np.int32)
    plan = placement.plan(np.bincount(draw().reshape(-1), minlength=num_experts), num_devices=num_devices, copies_per_device=1, num_nodes=1)
    tables, ids_STK = jax.device_put(copies.tables(plan)), draw()

    @jax.jit
    def rows(ids_TK, device):
        rank_R, _ = group_ranks(ids_TK.reshape(-1), num_experts)
        slots_TK = copies.slots_of(ids_TK, rank_R.reshape(ids_TK.shape), tables, device=device)
        return jnp.bincount(slots_TK.reshape(-1) // (num_experts // num_devices + 1), length=num_devices)

    load_S = np.sum([rows(ids_TK, device) for device, ids_TK in enumerate(ids_STK)], 0)
    before_S = np.bincount(ids_STK.reshape(-1) // (num_experts // num_devices), minlength=num_devices)
    assert before_S.max() / before_S.mean() > 2.0
    # planned on one draw of 2,097,152 rows and measured on another: 32,768 rows a device, whose own noise is 0.6 % of the mean
    assert load_S.sum() == ids_STK.size and load_S.max() / load_S.mean() < 1.05


def test_a_traced_capacity_below_the_buffer_drops_as_a_buffer_of_that_size():
    small, large = (dataclasses.replace(CONFIG, capacity_factor=factor) for factor in (0.75, 4.0))
    inputs = arrays("float32")
    *want, want_report = run(small, inputs, fsdp=2, expert=4)
    *got, report = run(large, inputs, {"capacity_factor": np.float32(0.75)}, fsdp=2, expert=4)
    check(got, want, TOLERANCE["float32"])  # the buffer's size sets the order of sums
    assert report == want_report and report["dropped"] > 0
    enough = float(report["needed_capacity"])
    assert run(large, inputs, {"capacity_factor": np.float32(enough)}, fsdp=2, expert=4)[2]["dropped"] == 0
    assert run(dataclasses.replace(CONFIG, capacity_factor=enough), inputs, fsdp=2, expert=4)[2]["dropped"] == 0
    assert run(dataclasses.replace(CONFIG, capacity_factor=0.95 * enough), inputs, fsdp=2, expert=4)[2]["dropped"] > 0


@pytest.mark.parametrize("with_copies", [False, True], ids=["homes alone", "copies"])
@pytest.mark.parametrize("changes", [{}, HIERARCHY, {"overlap_chunks": 2}, HIERARCHY | {"overlap_chunks": 2}], ids=str)
def test_every_row_and_every_weight_is_accounted_for_under_a_capacity(changes, with_copies):
    config = dataclasses.replace(CONFIG, capacity_factor=0.5, **changes)
    x, ids, probs, weights, dy = arrays("float32")
    ones = {
        "gate_EDF": np.ones_like(weights["gate_EDF"]),
        "up_EDF": np.ones_like(weights["up_EDF"]),
        "down_EFD": np.ones_like(weights["down_EFD"]),
    }
    control = {"tables": copies.tables(placement_for(ids, move=False))} if with_copies else {}
    y_BLD, _, report = run(config, (np.ones_like(x), ids, probs, ones, dy), control, fsdp=2, expert=4)
    unit = run(CONFIG, (np.ones_like(x), ids, np.ones_like(probs), ones, dy))[0][0, 0, 0] / CHOSEN  # what one row of weight 1 gives
    total_BL = np.where(ids >= 0, probs, 0).sum(-1)
    got_BL = y_BLD[..., 0] / unit
    np.testing.assert_allclose(got_BL[got_BL > 0], total_BL[got_BL > 0], rtol=1e-5)
    missing = total_BL[got_BL == 0].sum()
    assert 0 < report["dropped"] < (ids >= 0).sum() and 0 < report["weight_given"] < report["weight_lost"]
    np.testing.assert_allclose(report["weight_lost"] - report["weight_given"], missing, rtol=1e-5)


def test_buckets_of_the_first_stage_follow_the_nodes_that_a_token_visits():
    """costs.md's D(G) for 896 experts, top-16: 7.07 of 8 nodes; node-limited routing visits those it may."""
    assert round(expert_parallel_.distinct_nodes(896, 8, 16), 2) == 7.07 and round(expert_parallel_.distinct_nodes(896, 16, 16), 2) == 10.35
    config = MoEConfig(num_experts=896, experts_per_token=16, transport="hierarchical", node_size=8, capacity_factor=1.0)
    limited = dataclasses.replace(config, router=RouterConfig(num_groups=8, groups_kept=4, group_top=4))
    stages = lambda config: expert_parallel_.chain(config, 14, 64, 16, None).keywords
    assert stages(config)["outer"].bucket(8192, 8192) == round(8192 * expert_parallel_.distinct_nodes(896, 8, 16) / 8)
    assert stages(limited)["outer"].bucket(8192, 8192) == 8192 * 4 // 8
    assert stages(config)["inner"].bucket(8192, 8192) == 8192 * 16 // 8


def similar_by_hand(inputs, config: MoEConfig, num_devices: int):
    """Sender after sender: rows that find no place take the most similar kept row of their expert; values alone, float64."""
    x, ids, probs, weights, _ = inputs
    x, probs, weights = jax.tree.map(np.float64, (x, probs, weights))
    per_device, y = EXPERTS // num_devices, np.zeros(x.shape)
    lost = given = 0.0

    def expert(e, row):
        gate = row @ weights["gate_EDF"][e]
        return (gate / (1 + np.exp(-gate)) * (row @ weights["up_EDF"][e])) @ weights["down_EFD"][e]

    for rows in np.split(np.arange(BATCH), 8):
        places = max(1, round(config.capacity_factor * rows.size * LENGTH * CHOSEN / num_devices))
        used, kept_rows, late = np.zeros(num_devices, int), {e: [] for e in range(EXPERTS)}, []
        for row in rows:
            for at in range(LENGTH):
                for e, weight in zip(ids[row, at], probs[row, at], strict=True):
                    if e < 0:
                        continue
                    found = used[e // per_device] < places
                    used[e // per_device] += 1
                    if found:
                        kept_rows[e].append((row, at))
                        y[row, at] += weight * expert(e, x[row, at])
                    else:
                        late.append((row, at, e, weight))
        for row, at, e, weight in late:
            lost += weight
            if kept_rows[e]:
                candidates = np.array([x[other] for other in kept_rows[e]])
                cosines = candidates @ x[row, at] / np.linalg.norm(x[row, at]) / np.linalg.norm(candidates, axis=1)
                part = max(cosines.max(), 0)
                given += weight * part
                y[row, at] += weight * part * expert(e, candidates[cosines.argmax()])
    return y, lost, given


def test_a_row_without_a_place_takes_the_most_similar_kept_row_of_its_expert():
    config = dataclasses.replace(CONFIG, capacity_factor=0.5, overflow="similar", overflow_share=1.0, overflow_candidates=LENGTH)
    inputs = arrays("float32")
    y_BLD, grads, report = run(config, inputs, fsdp=2, expert=4)
    want, lost, given = similar_by_hand(inputs, config, num_devices=4)
    check(y_BLD, want, 1e-5)
    np.testing.assert_allclose([report["weight_lost"], report["weight_given"]], [lost, given], rtol=1e-5)
    assert given > 0
    # weights' gradients by central differences in one direction, float32: rounding of the values over the step
    direction = np.random.default_rng(1).normal(size=inputs[3]["down_EFD"].shape).astype(np.float32)
    moved = lambda step: (*inputs[:3], inputs[3] | {"down_EFD": inputs[3]["down_EFD"] + step * direction}, inputs[4])
    values = [np.vdot(run(config, moved(step), fsdp=2, expert=4)[0], inputs[4]) for step in (0.5, -0.5)]  # linear in this weight
    np.testing.assert_allclose(values[0] - values[1], np.vdot(grads[2]["down_EFD"], direction), rtol=1e-3)
