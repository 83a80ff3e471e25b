"""gated_activation: against plain formulas, gradients, and what is saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from moejax_kernels.gated_activation import cases, gated_activation

BOTH = pytest.mark.parametrize("implementation", ["reference", "xla"])
KINDS = pytest.mark.parametrize("options", cases.SMALL, ids=str)


def formula(gate, up, kind, limit=None, beta=None, linear_beta=None):
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    if kind == "situ":
        return beta * np.tanh(gate / beta) * sigmoid(gate) * (linear_beta * np.tanh(up / linear_beta) if linear_beta else up)
    if kind == "swiglu_clamped":
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(gate) * up


@BOTH
@KINDS
def test_values_and_gradients_match_the_formula(options, implementation):
    gate, up, cotangent = 2 * np.random.default_rng(0).standard_normal((3, 5, 7))
    with jax.enable_x64(True):
        call = jax.jit(functools.partial(gated_activation, **options, implementation=implementation))
        got, transpose = jax.vjp(call, jnp.asarray(gate), jnp.asarray(up))
        dgate, dup = transpose(jnp.asarray(cotangent))
    np.testing.assert_allclose(got, formula(gate, up, **options), rtol=1e-13)
    step = 1e-6
    for gradient, plus, minus in ((dgate, (gate + step, up), (gate - step, up)), (dup, (gate, up + step), (gate, up - step))):
        difference = cotangent * (formula(*plus, **options) - formula(*minus, **options)) / (2 * step)
        np.testing.assert_allclose(gradient, difference, rtol=1e-6, atol=1e-8)


@BOTH
def test_bfloat16_is_rounded_once(implementation):
    gate, up = (jnp.asarray(x, jnp.bfloat16) for x in np.random.default_rng(1).standard_normal((2, 5, 7)))
    exact = formula(np.asarray(gate, np.float64), np.asarray(up, np.float64), "swiglu")
    got = gated_activation(gate, up, implementation=implementation)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8)


def test_only_the_inputs_are_saved(capsys):
    call = functools.partial(gated_activation, kind="situ", beta=4.0, linear_beta=25.0, implementation="xla")
    print_saved_residuals(call, jnp.zeros((5, 7)), jnp.zeros((5, 7)))
    saved = capsys.readouterr().out.strip().splitlines()
    assert len(saved) == 2
    assert all("argument" in line for line in saved)


def test_bad_inputs_say_what_would_work():
    gate = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match="kind='relu' is unknown; known are swiglu, swiglu_clamped, situ"):
        gated_activation(gate, gate, kind="relu")
    with pytest.raises(ValueError, match="kind='situ' needs beta > 0, got beta=None"):
        gated_activation(gate, gate, kind="situ")
    with pytest.raises(ValueError, match=r"gate_RF is float32 \(2, 3\), up_RF is float32 \(3, 2\)"):
        gated_activation(gate, gate.T)
    with pytest.raises(ValueError, match="gate_RF and up_RF must hold floats, got int32"):
        gated_activation(gate.astype(jnp.int32), gate.astype(jnp.int32))
