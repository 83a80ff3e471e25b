"""permute and unpermute in Triton's interpreter: run by test_permute_triton.py in a process of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.permute import RowPlan, cases, permute, unpermute

CASES = (*cases.SMALL, cases.PermuteCase("wider_than_a_tile", 6, 3, 21, 1100), cases.PermuteCase("many_choices", 3, 22, 60, 17))
TOLERANCE = 2e-6  # of the peak: rounding of float32 sums of up to 1100 terms


def value_and_gradients(implementation, x_TD, y_RD, probs_TK, plan):
    x_RD, transpose = jax.vjp(lambda x: permute(x, plan, implementation=implementation), x_TD)
    y_TD, transpose_back = jax.vjp(lambda y, probs: unpermute(y, plan, probs, implementation=implementation), y_RD, probs_TK)
    return x_RD, *transpose(y_RD), y_TD, *transpose_back(x_TD)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_match_the_definition(case):
    plan, arrays = case.plan(seed=0), case.arrays("float32", seed=1)
    got, want = (value_and_gradients(implementation, *arrays, plan) for implementation in ("triton_gpu", "reference"))
    np.testing.assert_array_equal(got[0], want[0])  # a copy
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


def test_what_a_dropped_choice_or_an_empty_row_holds_does_not_matter():
    plan = RowPlan(jnp.array([1, -1, 0], jnp.int32), jnp.array([[2, -1], [0, -1]], jnp.int32))
    y_RD = jnp.array([[1.0], [jnp.nan], [3.0]])
    probs_TK = jnp.array([[2.0, jnp.nan], [0.5, jnp.nan]])
    y_TD, transpose = jax.vjp(jax.jit(lambda y, probs: unpermute(y, plan, probs, implementation="triton_gpu")), y_RD, probs_TK)
    dy_RD, dprobs_TK = transpose(jnp.ones_like(y_TD))
    np.testing.assert_array_equal(y_TD, [[6.0], [0.5]])
    np.testing.assert_array_equal(dy_RD, [[0.5], [0.0], [2.0]])
    np.testing.assert_array_equal(dprobs_TK, [[3.0, 0.0], [1.0, 0.0]])


def test_all_rows_empty_and_all_choices_dropped_give_zeros():
    plan = RowPlan(jnp.full(11, -1, jnp.int32), jnp.full((5, 2), -1, jnp.int32))
    arrays = cases.PermuteCase("nothing", 5, 2, 11, 6).arrays("float32", seed=2)
    for array in value_and_gradients("triton_gpu", *arrays, plan):
        assert not np.asarray(array).any()


def test_no_tokens_and_no_rows_are_no_error():
    for tokens, rows in ((0, 3), (3, 0), (0, 0)):
        plan = RowPlan(jnp.full(rows, -1, jnp.int32), jnp.full((tokens, 2), -1, jnp.int32))
        arrays = cases.PermuteCase("nothing", tokens, 2, rows, 4).arrays("float32", seed=3)
        for array, shape in zip(
            value_and_gradients("triton_gpu", *arrays, plan), ((rows, 4), (tokens, 4), (tokens, 4), (rows, 4), (tokens, 2)), strict=True
        ):
            assert array.shape == shape
            assert not np.asarray(array).any()
