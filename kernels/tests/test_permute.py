"""permute and unpermute: against loops, their gradients against the definition's, empty rows and dropped choices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.permute import RowPlan, cases, permute, unpermute

BOTH = pytest.mark.parametrize("implementation", ["reference", "xla"])
CASES = pytest.mark.parametrize("case", cases.SMALL, ids=str)


@BOTH
@CASES
def test_values_match_loops(case, implementation):
    plan = case.plan(seed=0)
    x_TD, y_RD, probs_TK = map(np.asarray, case.arrays("float32", seed=1))
    got_RD = np.asarray(permute(x_TD, plan, implementation=implementation))
    for row, source in enumerate(np.asarray(plan.source_R)):
        np.testing.assert_array_equal(got_RD[row], x_TD[source] if source >= 0 else 0)
    got_TD = np.asarray(unpermute(y_RD, plan, probs_TK, implementation=implementation))
    slot_TK = np.asarray(plan.slot_TK)
    for token in range(case.tokens):
        want_D = sum((probs_TK[token, k] * y_RD[slot] for k, slot in enumerate(slot_TK[token]) if slot >= 0), np.zeros(case.width))
        np.testing.assert_allclose(got_TD[token], want_D, rtol=0, atol=1e-6)


@BOTH
@pytest.mark.parametrize(("tokens", "rows"), [(0, 3), (3, 0), (0, 0)])
def test_no_tokens_and_no_rows_are_no_error(tokens, rows, implementation):
    plan = RowPlan(jnp.full(rows, -1, jnp.int32), jnp.full((tokens, 2), -1, jnp.int32))
    x_TD, y_RD, probs_TK = cases.PermuteCase("nothing", tokens, 2, rows, 4).arrays("float32", seed=3)
    there, pull_there = jax.vjp(lambda x: permute(x, plan, implementation=implementation), x_TD)
    back, pull_back = jax.vjp(lambda y, probs: unpermute(y, plan, probs, implementation=implementation), y_RD, probs_TK)
    for array, like in zip((there, back, *pull_there(y_RD), *pull_back(x_TD)), (y_RD, x_TD, x_TD, y_RD, probs_TK), strict=True):
        assert array.shape == like.shape
        assert not np.asarray(array).any()


@CASES
def test_gradients_match_those_of_the_definition(case):
    with jax.enable_x64(True):
        plan = case.plan(seed=2)
        x_TD, y_RD, probs_TK = case.arrays("float64", seed=3)

        @functools.partial(jax.jit, static_argnums=0)
        def gradients(implementation, x_TD, y_RD, probs_TK):
            there = functools.partial(permute, plan=plan, implementation=implementation)
            back = functools.partial(unpermute, plan=plan, implementation=implementation)
            return jax.vjp(there, x_TD)[1](y_RD) + jax.vjp(lambda y, probs: back(y, probs_TK=probs), y_RD, probs_TK)[1](x_TD)

        for ours, theirs in zip(gradients("xla", x_TD, y_RD, probs_TK), gradients("reference", x_TD, y_RD, probs_TK), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-14)


@BOTH
def test_what_a_dropped_choice_or_an_empty_row_holds_does_not_matter(implementation):
    plan = RowPlan(jnp.array([1, -1, 0], jnp.int32), jnp.array([[2, -1], [0, -1]], jnp.int32))
    y_RD = jnp.array([[1.0], [jnp.nan], [3.0]])
    probs_TK = jnp.array([[2.0, jnp.nan], [0.5, jnp.nan]])
    y_TD, transpose = jax.vjp(jax.jit(lambda y, probs: unpermute(y, plan, probs, implementation=implementation)), y_RD, probs_TK)
    dy_RD, dprobs_TK = transpose(jnp.ones_like(y_TD))
    np.testing.assert_array_equal(y_TD, [[6.0], [0.5]])
    np.testing.assert_array_equal(dy_RD, [[0.5], [0.0], [2.0]])
    np.testing.assert_array_equal(dprobs_TK, [[3.0, 0.0], [1.0, 0.0]])


def test_no_pass_scatters_floats():
    """The transpose of a gather would be one; the plan knows the way back."""
    case = cases.SMALL[0]
    plan, (x_TD, y_RD, probs_TK) = case.plan(seed=4), case.arrays("float32", seed=5)
    loss = lambda x, y, probs: (
        jnp.sum(permute(x, plan, implementation="xla") * y),
        jnp.sum(unpermute(y, plan, probs, implementation="xla") * x),
    )
    text = jax.jit(jax.grad(lambda *arrays: sum(loss(*arrays)), argnums=(0, 1, 2))).lower(x_TD, y_RD, probs_TK).as_text()
    assert "gather" in text
    assert "scatter" not in text


def test_bfloat16_is_summed_in_float32():
    plan = RowPlan(jnp.arange(3, dtype=jnp.int32) * 0, jnp.arange(3, dtype=jnp.int32)[None])
    y_RD = jnp.array([[1.0], [2.0**-9], [2.0**-9]], jnp.bfloat16)  # in bfloat16 each small one would be lost
    y_TD = unpermute(y_RD, plan, jnp.ones((1, 3), jnp.float32), implementation="xla")
    assert y_TD.dtype == jnp.bfloat16
    assert float(y_TD[0, 0]) == float(jnp.asarray(1 + 2.0**-8, jnp.bfloat16))


def test_bad_inputs_say_what_would_work():
    plan = cases.SMALL[0].plan(seed=0)
    with pytest.raises(ValueError, match=r"slot_TK is \(7, 3\), so T=7, but x_TD \(6, 5\) has T=6"):
        permute(jnp.zeros((6, 5)), plan)
    with pytest.raises(ValueError, match=r"probs_TK is \(7, 2\), so K=2, but slot_TK \(7, 3\) has K=3"):
        unpermute(jnp.zeros((30, 5)), plan, jnp.zeros((7, 2)))
