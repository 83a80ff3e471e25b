"""The short convolution: golden values, the definition, packing."""

import functools
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from moejax_kernels.causal_conv import cases
from moejax_kernels.causal_conv.api import causal_conv
from moejax_kernels.segments import Segments

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "ops" / "short_conv.npz"
IMPLEMENTATIONS = ["reference", "xla"]


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


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_and_gradients_are_the_golden_ones(implementation, dtype):
    golden = np.load(GOLDEN)
    with jax.enable_x64(True):
        x, weight, cotangent = (jnp.asarray(golden[name], dtype) for name in ("x", "w", "cotangent"))
        nothing = jnp.zeros((x.shape[0], 3, x.shape[2]), dtype)
        segments = Segments.build(golden["segment_ids"].astype(np.int32))
        (y, _), (dx, dweight, _) = run((x, weight, nothing), segments, (cotangent, nothing), implementation=implementation)
    for name, got in (("y", y), ("d_x", dx), ("d_w", dweight)):
        wrong = np.asarray(got, np.float64) - golden[name]
        assert got.dtype == dtype
        if dtype == "float64":
            assert np.abs(wrong).max() <= 1e-10 * np.abs(golden[name]).max(), name
        else:  # a few roundings of 6e-8
            assert np.sqrt(np.mean(wrong**2)) <= 1e-6 * np.sqrt(np.mean(golden[name] ** 2)), name


