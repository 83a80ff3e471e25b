"""sparse_attention: golden values and gradients, gathered and masked, wrong ids, borders."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels import query_blocks
from moejax_kernels.attention import attention
from moejax_kernels.attention import xla as attention_xla
from moejax_kernels.segments import Segments
from moejax_kernels.sparse_attention import cases, sparse_attention, xla

LIMITS = {"float32": {"o": 1e-5, "d_q": 1e-4, "d_k": 1e-4, "d_v": 1e-4}, "bfloat16": {"o": 0.005, "d_q": 0.008, "d_k": 0.008, "d_v": 0.008}}
"""Of the RMS error, in shares of the RMS: a few roundings (6e-8; 0.002 of inputs and results); some times that still passes."""
GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "ops"
VARIANTS = pytest.mark.parametrize("variant", ["reference", "masked", "gathered"])


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(query_blocks, "BLOCK_NUMBERS", 1)
    monkeypatch.setattr(query_blocks, "MIN_QUERIES", 50)
    monkeypatch.setattr(attention_xla, "TILE_NUMBERS", 1)
    monkeypatch.setattr(attention_xla, "MIN_QUERIES", 50)
    monkeypatch.setattr(attention_xla, "TILE_KEYS", 40)


@pytest.fixture
def implementation(variant, monkeypatch):
    """The two ways of "xla", whatever the sizes would choose."""
    monkeypatch.setattr(xla, "DENSE_KEYS", {"masked": 10**6, "gathered": 0}.get(variant, xla.DENSE_KEYS))
    return variant


@functools.partial(jax.jit, static_argnames=("variant", "scale", "value_dim"))
def run(q, k, v, ids, cotangent, segments, variant, *, scale=0.4, value_dim=None):
    """Output and gradients of q, k, v."""
    call = functools.partial(
        sparse_attention,
        ids_BLK=ids,
        segments=segments,
        scale=scale,
        value_dim=value_dim,
        implementation="reference" if variant == "reference" else "xla",
    )
    o, transpose = jax.vjp(call, q, k, v)
    return o, *transpose(cotangent)


def choose_at_random(case, *, seed, segments):
    """Ids of keys that each query sees, fewer where there are fewer, in no order, -1 last."""
    random = np.random.default_rng(seed)
    visible = np.asarray(segments.visible(np.arange(case.length), np.arange(case.length)))
    ids = np.full((case.rows, case.length, case.topk), -1, np.int32)
    for row, at in np.ndindex(case.rows, case.length):
        keys = random.permutation(np.flatnonzero(visible[row, at]))[: case.topk]
        ids[row, at, : keys.size] = keys
    return ids


def ids_of(selected_BLL, topk):
    order = np.argsort(~selected_BLL, axis=2, kind="stable")[:, :, :topk]
    return np.where(np.take_along_axis(selected_BLL, order, 2), order, -1).astype(np.int32)


@VARIANTS
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gqa", "mqa", "topk_over_length"])
def test_values_and_gradients_are_golden(name, dtype, implementation):
    golden = np.load(GOLDEN / f"sparse_{name}.npz")
    with jax.enable_x64(dtype == "float64"):
        arrays = [jnp.asarray(golden[key], dtype) for key in ("q", "k", "v")]
        segments = Segments.build(golden["segment_ids"].astype(np.int32))
        got = run(
            *arrays,
            ids_of(golden["selected"], int(golden["topk"])),
            jnp.asarray(golden["cotangent"], dtype),
            segments,
            implementation,
            scale=float(golden["scale"]),
        )
    for ours, key in zip(got, ("o", "d_q", "d_k", "d_v"), strict=True):
        difference, want = np.asarray(ours, np.float64) - golden[key], golden[key]
        if dtype == "float64":
            assert np.abs(difference).max() < 1e-10 * np.abs(want).max()
        else:
            assert np.sqrt(np.mean(difference**2)) < LIMITS[dtype][key] * np.sqrt(np.mean(want**2)), key


@pytest.mark.parametrize("variant", ["masked", "gathered"])
def test_values_from_the_keys_match_the_definition(implementation):
    case = cases.SMALL[0]
    with jax.enable_x64(True):
        arrays, segments = case.arrays("float64", seed=0), case.segments()
        ids = choose_at_random(case, seed=1, segments=segments)
        inputs = arrays["q"], arrays["k"], None, ids, arrays["cotangent"], segments
        want = run(*inputs, "reference", value_dim=case.value_dim)
        got = run(*inputs, implementation, value_dim=case.value_dim)
        explicit = run(arrays["q"], arrays["k"], arrays["k"][..., : case.value_dim], *inputs[3:], "reference")
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(want[0], explicit[0])
    np.testing.assert_allclose(want[2], np.asarray(explicit[2]) + np.pad(explicit[3], ((0, 0),) * 3 + ((0, 2),)), rtol=0, atol=1e-12)


@VARIANTS
def test_all_visible_keys_are_dense_attention(implementation):
    case = cases.SMALL[0]
    arrays, segments = case.arrays("float32", seed=2), case.segments()
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    ids = np.broadcast_to(np.arange(case.length, dtype=np.int32), (case.rows, case.length, case.length))
    dense = jax.jit(functools.partial(attention, scale=0.4, implementation="reference"))(q, k, v, segments=segments)
    got = run(q, k, v, ids, arrays["cotangent"], segments, implementation)[0]
    np.testing.assert_allclose(got, dense, rtol=0, atol=2e-6)


@VARIANTS
@pytest.mark.parametrize("has_segments", [True, False])
def test_an_id_that_may_not_be_seen_is_nothing(implementation, has_segments):
    """Ids of later tokens, of other documents and of padding are put beside the right ones."""
    case = cases.SMALL[0]
    arrays, segments = case.arrays("float32", seed=3), case.segments() if has_segments else None
    every = case.segments() if has_segments else Segments.whole(case.rows, case.length)
    right = choose_at_random(case, seed=4, segments=every)
    wrong = np.random.default_rng(5).integers(0, case.length, right.shape, np.int32)
    seen = np.asarray(every.visible(np.arange(case.length), np.arange(case.length)))
    wrong = np.where(np.take_along_axis(seen, wrong, 2), -1, wrong)
    inputs = arrays["q"], arrays["k"], arrays["v"]
    padded = np.concatenate([right, np.full_like(wrong, -1)], axis=2)
    clean = run(*inputs, padded, arrays["cotangent"], segments, implementation)
    leaky = run(*inputs, np.concatenate([right, wrong], axis=2), arrays["cotangent"], segments, implementation)
    for ours, theirs in zip(leaky, clean, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@VARIANTS
def test_another_document_has_exactly_no_influence(implementation):
    case = cases.SMALL[0]
    arrays, other = case.arrays("float32", seed=6), case.arrays("float32", seed=7)
    second = sum(map(abs, case.documents[:2]))
    segments = case.segments()
    ids, other_ids = (choose_at_random(case, seed=seed, segments=segments) for seed in (8, 9))
    names = ("q", "k", "v")
    mix = lambda new, old, factor: np.concatenate([factor * np.asarray(new)[:, :second], np.asarray(old)[:, second:]], axis=1)
    cotangent = mix(other["cotangent"], arrays["cotangent"], 0)
    before = run(*(arrays[name] for name in names), ids, cotangent, segments, implementation)
    after = run(*(mix(other[name], arrays[name], 50) for name in names), mix(other_ids, ids, 1), cotangent, segments, implementation)
    for ours, theirs in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(ours)[:, second:], np.asarray(theirs)[:, second:])
        assert not np.asarray(theirs)[:, :second].any() or theirs is after[0]


@VARIANTS
def test_a_tree_equals_its_documents_written_out(implementation):
    lengths, ids_L = (20, 15, 10), np.repeat([0, 1, 2], (20, 15, 10))
    tree = Segments.build(ids_L[None], parent=[{1: 0, 2: 0}])
    case = cases.SparseCase("tree", 1, (45,), 6, 2, 1, 4, 4, 1, 4)
    arrays = {name: np.asarray(array) for name, array in case.arrays("float32", seed=10).items()}
    ids = choose_at_random(case, seed=11, segments=tree)
    inputs = arrays["q"], arrays["k"], arrays["v"]
    packed = np.asarray(run(*inputs, ids, arrays["cotangent"], tree, implementation, scale=0.5)[0])
    for leaf in (1, 2):
        at = np.flatnonzero((ids_L == 0) | (ids_L == leaf))
        place = np.full(46, -1, np.int32)  # the last one is where -1 points
        place[at] = np.arange(at.size)
        alone = run(*(array[:, at] for array in inputs), place[ids[:, at]], arrays["cotangent"][:, at], None, "reference", scale=0.5)[0]
        np.testing.assert_allclose(packed[:, ids_L == leaf], np.asarray(alone)[:, -lengths[leaf] :], rtol=0, atol=1e-6)


def test_long_rows_take_a_tenth_of_dense_attentions_temporaries(monkeypatch):
    monkeypatch.undo()
    shape = jax.ShapeDtypeStruct
    q, kv, ids = shape((1, 4096, 4, 16), jnp.float32), shape((1, 4096, 1, 16), jnp.float32), shape((1, 4096, 64), jnp.int32)
    loss = lambda q, k, v, ids: jnp.sum(sparse_attention(q, k, v, ids, scale=1.0, implementation="xla"))
    memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, kv, kv, ids).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 4 * 4096**2 / 10


def test_bad_inputs_say_what_would_work():
    q, k, ids = jnp.zeros((1, 6, 2, 4)), jnp.zeros((1, 6, 1, 4)), jnp.zeros((1, 6, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"give either v_BLGM or value_dim .* got neither"):
        sparse_attention(q, k, None, ids, scale=1.0)
    with pytest.raises(ValueError, match="got v_BLGM and value_dim=3"):
        sparse_attention(q, k, k, ids, scale=1.0, value_dim=3)
    with pytest.raises(ValueError, match="value_dim=5 must lie between 1 and C=4"):
        sparse_attention(q, k, None, ids, scale=1.0, value_dim=5)
    with pytest.raises(ValueError, match="ids_BLK must hold integers, got float32"):
        sparse_attention(q, k, k, ids.astype(jnp.float32), scale=1.0)
