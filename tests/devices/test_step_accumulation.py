"""Neither microbatches nor devices nor padding change what is minimised."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from moejax.config.training import LossConfig
from moejax.data.batch import Batch

CONFIG = tiny.model("gqa", precision=tiny.FLOAT64)
PLAIN = LossConfig(z_coef=0.01)
ALL = LossConfig(z_coef=0.01, balance="global", balance_coef=0.1, router_z_coef=0.1, bias_update="quantile")
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
KINDS = (slow("switch"), slow("sequence"), "global")
SPLIT = {"data": 2, "expert": 2, "accumulation": 4}


def run(losses, batch, **kwargs):
    with jax.enable_x64(True):
        return tiny.gradients(CONFIG, losses, tiny.weights(CONFIG, bias=0.1), batch, **kwargs)


def same(ours, theirs, tolerance=1e-12):
    assert abs(float(ours[0] - theirs[0])) <= tolerance * abs(float(theirs[0]))
    assert tiny.worst(ours[1], theirs[1])[0] < tolerance, tiny.worst(ours[1], theirs[1])


def loads(report):
    """What the router's bias moves by: rows per expert, and the margins of Quantile Balancing."""
    return report.layers["head"]["0"]["load_E"], report.layers["head"]["0"]["margins_EN"]


def join(*batches: Batch) -> Batch:
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)


def with_tokens(num_tokens: int, rows: int = 8, length: int = 16) -> Batch:
    """One document a row, `num_tokens` tokens in all, the rest padding."""
    rng = np.random.default_rng(num_tokens)
    ids_BL = np.where(np.arange(rows * length) < num_tokens, 0, -1).reshape(rows, length)
    return Batch.build(rng.integers(0, 64, (rows, length)), ids_BL)


def with_labels(batch: Batch, num: int) -> Batch:
    """The first `num` targets of the batch count, the others do not."""
    weights_BL = batch.weights_BL * (np.cumsum(batch.weights_BL).reshape(batch.weights_BL.shape) <= num)
    return dataclasses.replace(batch, weights_BL=weights_BL.astype(np.float32))


@pytest.mark.parametrize("sizes", [{}, slow({"data": 8}), slow({"expert": 8})], ids=str)
def test_identical_microbatches_add_up_to_the_same_mean(sizes):
    batch = tiny.batch()
    same(run(ALL, join(batch, batch), accumulation=2, **sizes), run(ALL, batch))


@pytest.mark.parametrize(
    "kind, sizes",
    [
        ("global", SPLIT),
        slow("switch", SPLIT),
        slow("sequence", {"fsdp": 2, "expert": 2, "accumulation": 4}),
        slow("global", {"expert": 4, "accumulation": 2}),
    ],
    ids=str,
)
def test_balance_alone_moves_the_router_the_same_on_every_mesh_and_split(kind, sizes):
    with_coef = lambda coef: dataclasses.replace(ALL, balance=kind, balance_coef=coef)
    batch = tiny.batch(rows=16)
    alone = {}
    for place, kwargs in (("one device", {}), ("mesh", sizes)):
        zero, one, two = (
            run(with_coef(coef), batch, **kwargs)[1]["head"]["0"]["feed_forward"]["router"]["weight_DE"] for coef in (0.0, 1.0, 2.0)
        )
        alone[place] = one - zero
        assert np.abs(one - zero).max() > 1e-5
        np.testing.assert_allclose(two - zero, 2 * (one - zero), rtol=0, atol=1e-14)
    np.testing.assert_allclose(alone["mesh"], alone["one device"], rtol=0, atol=1e-12 * np.abs(alone["one device"]).max())


@pytest.mark.parametrize("kind", KINDS)
def test_one_microbatch_of_100_tokens_and_one_of_10_equal_the_joined_batch(kind):
    batch = join(with_tokens(100), with_tokens(10))
    assert (batch.segments.ids_BL >= 0).sum() == 110
    losses = dataclasses.replace(ALL, balance=kind)
    want = run(losses, batch)
    got = run(losses, batch, **SPLIT)
    same(got, want)
    for counts in (got, want):
        load_E, margins_EN = loads(counts[2])
        assert load_E.sum() == 220 and margins_EN.sum(1).tolist() == [110] * 8


def test_one_microbatch_of_100_labels_and_one_of_1_give_the_mean_over_101():
    first, second = with_labels(with_tokens(128), 100), with_labels(with_tokens(127), 1)
    joined = join(first, second)
    assert joined.weights_BL.sum() == 101
    got = run(ALL, joined, accumulation=2)
    same(got, run(ALL, joined))
    parts = [
        run(ALL, join(part, dataclasses.replace(other, weights_BL=0 * other.weights_BL)), accumulation=2)[2].nll
        for part, other in ((first, second), (second, first))
    ]
    np.testing.assert_allclose(got[2].nll, sum(parts), rtol=1e-12)


@pytest.mark.parametrize("kwargs", [{}, {"accumulation": 2}, SPLIT], ids=str)
def test_a_batch_of_padding_has_loss_zero_and_gradients_zero(kwargs):
    loss, grads, _ = run(ALL, join(with_tokens(0), with_tokens(0)), **kwargs)
    assert loss == 0
    assert all(np.all(grad == 0) for grad in jax.tree.leaves(grads))


def test_without_a_label_the_text_teaches_nothing():
    loss, grads, _ = run(PLAIN, with_labels(with_tokens(128), 0))
    assert loss == 0
    assert all(np.all(grad == 0) for grad in jax.tree.leaves(grads))


def padded(batch: Batch, rows: int, length: int) -> Batch:
    """The same documents with rows below and tokens behind that are padding."""
    pad = lambda array, value: np.pad(array, ((0, rows), (0, length)), constant_values=value)
    return Batch.build(pad(batch.tokens_BL, 5), pad(batch.segments.ids_BL, -1))


def test_appended_rows_and_tokens_of_padding_change_nothing():
    batch = tiny.batch()
    want = run(ALL, batch)
    for rows, length in ((8, 0), (0, 8)):
        got = run(ALL, padded(batch, rows, length))
        same(got, want)
        jax.tree.map(np.testing.assert_array_equal, loads(got[2]), loads(want[2]))


@pytest.mark.parametrize(
    "mixer, losses",
    [
        ("mla", dataclasses.replace(ALL, bias_update="none", balance="switch")),
        slow("gdn", dataclasses.replace(ALL, bias_update="none")),
        slow("kda", dataclasses.replace(ALL, bias_update="none", balance="sequence")),
        slow("dsa", dataclasses.replace(ALL, bias_update="none", index="sparse")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_padding_changes_nothing_in_any_mixer_before_a_softmax_router(mixer, losses):
    config = tiny.model(mixer, precision=tiny.FLOAT64, moe=tiny.moe(score="softmax", correction_bias=False))
    batch = tiny.batch(4, 12)
    with jax.enable_x64(True):
        params = tiny.weights(config)
        want, got = (tiny.gradients(config, losses, params, each) for each in (batch, padded(batch, 3, 5)))
    same(got, want)
    counted = [report.layers["head"]["0"]["load_E"] for _, _, report in (got, want)]
    np.testing.assert_array_equal(*counted)
    assert counted[0].sum() == 2 * (batch.segments.ids_BL >= 0).sum()
    assert all(np.abs(grad).max() > 0 for grad in jax.tree.leaves(want[1])), "a gradient of zero would prove nothing"
