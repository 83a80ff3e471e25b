"""The update rounds each product and each sum once, as float32 arithmetic is defined, in whatever program it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from moejax.config.training import OptimConfig
from moejax.optim.adam import scale_by_adam
from moejax.optim.build import build
from moejax.optim.clip import clip
from moejax.optim.rounding import rounded
from moejax.optim.schedule import learning_rate

SHAPES = [(6,), (2, 3), (1, 1), (33, 7), (4, 64, 48)]
"""With and without a remainder behind whole vectors."""


def fully(function):
    """Compiled as outside the tests, where products and sums do become one operation."""
    return jax.jit(function, compiler_options=tiny.FULLY_OPTIMISED)


def draw(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_all_values_stay_but_infinity():
    values = jnp.array([0.0, -0.0, 1.5, -3e38, 3e38, -jnp.inf, jnp.nan, jnp.inf])
    np.testing.assert_array_equal(rounded(values), [*values[:-1], np.finfo(np.float32).max])
    assert np.signbit(rounded(values)[1])
    assert rounded(jnp.ones(1, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_rounded_before_the_sum(shape):
    a, b, c, d = (draw(shape, seed) for seed in range(4))
    got = fully(lambda a, b, c, d: rounded(a * b) + rounded(c * d))(a, b, c, d)
    np.testing.assert_array_equal(got, a * b + c * d)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adam_is_numpys_float32(shape):
    """All but the inverse of the scalars, which is taken from the state's count as the optimizer does."""
    beta1, beta2, eps = 0.9, 0.95, 1e-8
    optimizer = scale_by_adam(beta1, beta2, eps)
    update, state = fully(optimizer.update), optimizer.init({"w": jnp.zeros(shape)})
    mu, nu = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for seed in range(4):
        grad = draw(shape, seed)
        got, state = update({"w": grad}, state)
        mu = np.float32(beta1) * mu + np.float32(1 - beta1) * grad
        nu = np.float32(beta2) * nu + np.float32(1 - beta2) * (grad * grad)
        of_mean, of_square = fully(lambda n: (1 / (1 - beta1**n), 1 / (1 - beta2**n)))(jnp.int32(seed + 1))
        np.testing.assert_array_equal(state.mu["w"], mu)
        np.testing.assert_array_equal(state.nu["w"], nu)
        np.testing.assert_array_equal(got["w"], mu * np.asarray(of_mean) / (np.sqrt(nu * np.asarray(of_square)) + np.float32(eps)))


def test_clipping_decay_and_the_weights_move_are_numpys_float32():
    grad, weight, norm = draw((33, 7), 0), draw((33, 7), 1), jnp.float32(3)
    config = OptimConfig(kind="sgd", learning_rate=0.1, weight_decay=0.1, warmup_steps=0)
    optimizer = build(config, steps=10, params_like={"embed": {"weight_VD": weight}})

    @fully
    def step(weight, grad):
        params, state = {"embed": {"weight_VD": weight}}, optimizer.init({"embed": {"weight_VD": weight}})
        updates, _ = optimizer.update(clip({"embed": {"weight_VD": grad}}, norm, 1.0), state, params)
        return optax.apply_updates(params, updates)["embed"]["weight_VD"]

    clipped = grad * (1 / np.float32(3))
    scale = np.asarray(jnp.astype(-config.learning_rate * learning_rate(config, 10)(jnp.int32(0)), jnp.float32))
    want = weight + scale * (clipped + np.float32(config.weight_decay) * weight)
    np.testing.assert_array_equal(step(weight, grad), want)
