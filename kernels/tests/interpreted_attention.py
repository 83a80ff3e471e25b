"""The Triton kernels of attention in Triton's interpreter, against the definition. Run by test_attention_triton.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.attention import attention, cases, triton_gpu
from moejax_kernels.implementation import UnsupportedError


@functools.partial(jax.jit, static_argnames=("window", "implementation"))
def run(q, k, v, sinks, cotangent, segments, *, window, implementation):
    """Output and gradients of q, k, v and sinks."""
    call = functools.partial(attention, scale=0.2, segments=segments, window=window, implementation=implementation)
    o, transpose = jax.vjp(lambda q, k, v, sinks: call(q, k, v, sinks_H=sinks), q, k, v, sinks)
    return o, transpose(cotangent)


def assert_close(got, want):
    for number, (ours, theirs) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        limit = 1e-4 if number else 1e-5
        # 1e-6: a few roundings of products of size 1, where a gradient is a difference that ought to be 0 (a query that sees one key)
        assert np.sqrt(np.mean((ours - theirs) ** 2)) <= limit * np.sqrt(np.mean(theirs**2)) + 1e-6, number


@pytest.mark.parametrize("case", cases.TILED, ids=str)
def test_values_and_gradients_match_the_definition(case):
    arrays, segments = case.arrays(jnp.float32, seed=0), case.segments()
    got, want = (run(*arrays, segments, window=case.window, implementation=name) for name in ("triton_gpu", "reference"))
    assert_close(got, want)
    assert not np.asarray(got[0])[segments.ids_BL < 0].any()


@pytest.mark.parametrize("window", [None, 9])
def test_without_segments_and_with_heads_split_among_programs(window, monkeypatch):
    monkeypatch.setattr(triton_gpu, "ENOUGH_PROGRAMS", 6)
    assert triton_gpu.num_splits(2, 4) == 4
    arrays = cases.AttentionCase("whole", 1, (40,), 4, 1, 64, 64, has_sinks=True).arrays(jnp.float32, seed=1)
    jax.clear_caches()  # the number of programs is read when the gradients are traced
    got, want = (run(*arrays, None, window=window, implementation=name) for name in ("triton_gpu", "reference"))
    assert_close(got, want)


@pytest.mark.parametrize(
    ("documents", "window", "num_before"), [((70, 3), None, 33), ((1, 40, -3, 40), None, 64), ((90,), 37, 41), (None, None, 50)]
)
def test_keys_may_begin_before_the_queries(documents, window, num_before):
    case = cases.AttentionCase("before", 2, documents or (90,), 2, 1, 64, 96, window=window, has_sinks=window is not None)
    q, k, v, sinks, cotangent = case.arrays(jnp.float32, seed=5)
    arrays, segments = (q[:, num_before:], k, v, sinks, cotangent[:, num_before:]), case.segments() if documents else None
    got, want = (run(*arrays, segments, window=window, implementation=name) for name in ("triton_gpu", "reference"))
    assert_close(got, want)


def test_a_tree_may_begin_before_the_queries():
    case = cases.AttentionCase("before", 1, (40, 20, -2, 33), 2, 1, 64, 64, 50, parents=(-1, 0, -1, 0))
    q, k, v, sinks, cotangent = case.arrays(jnp.float32, seed=5)
    arrays = q[:, 47:], k, v, sinks, cotangent[:, 47:]
    got, want = (run(*arrays, case.segments(), window=case.window, implementation=name) for name in ("triton_gpu", "reference"))
    assert_close(got, want)


def test_a_sibling_has_exactly_no_influence():
    """Two documents go on from one prefix: the second one sees nothing of the first one's own part."""
    case = cases.AttentionCase("siblings", 1, (37, 30, 30), 2, 1, 64, 64, parents=(-1, 0, 0))
    arrays, other, segments = case.arrays(jnp.float32, seed=3), case.arrays(jnp.float32, seed=4), case.segments()
    mix = lambda new, old: jnp.concatenate([old[:, :37], 50 * new[:, 37:67], old[:, 67:]], axis=1)
    changed = *map(mix, other[:3], arrays[:3]), arrays[3], mix(other[4], arrays[4])
    call = functools.partial(run, segments=segments, window=None, implementation="triton_gpu")
    (o, gradients), (o_changed, gradients_changed) = call(*arrays), call(*changed)
    for before, after in ((o, o_changed), *zip(gradients[:3], gradients_changed[:3], strict=True)):
        np.testing.assert_array_equal(np.asarray(before)[:, 67:], np.asarray(after)[:, 67:])
        assert (np.asarray(before)[:, 37:67] != np.asarray(after)[:, 37:67]).any()


def test_large_scores_neither_overflow_nor_vanish():
    q, k, v, sinks, cotangent = cases.AttentionCase("large", 1, (40,), 1, 1, 64, 64).arrays(jnp.float32, seed=2)
    got, want = (run(100 * q, k, v, sinks, cotangent, None, window=None, implementation=name) for name in ("triton_gpu", "reference"))
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(got))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # scores up to 500, rounded to 3e-5 each, so weights to about 1e-4
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3 * np.abs(theirs).max())


def test_another_document_has_exactly_no_influence():
    """The first document fills a tile and a part of the next, where the second one begins."""
    case = cases.AttentionCase("two", 1, (37, 30), 2, 1, 64, 64, has_sinks=True)
    arrays, other, segments = case.arrays(jnp.float32, seed=3), case.arrays(jnp.float32, seed=4), case.segments()
    mix = lambda new, old: jnp.concatenate([50 * new[:, :37], old[:, 37:]], axis=1)
    changed = *map(mix, other[:3], arrays[:3]), arrays[3], mix(other[4], arrays[4])
    call = functools.partial(run, segments=segments, window=None, implementation="triton_gpu")
    (o, gradients), (o_changed, gradients_changed) = call(*arrays), call(*changed)
    for before, after in ((o, o_changed), *zip(gradients[:3], gradients_changed[:3], strict=True)):
        np.testing.assert_array_equal(np.asarray(before)[:, 37:], np.asarray(after)[:, 37:])
        assert (np.asarray(before)[:, :37] != np.asarray(after)[:, :37]).any()


def test_what_the_kernels_cannot_take_is_named():
    call = functools.partial(attention, implementation="triton_gpu")
    q, narrow = jnp.zeros((1, 4, 2, 64)), jnp.zeros((1, 4, 2, 40))
    with pytest.raises(UnsupportedError, match=r"triton_gpu needs key and value widths of 64, .* got C=40 and M=64 \(q is \(1, 4, 2, 40\)"):
        call(narrow, narrow, q, scale=1.0)
    with pytest.raises(UnsupportedError, match="all bfloat16 or all float32, got float32, float32, bfloat16"):
        call(q, q, q.astype(jnp.bfloat16), scale=1.0)
    with pytest.raises(UnsupportedError, match=r"needs a positive Python number as scale, got -1\.0"):
        call(q, q, q, scale=-1.0)
