"""group_ranks: against a stable sort of numpy."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from moejax_kernels import group_ranks

run = jax.jit(group_ranks, static_argnames=("num_groups", "implementation"))
BOTH = pytest.mark.parametrize("implementation", ["reference", "xla"])


def by_sorting(ids_R, num_groups):
    """Ranks from numpy's stable sort."""
    rank_R = np.full(ids_R.size, -1)
    for group in range(num_groups):
        rows = np.flatnonzero(ids_R == group)
        rank_R[rows] = np.arange(rows.size)
    real = ids_R[(ids_R >= 0) & (ids_R < num_groups)]
    return rank_R, np.bincount(real, minlength=num_groups)


@BOTH
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (128, 3), (129, 3), (1000, 7), (3000, 896)])
def test_ranks_and_counts_match_a_stable_sort(rows, groups, implementation):
    ids_R = np.random.default_rng(rows).integers(-1, groups + 1, rows).astype(np.int32)
    rank_R, counts_E = run(ids_R, num_groups=groups, implementation=implementation)
    want_rank, want_counts = by_sorting(ids_R, groups)
    np.testing.assert_array_equal(rank_R, want_rank)
    np.testing.assert_array_equal(counts_E, want_counts)
    assert rank_R.dtype == counts_E.dtype == np.int32


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(ids=st.lists(st.integers(-1, 4), min_size=300, max_size=300))
def test_any_ids_match_a_stable_sort(ids):
    ids_R = np.asarray(ids, np.int32)
    for ours, theirs in zip(run(ids_R, num_groups=4, implementation="xla"), by_sorting(ids_R, 4), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_one_group_takes_all_and_nobody_comes():
    rank_R, counts_E = run(np.full(500, 2, np.int32), num_groups=3)
    assert rank_R.tolist() == list(range(500)) and counts_E.tolist() == [0, 0, 500]
    rank_R, counts_E = run(np.full(500, -1, np.int32), num_groups=3)
    assert set(rank_R.tolist()) == {-1} and counts_E.tolist() == [0, 0, 0]


def test_bad_inputs_say_what_would_work():
    with pytest.raises(ValueError, match="ids_R must hold integers, got float32"):
        group_ranks(np.zeros(3, np.float32), 2)
