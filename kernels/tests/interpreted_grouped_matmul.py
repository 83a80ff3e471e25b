"""grouped_matmul in Triton's interpreter: run by test_grouped_matmul_triton.py in a process of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.grouped_matmul import cases, grouped_matmul

TOLERANCE = 2e-6  # of the peak: rounding of float32 sums of few hundred terms
CASES = (
    *cases.SMALL,
    cases.GroupedCase("wider_than_tiles", 150, 70, 90, (3, 0, 64, 65, 1)),
    cases.GroupedCase("deep", 9, 160, 3, (2, 5)),
    cases.GroupedCase("tiles_fit_exactly", 192, 64, 64, (64, 0, 128)),
)


@functools.partial(jax.jit, static_argnames="implementation")
def run(x_RD, w_EDF, group_sizes_E, dy_RF, *, implementation):
    y_RF, transpose = jax.vjp(lambda x, w: grouped_matmul(x, w, group_sizes_E, implementation=implementation), x_RD, w_EDF)
    return y_RF, *transpose(dy_RF)


def check(case, *, dtype=jnp.float32, sizes_dtype=jnp.int32):
    x_RD, w_EDF, group_sizes_E, dy_RF = case.arrays(dtype, seed=0)
    group_sizes_E = group_sizes_E.astype(sizes_dtype)
    got, want = (run(x_RD, w_EDF, group_sizes_E, dy_RF, implementation=name) for name in ("triton_gpu", "reference"))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max(initial=0))
    return got


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_match_the_definition(case):
    check(case)


def test_896_groups_match_the_definition():
    y_RF, dx_RD, dw_EDF = check(cases.GroupedCase("many", 260, 4, 6, cases.skewed(230, 896)))
    assert not np.asarray(y_RF)[230:].any()
    assert not np.asarray(dx_RD)[230:].any()
    assert not np.asarray(dw_EDF)[np.asarray(cases.skewed(230, 896)) == 0].any()


def test_every_border_of_two_groups_matches_the_definition():
    """One of the borders between 60 and 68 lies on a tile's."""
    for size in range(60, 69):
        check(cases.GroupedCase("border", 140, 4, 6, (size, 70)))


def test_sizes_may_be_of_another_integer_type():
    check(cases.SMALL[1], sizes_dtype=jnp.int16)


def test_nan_in_padding_rows_reaches_nothing():
    case = cases.SMALL[4]
    x_RD, w_EDF, group_sizes_E, dy_RF = case.arrays("float32", seed=3)
    padding_R1 = jnp.arange(case.rows)[:, None] >= sum(case.sizes)
    poisoned = (jnp.where(padding_R1, jnp.nan, array) for array in (x_RD, dy_RF))
    x_poisoned, dy_poisoned = poisoned
    got = run(x_poisoned, w_EDF, group_sizes_E, dy_poisoned, implementation="triton_gpu")
    want = run(x_RD, w_EDF, group_sizes_E, dy_RF, implementation="triton_gpu")
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.asarray(got[2])[case.sizes.index(0)].any()


def test_a_group_sees_no_other_groups_rows():
    """Another group's rows changed at random: exactly the same results here."""
    case = cases.GroupedCase("two", 20, 5, 7, (9, 11))
    x_RD, w_EDF, group_sizes_E, dy_RF = case.arrays("float32", seed=4)
    other_x, _, _, other_dy = case.arrays("float32", seed=5)
    first_R1 = jnp.arange(20)[:, None] < 9
    changed = jnp.where(first_R1, x_RD, other_x), w_EDF, group_sizes_E, jnp.where(first_R1, dy_RF, other_dy)
    got, want = (run(*arrays, implementation="triton_gpu") for arrays in (changed, (x_RD, w_EDF, group_sizes_E, dy_RF)))
    np.testing.assert_array_equal(got[0][:9], want[0][:9])
    np.testing.assert_array_equal(got[1][:9], want[1][:9])
    np.testing.assert_array_equal(got[2][0], want[2][0])


def test_no_rows_and_no_groups_are_no_error():
    for rows, groups in ((0, 2), (3, 0)):
        y_RF, dx_RD, dw_EDF = check(cases.GroupedCase("nothing", rows, 4, 6, (0,) * groups))
        assert (y_RF.shape, dx_RD.shape, dw_EDF.shape) == ((rows, 6), (rows, 4), (groups, 4, 6))
