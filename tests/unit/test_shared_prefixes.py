"""What documents share is computed once, and nothing that is minimised or counted notices."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from moejax.config.training import LossConfig
from moejax.data.batch import Batch
from moejax.data.packing import fill, fill_trees

MIN_SHARED, SEGMENTS, LENGTH, LONG = 4, 16, 64, 112
ALL = LossConfig(z_coef=0.01, balance="sequence", balance_coef=0.1, router_z_coef=0.1, bias_update="quantile")
WINDOW = tiny.GQAConfig(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True, output_gate=True, window=5, sinks=True)
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


def samples() -> list[list[np.ndarray]]:
    """Samples of two rows: a tree of three levels, with one sample that ends where it forks and one that stands twice, between
    documents of their own; and a tree of two levels between two that share too little."""
    rng = np.random.default_rng(0)
    draw = lambda num: rng.integers(0, 64, num).astype(np.int32)
    stem, branch = draw(9), draw(7)
    join = lambda *parts: np.concatenate(parts)
    first = [draw(5), join(stem, [1], draw(4)), join(stem, branch, [2], draw(3)), draw(3), join(stem, branch, [3], draw(6)), stem]
    twice = join(stem, branch, [5], draw(1))
    other = draw(12)
    second = [join(other[:3], draw(6)), *(join(other, [7 + number], draw(2 + 3 * number)) for number in range(3)), join(other[:3], draw(8))]
    return [[*first, twice, twice], second]


def shared_batch() -> Batch:
    return Batch.build(*fill_trees(samples(), LENGTH, MIN_SHARED), num_segments=SEGMENTS)


def written_out() -> Batch:
    """The same documents in the same rows, every one whole."""
    return Batch.build(*fill(samples(), LONG))


def run(config, losses, batch, **kwargs):
    with jax.enable_x64(True):
        return tiny.gradients(config, losses, tiny.weights(config, bias=0.1), batch, **kwargs)


def same(ours, theirs, tolerance=1e-9):
    """Loss and gradients; the issue asks for 1e-9, seen are 1e-14 (sums in another order)."""
    assert abs(float(ours[0] - theirs[0])) <= tolerance * abs(float(theirs[0]))
    assert tiny.worst(ours[1], theirs[1])[0] < tolerance, tiny.worst(ours[1], theirs[1])


@pytest.mark.parametrize(
    "mixers, changes, losses",
    [
        (("kda", "mla"), {}, {}),
        (("gqa", "gdn"), {}, {"balance": "global"}),
        (("dsa",), {}, {"index": "sparse"}),
        slow(("gqa",), {"gqa": WINDOW}, {"balance": "switch"}),
        slow(("dsa", "kda", "gdn"), {}, {"index": "dense"}),
    ],
    ids=str,
)
def test_loss_gradients_and_statistics_are_those_of_the_batch_written_out(mixers, changes, losses):
    config, losses = tiny.model(*mixers, precision=tiny.FLOAT64, **changes), dataclasses.replace(ALL, **losses)
    ours, theirs = (run(config, losses, batch) for batch in (shared_batch(), written_out()))
    same(ours, theirs)
    for name in ("nll", "z", "balance", "router_z", "index_kl"):
        np.testing.assert_allclose(getattr(ours[2], name), getattr(theirs[2], name), rtol=1e-9)
    for section, places in theirs[2].layers.items():
        for place, layer in places.items():
            seen = ours[2].layers[section][place]
            np.testing.assert_array_equal(seen["counted_E"], layer["load_E"])
            np.testing.assert_array_equal(seen["margins_EN"], layer["margins_EN"])
            assert 0 < seen["load_E"].sum() < layer["load_E"].sum()
