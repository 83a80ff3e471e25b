"""Adam's step, written so that it has the same bits in every program that it is part of."""

import jax
import jax.numpy as jnp
import optax

from moejax.optim.rounding import rounded


def scale_by_adam(beta1: float, beta2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, its state included, with the two bias corrections as products with a scalar's inverse.

    Given `mean / scalar / (root + eps)`, XLA divides once, twice, or multiplies by an inverse, depending on how many weights share the
    scalar; so a weight updated alone would differ by a rounding from one updated among others.

    Source: Kingma and Ba 2015, "Adam", algorithm 1.
    """

    def init(params):
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=zeros(), nu=zeros())

    def update(updates, state, params=None):
        count = optax.safe_increment(state.count)
        mean = lambda old, new, beta: rounded(beta * old) + rounded((1 - beta) * new)
        mu = jax.tree.map(lambda grad, mu: mean(mu, grad, beta1), updates, state.mu)
        nu = jax.tree.map(lambda grad, nu: mean(nu, rounded(grad * grad), beta2), updates, state.nu)

        def step(mu, nu):
            of_mean, of_square = (jnp.astype(1 / (1 - beta**count), mu.dtype) for beta in (beta1, beta2))
            return mu * of_mean / (jnp.sqrt(nu * of_square) + eps)

        return jax.tree.map(step, mu, nu), optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)
