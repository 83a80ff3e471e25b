"""Sinkhorn's iterations: a loop that does what its definition says, and costs no more to compile for being long."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax.model.residual import sinkhorn


def by_definition(matrix_NN, *, iters, eps):
    for step in range(2 * iters - 1):
        matrix_NN = matrix_NN / (matrix_NN.sum(-1 if step % 2 else -2, keepdims=True) + eps)
    return matrix_NN


def test_values_and_gradients_are_those_of_the_iterations_one_by_one():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        matrix_BNN, cotangent_BNN = jnp.array(rng.random((3, 4, 4)) ** 4), jnp.array(rng.normal(size=(3, 4, 4)))
        for iters in (1, 2, 20):
            (ours, ours_vjp), (want, want_vjp) = (
                jax.vjp(functools.partial(definition, iters=iters, eps=1e-6), matrix_BNN) for definition in (sinkhorn, by_definition)
            )
            # the same divisions; XLA may add four numbers up in another order
            np.testing.assert_allclose(ours, want, rtol=1e-14)
            np.testing.assert_allclose(ours_vjp(cotangent_BNN)[0], want_vjp(cotangent_BNN)[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(np.asarray(ours).sum(-1), 1, atol=1e-2)  # columns come last; the fourth powers make a hard case
    np.testing.assert_allclose(np.asarray(ours).sum(-2), 1, atol=1e-5)


def test_the_program_is_as_long_for_20_iterations_as_for_3():
    def size(iters):
        total = lambda matrix_NN: sinkhorn(matrix_NN, iters=iters, eps=1e-6)[0].sum()
        return len(jax.jit(jax.grad(total)).lower(jax.ShapeDtypeStruct((4, 4), jnp.float32)).as_text().splitlines())

    assert size(20) == size(3)
