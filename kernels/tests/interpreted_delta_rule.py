"""KDA and Gated DeltaNet in Triton's interpreter, float32; run by test_delta_rule_triton.py.

Tolerances are of the RMS: those of LIMITS against golden values, as every implementation has to keep them;
3e-6 against the definition, some tens of float32 roundings of 6e-8 in a row (seen: up to 9e-7).
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.delta_cases import DeltaCase
from moejax_kernels.gated_delta.api import gated_delta
from moejax_kernels.gated_delta.shards import gated_delta_shard_summary
from moejax_kernels.kda.api import kda
from moejax_kernels.kda.shards import kda_shard_summary
from moejax_kernels.segments import Segments

import triton.language as tl  # isort: skip (after jax-triton's setup in moejax_kernels)
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # isort: skip

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "ops"
OPS = {"kda": kda, "gdn": gated_delta}
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")


def results(op, implementation, inputs, segments, cotangents, scale=None):
    """Outputs, final state, and the gradients of all inputs."""

    def forward(*inputs):
        return OPS[op](*inputs[:5], segments=segments, initial_state_BHCM=inputs[5], scale=scale, implementation=implementation)

    @jax.jit
    def run(inputs, cotangents):
        out, pull = jax.vjp(forward, *inputs)
        return (*out, *pull(cotangents))

    return [np.asarray(x) for x in jax.tree.leaves(run(tuple(inputs), cotangents))]


def cotangents_like(inputs, seed=9):
    random = np.random.default_rng(seed)
    B, L, H, M = inputs[2].shape
    return tuple(jnp.asarray(random.standard_normal(shape), "float32") for shape in ((B, L, H, M), (B, H, inputs[0].shape[-1], M)))


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def agree_with_the_definition(op, inputs, segments):
    everything = inputs, segments, cotangents_like(inputs)
    ours, theirs = (results(op, name, *everything) for name in ("triton_gpu", "reference"))
    assert len(ours) == len(theirs) == 2 + sum(x is not None for x in inputs)
    for got, want in zip(ours, theirs, strict=True):
        assert np.isfinite(got).all()
        assert rms(got - want) <= 3e-6 * rms(want) + 1e-12


def widened(array, name, width):
    """Zeros for the channels that the golden values lack."""
    dims = {"q": (3,), "k": (3,), "v": (3,), "g": (3,), "initial_state": (2, 3), "cotangent": (3,), "state_cotangent": (2, 3)}.get(name, ())
    return np.pad(array, [(0, width - size if dim in dims else 0) for dim, size in enumerate(array.shape)])


LIMITS = {
    "float32": {"o": 1e-5, "final_state": 1e-5} | {f"d_{name}": 1e-4 for name in INPUTS},
    "bfloat16": {"o": 0.005, "final_state": 0.005, "d_q": 0.008, "d_k": 0.008, "d_v": 0.008, "d_g": 0.02, "d_beta": 0.02}
    | {"d_initial_state": 0.005},
}


@pytest.fixture
def bfloat16_as_on_a_gpu(monkeypatch):
    """Triton's interpreter keeps bfloat16 as its 16 bits, which it multiplies as they are in a dot, and cuts off what it rounds."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def value(x):
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def nearest(self, x, dtype):
        if x.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            return TensorHandle(np.asarray(x.data).astype(jnp.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(self, x, dtype)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda self, a, b, *more: dot(self, value(a), value(b), *more))
    for name in ("cast_impl", "create_fp_trunc"):
        monkeypatch.setattr(InterpreterBuilder, name, nearest)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("decay", ["mild", "strong"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("bfloat16_as_on_a_gpu")
def test_values_and_gradients_are_the_golden_ones(op, decay, dtype):
    """The first row; channels filled up to 64 with zeros. q, k, v and outputs in `dtype`."""
    golden = {name: x[:1] if x.ndim else x for name, x in np.load(GOLDEN / f"delta_{op}_{decay}.npz").items()}
    of_dtype = ("q", "k", "v", "cotangent")
    inputs, cotangents = (
        [jnp.asarray(widened(golden[name], name, 64), dtype if name in of_dtype else "float32") for name in names]
        for names in (INPUTS, ("cotangent", "state_cotangent"))
    )
    segments = Segments.build(golden["segment_ids"].astype(np.int32))
    got = results(op, "triton_gpu", inputs, segments, tuple(cotangents), scale=float(golden["scale"]))
    for name, array in zip(("o", "final_state", *(f"d_{name}" for name in INPUTS)), got, strict=True):
        want = golden[name]
        assert rms(array[tuple(slice(size) for size in want.shape)].astype(np.float64) - want) <= LIMITS[dtype][name] * rms(want), name


@pytest.mark.parametrize(
    "case",
    [
        DeltaCase("borders_everywhere", 1, (-2, 1, 15, 47, -5, 63, -4), 1, 2, 64, 64),
        DeltaCase("strong", 1, (65, 5), 1, 1, 64, 64, strong=True),
        DeltaCase("wide", 1, (-1, 4), 1, 1, 96, 192),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", OPS)
def test_documents_may_lie_anywhere(op, case):
    agree_with_the_definition(op, case.arrays(jnp.float32, seed=0, decay_per_channel=op == "kda"), case.segments())


@pytest.mark.parametrize("initial", [True, False], ids=["state", "no_state"])
@pytest.mark.parametrize(
    "case",
    [
        DeltaCase("deep_and_another", 2, (70, 5, 64, -3, 30, 9), 1, 2, 64, 64, parents=(-1, 0, 1, -1, 0, -1)),
        DeltaCase("between_padding", 1, (-2, 3, 130, 1, 20, -66), 1, 1, 64, 64, parents=(-1, -1, 1, 1, 3, -1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", OPS)
def test_a_segment_goes_on_from_its_parents_end(op, case, initial):
    """The second row of two ends after its third segment, so that chunks and slots are left over."""
    segments = case.segments()
    if case.rows == 2:
        ids_BL, tree = np.array(segments.ids_BL), {child: parent for child, parent in enumerate(case.parents) if parent >= 0}
        ids_BL[1] = np.where(ids_BL[1] < 3, ids_BL[1], -1)
        segments = Segments.build(ids_BL, [tree, {child: parent for child, parent in tree.items() if child < 3}])
    inputs = case.arrays(jnp.float32, seed=4, decay_per_channel=op == "kda")
    agree_with_the_definition(op, inputs if initial else (*inputs[:5], None), segments)


@pytest.mark.parametrize("summary", [kda_shard_summary, gated_delta_shard_summary])
def test_what_a_shard_hands_on_is_that_of_the_definition(summary):
    case = DeltaCase("shard", 2, (40, -2, 30), 1, 2, 64, 64)
    inputs = case.arrays(jnp.float32, seed=5, decay_per_channel=summary is kda_shard_summary)[1:5]
    one_document = Segments.build(np.stack([np.asarray(case.segments().ids_BL)[0], np.zeros(72, np.int32)]))

    def run(implementation):
        out, pull = jax.vjp(lambda *inputs: summary(*inputs, segments=one_document, implementation=implementation), *inputs)
        return *out, *pull(tuple(jnp.sin(7 * jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in out))

    for got, want in zip(run("triton_gpu"), run("reference"), strict=True):
        assert rms(np.asarray(got) - np.asarray(want)) <= 3e-6 * rms(want)


@pytest.mark.parametrize("op", OPS)
def test_no_segments_and_no_initial_state(op):
    case = DeltaCase("plain", 2, None, 1, 1, 64, 64, length=67)
    inputs = case.arrays(jnp.float32, seed=1, decay_per_channel=op == "kda")
    agree_with_the_definition(op, (*inputs[:5], None), None)


@pytest.mark.parametrize(
    "g",
    [np.array([-1e5]), np.array([-5.0]), np.where(np.arange(70) % 30 == 2, -2000.0, -0.01), np.where(np.arange(70) % 3 == 2, -60.0, -0.1)],
    ids=["minus_1e5", "minus_5", "rare_walls", "many_walls"],
)
@pytest.mark.parametrize("op", OPS)
def test_any_decay_is_exact_to_float32(op, g):
    """A decay of hundreds of nats must cost no digits of the mild ones after it."""
    inputs = list(DeltaCase("walls", 1, (70,), 1, 1, 64, 64).arrays(jnp.float32, seed=0, decay_per_channel=op == "kda"))
    shaped = jnp.asarray(g, jnp.float32).reshape(1, -1, *(1,) * (inputs[3].ndim - 2))
    inputs[3] = jnp.broadcast_to(shaped, inputs[3].shape)
    agree_with_the_definition(op, inputs, Segments.whole(1, 70))


@pytest.mark.parametrize("op", OPS)
def test_a_changed_document_changes_nothing_in_the_others(op):
    """Exactly, outputs and gradients, though its cotangents change too."""
    case = DeltaCase("packed", 1, (30, 50, -3, 20), 1, 1, 64, 64)
    inside_L = np.asarray(case.segments().ids_BL)[0] == 1
    run = functools.partial(results, op, "triton_gpu", segments=case.segments())
    inputs, other = (case.arrays(jnp.float32, seed=seed, decay_per_channel=op == "kda") for seed in (2, 3))
    cotangents, other_cotangents = cotangents_like(inputs), cotangents_like(inputs, seed=10)

    def swap(array, new):
        return jnp.where(inside_L.reshape(1, -1, *(1,) * (array.ndim - 2)), new, array)

    altered = [*(swap(x, y) for x, y in zip(inputs[:5], other[:5], strict=True)), inputs[5]]
    before = run(inputs=inputs, cotangents=cotangents)
    after = run(inputs=altered, cotangents=(swap(cotangents[0], other_cotangents[0]), cotangents[1]))
    for at, (one, two) in enumerate(zip(before, after, strict=True)):
        if at in (1, 7):  # the states belong to the first and to the last document
            np.testing.assert_array_equal(one, two)
        else:
            np.testing.assert_array_equal(one[:, ~inside_L], two[:, ~inside_L])
            assert np.any(one[:, inside_L] != two[:, inside_L])
            assert not one[:, 80:83].any()
