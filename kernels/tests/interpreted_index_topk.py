"""index_topk's Triton kernel in Triton's interpreter: the definition's ids, in its order, on awkward cases."""

import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.index_topk import index_topk
from moejax_kernels.segments import Segments

BORDERS = np.repeat([0, 1, -1, 2], (1, 36, 1, 4))[None]


def whole_numbers(seed, *, length, keys, heads, width, most=2):
    """Small whole numbers: sums are exact in any order, and scores tie all the time, at -0 and 0 too."""
    random = np.random.default_rng(seed)
    sizes = (1, length, heads, width), (1, keys, width), (1, length, heads)
    return [jnp.asarray(random.integers(-1, most, size) * (random.random(size) < 0.2), jnp.float32) for size in sizes]


def both(arrays, **options):
    return (np.asarray(index_topk(*arrays, **options, implementation=name)) for name in ("triton_gpu", "reference"))


@pytest.mark.parametrize("topk", [1, 5])
def test_of_equal_scores_the_lower_position_wins_though_the_list_is_cut(topk):
    arrays = whole_numbers(0, length=40, keys=40, heads=2, width=64)
    got, want = both(arrays, topk=topk)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("heads", "width", "topk"), [(3, 96, 20), (20, 64, 5)])
def test_borders_padding_and_fewer_visible_keys_than_asked_for(heads, width, topk):
    arrays = whole_numbers(1, length=42, keys=42, heads=heads, width=width, most=4)
    got, want = both(arrays, topk=topk, segments=Segments.build(BORDERS))
    np.testing.assert_array_equal(got, want)
    assert (got[0, 37:38] == -1).all()


def test_one_query_and_two_sequences():
    arrays = [
        jnp.concatenate(pair) for pair in zip(*(whole_numbers(seed, length=1, keys=1, heads=2, width=64) for seed in (2, 3)), strict=True)
    ]
    got, want = both(arrays, topk=3)
    np.testing.assert_array_equal(got, want)
    assert (got == [[[0, -1, -1]]]).all()


def test_pools_become_visible_with_their_last_token():
    ends = [*range(4, 37, 4), 39, 41, -1]
    arrays = whole_numbers(4, length=42, keys=len(ends), heads=2, width=64, most=4)
    got, want = both(arrays, topk=4, segments=Segments.build(BORDERS), key_end_BS=jnp.asarray([ends], jnp.int32))
    np.testing.assert_array_equal(got, want)


def test_a_tree_chooses_among_the_keys_of_its_ancestors():
    segments = Segments.build(np.repeat([0, 1, 2], (7, 6, 5))[None], parent=[{1: 0, 2: 0}])
    arrays = whole_numbers(5, length=18, keys=18, heads=2, width=64, most=4)
    got, want = both(arrays, topk=6, segments=segments)
    np.testing.assert_array_equal(got, want)


def test_random_scores_and_another_documents_nan():
    random = np.random.default_rng(6)
    arrays = [jnp.asarray(random.standard_normal(size), jnp.float32) for size in ((1, 42, 4, 64), (1, 42, 64), (1, 42, 4))]
    segments = Segments.build(BORDERS)
    got, want = both(arrays, topk=10, segments=segments)
    np.testing.assert_array_equal(got, want)
    spoiled = index_topk(*(array.at[:, :37].set(jnp.nan) for array in arrays), topk=10, segments=segments, implementation="triton_gpu")
    np.testing.assert_array_equal(np.asarray(spoiled)[:, 37:], want[:, 37:])
