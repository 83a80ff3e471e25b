"""attention: against plain loops, across borders, in blocks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from moejax_kernels.attention import attention, cases, xla
from moejax_kernels.implementation import UnsupportedError
from moejax_kernels.segments import Segments

BOTH = pytest.mark.parametrize("implementation", ["reference", "xla"])
TOLERANCE = {"float64": 1e-12, "float32": 2e-5}  # of the peak: a few roundings in another order


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(xla, "TILE_NUMBERS", 1)
    monkeypatch.setattr(xla, "MIN_QUERIES", 16)
    monkeypatch.setattr(xla, "TILE_KEYS", 24)


def loops(q, k, v, sinks, ids, *, scale, window):
    """The definition, one query and head at a time."""
    num_rows, length, num_heads, _ = q.shape
    o = np.zeros((num_rows, length, num_heads, v.shape[3]))
    for b, t, h in np.ndindex(num_rows, length, num_heads):
        g = h // (num_heads // k.shape[2])
        seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t] >= 0 and (window is None or t - s < window)]
        if seen:
            weights = np.exp([scale * q[b, t, h] @ k[b, s, g] for s in seen])
            o[b, t, h] = weights @ v[b, seen, g] / (weights.sum() + (0 if sinks is None else np.exp(sinks[h])))
    return o


def run(case, implementation, arrays, segments):
    """Output and gradients of q, k, v and sinks."""
    return value_and_gradients(*arrays, segments, case.window, implementation)


@functools.partial(jax.jit, static_argnums=(6, 7))
def value_and_gradients(q, k, v, sinks, cotangent, segments, window, implementation):
    call = functools.partial(attention, scale=0.4, segments=segments, window=window, implementation=implementation)
    o, transpose = jax.vjp(lambda q, k, v, sinks: call(q, k, v, sinks_H=sinks), q, k, v, sinks)
    return o, transpose(cotangent)


@BOTH
@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_values_match_plain_loops(case, implementation):
    with jax.enable_x64(True):
        arrays, segments = case.arrays("float64", seed=0), case.segments()
        o, _ = run(case, implementation, arrays, segments)
        want = loops(*map(lambda x: None if x is None else np.asarray(x), arrays[:4]), segments.ids_BL, scale=0.4, window=case.window)
        np.testing.assert_allclose(o, want, rtol=0, atol=1e-13)
        assert not np.asarray(o)[segments.ids_BL < 0].any()


@pytest.mark.parametrize(("case", "dtype"), [*((case, "float64") for case in cases.SMALL), (cases.SMALL[2], "float32")], ids=str)
def test_gradients_of_blocks_match_the_definition(case, dtype):
    with jax.enable_x64(True):
        arrays, segments = case.arrays(dtype, seed=1), case.segments()
        want, got = run(case, "reference", arrays, segments), run(case, "xla", arrays, segments)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.isfinite(ours).all()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(theirs).max()))


def test_the_definitions_gradients_match_differences():
    with jax.enable_x64(True):
        case = cases.SMALL[2]
        q, k, v, sinks, cotangent = case.arrays("float64", seed=2)
        loss = lambda *inputs: jnp.sum(
            cotangent
            * attention(*inputs[:3], scale=0.4, segments=case.segments(), window=case.window, sinks_H=inputs[3], implementation="reference")
        )
        check_grads(jax.jit(loss), (q, k, v, sinks), order=1, modes=["rev"], rtol=1e-6)


@BOTH
@pytest.mark.parametrize("case", cases.SMALL[1:3], ids=str)
def test_another_document_has_exactly_no_influence(case, implementation):
    """Document 2 looks at nothing of document 1, and gradients through document 2's outputs leave document 1's inputs alone."""
    q, k, v, sinks, cotangent = case.arrays("float32", seed=3)
    other = case.arrays("float32", seed=4)
    second = case.documents[0]
    segments = case.segments()
    mix = lambda new, old: jnp.asarray(np.concatenate([50 * np.asarray(new)[:, :second], np.asarray(old)[:, second:]], axis=1))
    cotangent = mix(jnp.zeros_like(cotangent), cotangent)
    o, (dq, dk, dv, _) = run(case, implementation, (q, k, v, sinks, cotangent), segments)
    changed = *map(mix, other[:3], (q, k, v)), sinks, cotangent
    o_changed, (dq_changed, dk_changed, dv_changed, _) = run(case, implementation, changed, segments)
    for before, after in ((o, o_changed), (dq, dq_changed), (dk, dk_changed), (dv, dv_changed)):
        np.testing.assert_array_equal(np.asarray(before)[:, second:], np.asarray(after)[:, second:])
    for gradient in (dq_changed, dk_changed, dv_changed):
        assert not np.asarray(gradient)[:, :second].any()


@BOTH
def test_packed_documents_equal_documents_alone(implementation):
    case = cases.SMALL[2]
    q, k, v, sinks, _ = map(np.asarray, case.arrays("float32", seed=5))
    call = jax.jit(functools.partial(attention, scale=0.4, window=case.window, sinks_H=sinks, implementation=implementation))
    packed = call(q, k, v, segments=case.segments())
    at = 0
    for length in case.documents:
        if length > 0:
            alone = call(*(array[:, at : at + length] for array in (q, k, v)))
            np.testing.assert_allclose(np.asarray(packed)[:, at : at + length], alone, rtol=0, atol=1e-6)
        at += abs(length)


@BOTH
@pytest.mark.parametrize("num_before", [1, 19, 37])
@pytest.mark.parametrize("case", cases.SMALL[1:3], ids=str)
def test_keys_may_begin_before_the_queries(case, num_before, implementation):
    """Queries are the last positions of a row: values and gradients are those of the whole row, where nobody asks for the first ones."""
    with jax.enable_x64(True):
        q, k, v, sinks, cotangent = case.arrays("float64", seed=8)
        asked = cotangent.at[:, :num_before].set(0)
        want_o, want = run(case, "reference", (q, k, v, sinks, asked), case.segments())
        arrays = q[:, num_before:], k, v, sinks, cotangent[:, num_before:]
        got_o, got = run(case, implementation, arrays, case.segments())
        pairs = (got_o, want_o[:, num_before:]), (got[0], want[0][:, num_before:]), *zip(got[1:], want[1:], strict=True)
        for ours, theirs in pairs:
            if theirs is not None:
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE["float64"] * max(1.0, np.abs(theirs).max()))


@BOTH
@pytest.mark.parametrize("window", [None, 6])
def test_a_tree_equals_its_documents_written_out(implementation, window):
    """Prefix 0 of 11 tokens; 1 (9 tokens) and 2 (7) continue it, 3 (6) continues 1. A window counts along the document."""
    lengths, parents, paths = (11, 9, 7, 6), {1: 0, 2: 0, 3: 1}, {1: (0, 1), 2: (0, 2), 3: (0, 1, 3)}
    ids = np.repeat(np.arange(4), lengths)[None]
    tree = Segments.build(ids, parent=[parents])
    random = np.random.default_rng(6)
    q, k, v = random.standard_normal((3, 1, ids.size, 2, 4)).astype(np.float32)
    call = jax.jit(functools.partial(attention, scale=0.5, window=window, implementation=implementation))
    packed = call(q, k, v, segments=tree)
    for leaf, path in paths.items():
        at = np.concatenate([np.flatnonzero(ids[0] == segment) for segment in path])
        written_out = call(q[:, at], k[:, at], v[:, at])
        np.testing.assert_allclose(np.asarray(packed)[:, ids[0] == leaf], np.asarray(written_out)[:, -lengths[leaf] :], rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 100])
def test_bfloat16_stays_near_float32(window):
    case = cases.AttentionCase("bfloat16", 1, (40, 60), 4, 2, 16, 16, window=window)
    exact = tuple(x if x is None else x.astype(jnp.float32) for x in case.arrays(jnp.bfloat16, seed=7))
    rounded = tuple(x if x is None else x.astype(jnp.bfloat16) for x in exact)
    want, want_grads = run(case, "xla", exact, case.segments())
    got, got_grads = run(case, "xla", rounded, case.segments())
    relative = lambda ours, theirs: float(jnp.sqrt(jnp.mean((ours - theirs) ** 2) / jnp.mean(theirs**2)))
    assert got.dtype == jnp.bfloat16
    assert relative(got, want) < 0.005
    assert max(map(relative, got_grads[:3], want_grads[:3])) < 0.008


def test_long_rows_never_hold_all_scores(monkeypatch):
    monkeypatch.undo()
    shape = jax.ShapeDtypeStruct((1, 4096, 2, 16), jnp.float32)
    loss = lambda q, k, v: jnp.sum(attention(q, k, v, scale=1.0, implementation="xla"))
    memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 2 * 4096**2 / 4


def test_bad_inputs_say_what_would_work():
    q, k = jnp.zeros((2, 5, 4, 8)), jnp.zeros((2, 5, 3, 8))
    with pytest.raises(ValueError, match=r"H=4 query heads must be a multiple of G=3"):
        attention(q, k, k, scale=1.0)
    with pytest.raises(ValueError, match="S=4 keys for L=5 queries"):
        attention(q, jnp.zeros((2, 4, 2, 8)), jnp.zeros((2, 4, 2, 8)), scale=1.0)
    with pytest.raises(ValueError, match=r"v_BSGM is \(2, 6, 2, 8\), so S=6, but k_BSGC \(2, 5, 2, 8\) has S=5"):
        attention(q, jnp.zeros((2, 5, 2, 8)), jnp.zeros((2, 6, 2, 8)), scale=1.0)
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        attention(q, q, q, scale=1.0, window=0)
    with pytest.raises(ValueError, match="Build them from ids of that shape"):
        attention(q, q, q, scale=1.0, segments=Segments.whole(2, 6))
    with pytest.raises(ValueError, match=r"q_BLHC is \(2, 0, 4, 8\), so L=0; at least 1 is needed"):
        attention(q[:, :0], q, q, scale=1.0)
    with pytest.raises(ValueError, match="q_BLHC must hold floats, got int32"):
        attention(q.astype(jnp.int32), q, q, scale=1.0)
    with pytest.raises(UnsupportedError, match="available are triton_gpu, xla, reference"):
        attention(q, q, q, scale=1.0, implementation="mosaic_gpu")
    with pytest.raises(UnsupportedError, match="triton_gpu needs"):  # a package or a GPU that is not here
        attention(q, q, q, scale=1.0, implementation="triton_gpu")
