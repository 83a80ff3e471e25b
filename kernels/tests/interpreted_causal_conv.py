"""The Triton kernels of causal_conv in Triton's interpreter: golden values, the definition, packing. Run by test_causal_conv_triton.py."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.causal_conv import cases, triton_gpu
from moejax_kernels.causal_conv.api import causal_conv
from moejax_kernels.implementation import UnsupportedError
from moejax_kernels.segments import Segments

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "ops" / "short_conv.npz"
ACROSS_STRETCHES = (
    cases.ConvCase("one_stretch", 1, None, 3, length=8),
    cases.ConvCase("one_token_more", 2, None, 3, length=9),
    cases.ConvCase("borders_around_the_stretch", 1, (6, 1, 1, 1, 1, 9), 4),
    cases.ConvCase("document_over_three_stretches", 1, (3, 18, -4, 2), 33),
    cases.ConvCase("padding_at_the_stretch", 1, (5, -6, 8), 5),
    cases.ConvCase("two_channel_tiles", 1, (5, 4), 259),
    cases.ConvCase("tree_over_stretches", 2, (11, 9, -3, 20, 2), 5, parents=(-1, 0, -1, 0, 3)),
)


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch):
    monkeypatch.setattr(triton_gpu, "STRETCH", 8)


@functools.partial(jax.jit, static_argnames=("implementation", "activation"))
def run(inputs, segments, cotangents, *, implementation, activation="silu"):
    """((y, history), gradients)."""

    def forward(x, weight, history):
        return causal_conv(x, weight, segments=segments, history_B3D=history, activation=activation, implementation=implementation)

    out, pull = jax.vjp(forward, *inputs)
    return out, pull(cotangents)


def cotangents_like(inputs, seed=9):
    random = np.random.default_rng(seed)
    return tuple(jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in (inputs[0], inputs[2]))


def test_values_and_gradients_are_the_golden_ones(monkeypatch):
    monkeypatch.undo()  # stretches as on a GPU
    golden = np.load(GOLDEN)
    x, weight, cotangent = (jnp.asarray(golden[name], jnp.float32) for name in ("x", "w", "cotangent"))
    segments = Segments.build(golden["segment_ids"].astype(np.int32))
    call = lambda x, weight: causal_conv(x, weight, segments=segments, implementation="triton_gpu")[0]
    y, pull = jax.vjp(jax.jit(call), x, weight)
    for name, got in zip(("y", "d_x", "d_w"), (y, *pull(cotangent)), strict=True):
        wrong = np.asarray(got, np.float64) - golden[name]  # a few roundings of 6e-8
        assert np.sqrt(np.mean(wrong**2)) <= 1e-6 * np.sqrt(np.mean(golden[name] ** 2)), name


@pytest.mark.parametrize(
    ("case", "activation"), [*((case, "silu") for case in (*cases.SMALL, *ACROSS_STRETCHES)), (ACROSS_STRETCHES[2], None)], ids=str
)
def test_kernels_match_the_definition(case, activation):
    inputs = case.arrays(jnp.float32, seed=0)
    cotangents = cotangents_like(inputs)
    want, got = (
        run(inputs, case.segments(), cotangents, implementation=name, activation=activation) for name in ("reference", "triton_gpu")
    )
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # a few roundings; the weight's gradient is a sum over up to 27 tokens
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6 * max(1.0, np.abs(theirs).max()))


def test_a_tree_with_more_numbers_than_segments():
    segments = Segments.build([[0] * 7 + [1] * 5, [0] * 2 + [1, 2] + [-1] * 8], [{1: 0}, {1: 0, 2: 1}], num_segments=5)
    inputs = cases.ConvCase("rows", 2, None, 4, length=12).arrays(jnp.float32, seed=3)
    want, got = (run(inputs, segments, cotangents_like(inputs), implementation=name) for name in ("reference", "triton_gpu"))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6 * max(1.0, np.abs(theirs).max()))  # as above


def test_without_history_and_with_a_weight_of_another_dtype():
    x, weight, _ = cases.ConvCase("plain", 2, (3, 7), 4).arrays(jnp.float32, seed=1)
    segments = cases.ConvCase("plain", 2, (3, 7), 4).segments()
    call = lambda implementation: jax.jit(
        lambda x, weight: causal_conv(x, weight.astype(jnp.float32), segments=segments, implementation=implementation)[0]
    )
    for ours, theirs in zip(*(jax.vjp(call(name), x, weight)[1](jnp.sin(x)) for name in ("triton_gpu", "reference")), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)  # sums over 20 tokens


def test_a_changed_document_changes_nothing_in_the_others():
    """Documents around the end of a stretch, where one program reads the tokens of the next."""
    lengths = (4, 3, 2, 10)
    ids_L = np.repeat(np.arange(4), lengths)
    segments = Segments.build(ids_L[None])
    case = cases.ConvCase("drawn", 1, lengths, 3)
    inputs, other = case.arrays(jnp.float32, seed=1), case.arrays(jnp.float32, seed=2)
    cotangents, other_cotangents = cotangents_like(inputs), cotangents_like(inputs, seed=10)
    call = functools.partial(run, implementation="triton_gpu")
    (y, history), (dx, _, dhistory) = call(inputs, segments, cotangents)
    for changed in range(1, 3):
        inside_BL1 = jnp.asarray(ids_L == changed)[None, :, None]
        altered = jnp.where(inside_BL1, other[0], inputs[0]), inputs[1], inputs[2]
        altered_cotangents = jnp.where(inside_BL1, other_cotangents[0], cotangents[0]), cotangents[1]
        (altered_y, altered_history), (altered_dx, _, altered_dhistory) = call(altered, segments, altered_cotangents)
        for before, after in ((y, altered_y), (dx, altered_dx)):
            np.testing.assert_array_equal(np.asarray(before)[:, ids_L != changed], np.asarray(after)[:, ids_L != changed])
        np.testing.assert_array_equal(dhistory, altered_dhistory)
        np.testing.assert_array_equal(history, altered_history)


def test_what_the_kernels_cannot_take_is_named():
    x, weight, _ = cases.ConvCase("wrong", 1, (2, 3), 2).arrays(jnp.float32, seed=7)
    with pytest.raises(UnsupportedError, match="got x_BLD float32 and weight_D4 float16"):
        causal_conv(x, weight.astype(jnp.float16), implementation="triton_gpu")
