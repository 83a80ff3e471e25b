"""From tokens to experts and home again: drops counted exactly, weights kept, indices that cannot overflow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from moejax.config.moe import MoEConfig
from moejax.moe import dispatch
from moejax.moe.expert_parallel import expert_parallel
from moejax.parallel.axes import ROWS
from moejax.parallel.axes import spec as spec_of
from moejax.parallel.mesh import mesh_from

EXPERTS, CHOSEN, WIDTH, ROWS_, LENGTH = 8, 2, 4, 8, 8
FACTORS = {"expert": 4, "fsdp": 2}


def inputs(seed=0):
    """Tokens, distinct experts for each (some tokens have none), weights, and one factor and one row of numbers per expert."""
    rng = np.random.default_rng(seed)
    x_BLD = rng.normal(size=(ROWS_, LENGTH, WIDTH)).astype(np.float32)
    likely_E = np.array([8, 4, 2, 1, 1, 1, 1, 1]) / 19
    choose = lambda: rng.choice(EXPERTS, CHOSEN, replace=False, p=likely_E)
    ids_BLK = np.array([[choose() for _ in range(LENGTH)] for _ in range(ROWS_)], np.int32)
    ids_BLK[-1, 3:] = -1
    probs_BLK = rng.random((ROWS_, LENGTH, CHOSEN)).astype(np.float32)
    return x_BLD, ids_BLK, probs_BLK, rng.normal(size=(EXPERTS, WIDTH, WIDTH)).astype(np.float32)


@functools.cache
def compiled(factor, mesh):
    def multiply(weights, x_WD, sizes_e):
        expert_W = jnp.repeat(
            jnp.arange(sizes_e.size + 1), jnp.append(sizes_e, x_WD.shape[0] - sizes_e.sum()), total_repeat_length=x_WD.shape[0]
        )
        padded = jnp.concatenate([weights["matrix_EDD"], jnp.zeros_like(weights["matrix_EDD"][:1])])
        return jnp.einsum("wd,wdf->wf", x_WD, padded[expert_W])

    def run(x_BLD, ids_BLK, probs_BLK, matrix_EDD):
        params = {"matrix_EDD": (matrix_EDD, spec_of(("expert", "embed", None)))}
        config = MoEConfig(num_experts=EXPERTS, experts_per_token=CHOSEN, capacity_factor=factor)
        y_BLD, _, report = expert_parallel(x_BLD, ids_BLK, probs_BLK, params, apply_experts=multiply, config=config)
        return y_BLD, report

    return jax.jit(run)


def run(factor, arrays, **sizes):
    mesh = mesh_from(**sizes)
    placed = (*jax.device_put(arrays[:3], NamedSharding(mesh, ROWS)), arrays[3])
    with jax.set_mesh(mesh):
        return jax.device_get(compiled(factor, mesh)(*placed))


def by_hand(factor, arrays, *, num_senders, num_receivers):
    """Token after token: who finds a place, and the weighted sum of experts; bucket sizes as the config's docstring says."""
    x_BLD, ids_BLK, probs_BLK, matrix_EDD = arrays
    y_BLD, dropped = np.zeros(x_BLD.shape), 0
    per_device = EXPERTS // num_receivers
    for rows in np.split(np.arange(ROWS_), num_senders):
        tokens = rows.size * LENGTH
        places = max(1, round(factor * tokens * CHOSEN / num_receivers)) if factor else tokens * CHOSEN
        used = np.zeros(num_receivers, int)
        for row in rows:
            for at in range(LENGTH):
                kept = np.zeros(CHOSEN)
                for slot, expert in enumerate(ids_BLK[row, at]):
                    if expert < 0:
                        continue
                    kept[slot] = used[expert // per_device] < places
                    used[expert // per_device] += 1
                    dropped += not kept[slot]
                weights = probs_BLK[row, at] * kept
                if weights.sum():
                    weights = weights * (probs_BLK[row, at].sum() / weights.sum()) if factor else weights
                for slot, expert in enumerate(ids_BLK[row, at]):
                    y_BLD[row, at] += weights[slot] * (x_BLD[row, at] @ matrix_EDD[expert]) if kept[slot] else 0
    return y_BLD, dropped


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "expert": 4}], ids=["one device", "fsdp 2 x expert 4"])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
def test_values_and_drops_follow_the_definition(factor, sizes):
    arrays = inputs()
    y_BLD, report = run(factor, arrays, **sizes)
    want_BLD, want_dropped = by_hand(factor, arrays, num_senders=8 if sizes else 1, num_receivers=sizes.get("expert", 1))
    np.testing.assert_allclose(y_BLD, want_BLD, rtol=1e-5, atol=1e-5)
    assert report["dropped"] == want_dropped and (factor != 0 or report["dropped"] == 0)


def test_a_capacity_that_nobody_fills_is_dropless_bit_for_bit():
    arrays = inputs()
    np.testing.assert_array_equal(run(100.0, arrays, fsdp=2, expert=4)[0], run(0.0, arrays, fsdp=2, expert=4)[0])


def test_dropped_rows_leave_their_weight_to_the_kept_ones_of_their_token():
    x_BLD, ids_BLK, probs_BLK, matrix_EDD = inputs()
    ones = (np.ones_like(x_BLD), ids_BLK, probs_BLK, np.broadcast_to(np.eye(WIDTH, dtype=np.float32), matrix_EDD.shape))
    y_BLD, report = run(0.5, ones, fsdp=2, expert=4)
    dropped = report["dropped"]
    sum_BL, total_BL = y_BLD[..., 0], probs_BLK.sum(-1) * (ids_BLK[..., 0] >= 0)
    lost_BL = sum_BL == 0
    assert dropped > 0 and 0 < (lost_BL & (total_BL > 0)).sum() < dropped
    np.testing.assert_allclose(sum_BL[~lost_BL], total_BL[~lost_BL], rtol=1e-5)


@pytest.mark.parametrize(
    "tokens, k, devices, rows, message",
    [
        (2**20, 2, 2**10, 2**21 - 1, None),
        (2**20, 2, 2**10, 2**21, "S.Q = 1024 devices x buckets of 2097152 = 2147483648 rows.* smaller moe.capacity_factor"),
        (2**28 - 1, 8, 1, 2**28, None),
        (2**28, 8, 1, 2**28, "T.K = 268435456 tokens x 8 experts = 2147483648 rows.*more train.accumulation"),
    ],
)
def test_rows_that_int32_cannot_number_are_refused_by_their_shapes(tokens, k, devices, rows, message):
    """Shapes alone, no memory; the last fit and the first that does not. Rows times width is no index here: the ops move rows."""
    plan = functools.partial(dispatch.plan_send, num_devices=devices, slots_per_device=1, rows=rows)
    ids_TK = jax.ShapeDtypeStruct((tokens, k), np.int32)
    if message is None:
        assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(plan, ids_TK))} == {np.dtype(np.int32)}
    else:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(plan, ids_TK)
