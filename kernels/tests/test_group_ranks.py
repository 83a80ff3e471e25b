"""group_ranks: against a stable sort of numpy."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels import UnsupportedError, group_ranks
from moejax_kernels.group_ranks import cases

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
@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_ranks_and_counts_match_a_stable_sort(case, implementation):
    ids_R = case.ids(seed=0)
    rank_R, counts_E = run(ids_R, num_groups=case.groups, implementation=implementation)
    want_rank, want_counts = by_sorting(np.asarray(ids_R), case.groups)
    np.testing.assert_array_equal(rank_R, want_rank)
    np.testing.assert_array_equal(counts_E, want_counts)
    assert rank_R.dtype == counts_E.dtype == np.int32


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(ids=st.lists(st.integers(-1, 4), min_size=300, max_size=300))
def test_any_ids_match_a_stable_sort(ids):
    ids_R = np.asarray(ids, np.int32)
    for ours, theirs in zip(run(ids_R, num_groups=4, implementation="xla"), by_sorting(ids_R, 4), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_bad_inputs_say_what_would_work():
    with pytest.raises(ValueError, match="ids_R must hold integers, got float32"):
        group_ranks(np.zeros(3, np.float32), 2)
    with pytest.raises(ValueError, match=r"num_groups=0 must be at least 1"):
        group_ranks(np.zeros(3, np.int32), 0)
    with pytest.raises(ValueError, match=r"R=2147483648 is beyond 2147483647: positions are int32"):
        jax.eval_shape(lambda ids_R: group_ranks(ids_R, 2), jax.ShapeDtypeStruct((2**31,), jnp.int32))


@pytest.mark.parametrize(("dtype", "reason"), [("int32", "needs "), ("int16", r"takes int32, got ids_R in int16\. Cast it, or ")])
def test_the_name_of_the_gpu_kernel_says_what_would_work(dtype, reason):
    ids_R = np.asarray([1, 0, 1], dtype)
    with pytest.raises(UnsupportedError, match=rf"group_ranks: triton_gpu {reason}.*implementation='xla'"):
        group_ranks(ids_R, 2, implementation="triton_gpu")
    assert group_ranks(ids_R, 2)[0].tolist() == [0, 0, 1]  # by default what runs here does