@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_shifts_match_the_definition(case):
    inputs = case.arrays(jnp.float32, seed=0)
    want, got = (run(inputs, case.segments(), cotangents_like(inputs), implementation=name) for name in IMPLEMENTATIONS)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(lengths=st.lists(st.integers(-3, 6).filter(bool), min_size=2, max_size=7), data=st.data())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_changed_document_changes_nothing_in_the_others(implementation, lengths, data):
    ids_L = np.concatenate([np.full(abs(length), number if length > 0 else -1) for number, length in enumerate(lengths)])
    ids_L = np.pad(ids_L[:16], (0, max(16 - ids_L.size, 0)), constant_values=99)
    changed_id = data.draw(st.sampled_from(sorted(set(ids_L.tolist()))))
    case, segments = cases.ConvCase("drawn", 1, (16,), 3), Segments.build(ids_L[None])
    inputs, other = case.arrays(jnp.float32, seed=1), case.arrays(jnp.float32, seed=2)
    cotangents, other_cotangents = cotangents_like(inputs), cotangents_like(inputs, seed=10)
    inside_BL1 = jnp.asarray(ids_L == changed_id)[None, :, None]
    owns_history, ends_row = changed_id == ids_L[0], changed_id == max(ids_L)
    altered = jnp.where(inside_BL1, other[0], inputs[0]), inputs[1], other[2] if owns_history else inputs[2]
    altered_cotangents = jnp.where(inside_BL1, other_cotangents[0], cotangents[0]), other_cotangents[1] if ends_row else cotangents[1]
    call = functools.partial(run, implementation=implementation)
    (y, history), (dx, _, dhistory) = call(inputs, segments, cotangents)
    (altered_y, altered_history), (altered_dx, _, altered_dhistory) = call(altered, segments, altered_cotangents)
    for before, after in ((y, altered_y), (dx, altered_dx)):
        np.testing.assert_array_equal(np.asarray(before)[:, ids_L != changed_id], np.asarray(after)[:, ids_L != changed_id])
    assert not np.asarray(altered_y)[:, ids_L < 0].any()
    if not ends_row:
        np.testing.assert_array_equal(history, altered_history)
    if not owns_history:
        np.testing.assert_array_equal(dhistory, altered_dhistory)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_in_two_parts_equals_the_whole_row(implementation):
    """The history that the first part returns, zeros where a document begins, is what the second one needs."""
    for lengths in ((12,), (5, 7), (7, 5), (6, 6)):
        x, weight, history = cases.ConvCase("whole", 2, lengths, 3).arrays(jnp.float32, seed=3)
        ids_BL = np.broadcast_to(np.repeat(np.arange(len(lengths)), lengths), (2, 12))
        call = functools.partial(causal_conv, weight_D4=weight, implementation=implementation)
        want, want_history = call(x, segments=Segments.build(ids_BL), history_B3D=history)
        first, middle = call(x[:, :6], segments=Segments.build(ids_BL[:, :6]), history_B3D=history)
        middle = middle * (ids_BL[0, 5] == ids_BL[0, 6])  # the caller knows whether the document goes on
        second, last = call(x[:, 6:], segments=Segments.build(ids_BL[:, 6:]), history_B3D=middle)
        np.testing.assert_allclose(jnp.concatenate([first, second], 1), want, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(last, want_history)


TREES = [
    ((2, 2, 3, 1, 4), {1: 0, 2: 0, 3: 2}),
    ((-1, 1, 1, 1, 5, -2), {2: 1, 3: 2, 4: 3}),  # the taps of the last one reach through two segments of one token
    ((5, 1, 2, 4), {1: 0, 2: 0, 3: 0}),  # the row's history ends up in the branches
]


@pytest.mark.parametrize(("lengths", "parent"), TREES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tree_of_segments_equals_its_documents_written_out(implementation, lengths, parent):
    """In float64, values and gradients; the history after the row is that of its last document."""
    ids_L = np.concatenate([np.full(abs(length), number if length > 0 else -1) for number, length in enumerate(lengths)])
    with jax.enable_x64(True):
        inputs = cases.ConvCase("tree", 1, None, 3, length=ids_L.size).arrays("float64", seed=4)
        cotangents = cotangents_like(inputs)
        (y, last), grads = run(inputs, Segments.build(ids_L[None], [parent]), cotangents, implementation=implementation)
        want_grads, seen = [np.zeros(x.shape) for x in inputs], set()
        for leaf in sorted({number for number, length in enumerate(lengths) if length > 0} - set(parent.values())):
            path = [leaf]
            while path[0] in parent:
                path.insert(0, parent[path[0]])
            at, owns, ends = np.concatenate([np.flatnonzero(ids_L == number) for number in path]), path[0] == ids_L[0], leaf == max(ids_L)
            new_L = np.array([ids_L[t] not in seen for t in at])[None, :, None]  # a shared prefix's output counts once
            seen.update(path)
            place = np.full(ids_L.size, -1)  # the document, then padding: nothing new to compile
            place[: at.size] = at
            cotangent = np.pad(np.where(new_L, np.asarray(cotangents[0])[:, at], 0), ((0, 0), (0, ids_L.size - at.size), (0, 0)))
            (want, want_last), alone = run(
                (jnp.asarray(np.asarray(inputs[0])[:, place]), inputs[1], inputs[2] * owns),
                Segments.build(np.where(place >= 0, 0, -1)[None]),
                (jnp.asarray(cotangent), cotangents[1] * ends),
                implementation="reference",
            )
            np.testing.assert_allclose(np.asarray(y)[:, at], np.asarray(want)[:, : at.size], rtol=0, atol=1e-13)
            if ends:
                np.testing.assert_array_equal(last, want_last)
            want_grads[0][:, at] += np.asarray(alone[0])[:, : at.size]
            want_grads[1] += np.asarray(alone[1])
            want_grads[2] += np.asarray(alone[2]) * owns
        for ours, theirs in zip(grads, want_grads, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_without_activation_it_is_the_plain_sum():
    x, weight, _ = cases.ConvCase("plain", 1, (5,), 2).arrays(jnp.float32, seed=5)
    padded = np.pad(np.asarray(x), ((0, 0), (3, 0), (0, 0)))
    want = sum(padded[:, n : n + 5] * np.asarray(weight)[:, n] for n in range(4))
    for implementation in IMPLEMENTATIONS:
        np.testing.assert_allclose(causal_conv(x, weight, activation=None, implementation=implementation)[0], want, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_rounded_once():
    x, weight, _ = cases.ConvCase("bfloat16", 1, (9,), 4).arrays(jnp.bfloat16, seed=6)
    y, history = causal_conv(x, weight, implementation="xla")
    want, _ = causal_conv(x.astype(jnp.float32), weight.astype(jnp.float32), implementation="reference")
    assert y.dtype == history.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=2**-8, atol=1e-6)  # half a step of bfloat16


def test_wrong_inputs_are_named_with_their_shapes():
    x, weight, history = cases.ConvCase("wrong", 1, (5,), 2).arrays(jnp.float32, seed=7)
    with pytest.raises(ValueError, match=r"weight_D4 must be \(2, 4\).*got \(4, 2\)"):
        causal_conv(x, weight.T)
    with pytest.raises(ValueError, match=r"history_B3D must be \(1, 3, 2\)"):
        causal_conv(x, weight, history_B3D=history[:, :2])
    with pytest.raises(ValueError, match=r"x_BLD must be floating point, got int32"):
        causal_conv(x.astype(jnp.int32), weight)
    with pytest.raises(ValueError, match=r"activation='gelu' is unknown; use 'silu' or None"):
        causal_conv(x, weight, activation="gelu")
    with pytest.raises(ValueError, match=r"segments are for \(1, 6\) tokens, x has \(1, 5\)"):
        causal_conv(x, weight, segments=Segments.whole(1, 6))
    with pytest.raises(ValueError, match=r"x is \[B, L, D\]"):
        causal_conv(x[0], weight)
    with pytest.raises(ValueError, match=r"x is \(1, 0, 2\); every size must be at least 1"):
        causal_conv(x[:, :0], weight)
