"""sparse_attention's Triton kernels in Triton's interpreter: values and gradients of the definition on awkward cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.segments import Segments
from moejax_kernels.sparse_attention import sparse_attention
from moejax_kernels.sparse_attention.triton_backward import cast_both
from moejax_kernels.triton_launch import launch

FORWARD, BACKWARD = 1e-5, 1e-4
"""RMS of the error over RMS of the value: float32 sums in another order, and exp2 for exp; gradients sum over queries too."""
LEAST = 0.1
"""RMS that errors are measured by at least: a query with one key has a gradient of 0, the difference of numbers around 1."""


def run(arrays, ids, segments, implementation, *, value_dim=None, scale=0.2):
    call = functools.partial(
        sparse_attention, ids_BLK=ids, segments=segments, scale=scale, value_dim=value_dim, implementation=implementation
    )
    o, transpose = jax.vjp(call, arrays["q"], arrays["k"], None if value_dim else arrays["v"])
    return o, *jax.tree.leaves(transpose(arrays["cotangent"][..., : o.shape[-1]]))


def draw(seed, *, rows, length, heads, key_heads, width, value_width):
    random = np.random.default_rng(seed)
    sizes = {"q": (heads, width), "k": (key_heads, width), "v": (key_heads, value_width), "cotangent": (heads, value_width)}
    return {name: jnp.asarray(random.standard_normal((rows, length, *size)), jnp.float32) for name, size in sizes.items()}


def choose(seed, segments, topk, *, rows, length):
    """Ids of visible keys in no order, fewer where there are fewer, -1 last; a third of the queries also name keys they may not see."""
    random = np.random.default_rng(seed)
    every = Segments.whole(rows, length) if segments is None else segments
    visible = np.asarray(every.visible(np.arange(length), np.arange(length)))
    ids = np.full((rows, length, topk), -1, np.int32)
    for row, at in np.ndindex(rows, length):
        keys = random.permutation(np.flatnonzero(visible[row, at] | (at % 3 == 0)))[:topk]
        ids[row, at, : keys.size] = keys
    return jnp.asarray(ids)


def close(ours, theirs):
    for number, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.sqrt(np.mean((got - want) ** 2)) <= (BACKWARD if number else FORWARD) * max(np.sqrt(np.mean(want**2)), LEAST)


PACKED = np.repeat([0, 1, -1, 2], (1, 4, 1, 3))[None]
CASES = {
    "one_query": dict(ids=np.zeros((2, 1), int), topk=3, heads=2, key_heads=1, width=64, value_width=64),
    "no_segments": dict(ids=None, topk=5, heads=4, key_heads=2, width=64, value_width=96),
    "borders_padding_few_keys": dict(ids=np.repeat(PACKED[:, 3:], 2, 0), topk=20, heads=6, key_heads=3, width=96, value_width=64),
    "topk_over_length": dict(ids=PACKED, topk=17, heads=2, key_heads=1, width=128, value_width=128),
    "more_heads_than_a_tile": dict(ids=PACKED, topk=7, heads=34, key_heads=2, width=64, value_width=64),
    "wide": dict(ids=PACKED, topk=9, heads=3, key_heads=3, width=192, value_width=128),
    "latent_192": dict(ids=PACKED, topk=9, heads=4, key_heads=1, width=192, value_width=192, value_dim=192),
    "latent_576_of_512": dict(ids=PACKED[:, 3:7], topk=9, heads=17, key_heads=1, width=576, value_width=512, value_dim=512),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_the_definition(name):
    case = dict(CASES[name])
    ids, topk, value_dim = case.pop("ids"), case.pop("topk"), case.pop("value_dim", None)
    rows, length = (2, 5) if ids is None else ids.shape
    segments = None if ids is None else Segments.build(ids)
    arrays = draw(0, rows=rows, length=length, **case)
    chosen = choose(1, segments, topk, rows=rows, length=length)
    got, want = (run(arrays, chosen, segments, name, value_dim=value_dim) for name in ("triton_gpu", "reference"))
    close(got, want)


def test_a_tree_sees_its_ancestors():
    segments = Segments.build(np.repeat([0, 1, 2], (2, 3, 2))[None], parent=[{1: 0, 2: 0}])
    arrays = draw(2, rows=1, length=7, heads=2, key_heads=1, width=64, value_width=64)
    chosen = choose(3, segments, 4, rows=1, length=7)
    close(*(run(arrays, chosen, segments, name) for name in ("triton_gpu", "reference")))


def test_another_document_has_exactly_no_influence():
    """Not even NaN: what is not visible is not read."""
    segments = Segments.build(PACKED)
    arrays = draw(4, rows=1, length=9, heads=2, key_heads=1, width=64, value_width=64)
    chosen = choose(5, segments, 4, rows=1, length=9)
    spoiled = {name: array.at[:, :6].set(jnp.nan) for name, array in arrays.items() if name != "cotangent"}
    before, after = (run(inputs | {"cotangent": arrays["cotangent"]}, chosen, segments, "triton_gpu") for inputs in (arrays, spoiled))
    for ours, theirs in zip(before, after, strict=True):
        np.testing.assert_array_equal(ours[:, 6:], theirs[:, 6:])
    assert not np.asarray(before[0])[:, 5:6].any()


def test_two_arrays_of_unlike_sizes_are_cast_in_one_launch():
    one, two = (jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32) for shape in ((5, 1000), (70,)))
    out_type = [jax.ShapeDtypeStruct(one.shape, jnp.float16), jax.ShapeDtypeStruct(two.shape, jnp.float16)]
    got = launch(cast_both, one, two, one.size, two.size, out_type=out_type, grid=2, SIZE=4096)
    for ours, array in zip(got, (one, two), strict=True):
        np.testing.assert_array_equal(ours, array.astype(jnp.float16))
