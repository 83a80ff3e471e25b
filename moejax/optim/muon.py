"""Muon's step: momentum made orthogonal by Newton-Schulz, matrix by matrix."""

import math

import jax
import jax.numpy as jnp
import optax

from moejax.optim.groups import matrix_shape, path_of
from moejax.optim.rounding import rounded

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


def scale_by_muon() -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised, times sqrt(max(1, columns / rows)); rows are a matrix's inputs.

    Each expert and each stacked layer is a matrix of its own. optax.contrib.scale_by_muon gives the same numbers, but merges the
    stacking dims into one, which cannot keep the sharding of experts; here they stay apart.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks" (KellerJordan/Muon), scale included.
    """

    def update(updates, state, params=None):
        add = lambda grad, trace: grad + rounded(MOMENTUM * trace)  # optax.trace leaves it to the compiler how often this rounds
        trace = jax.tree.map(add, updates, state.trace)
        ahead = jax.tree.map(add, updates, trace)
        return jax.tree_util.tree_map_with_path(lambda keys, leaf: _step(leaf, path_of(keys)), ahead), optax.TraceState(trace)

    return optax.GradientTransformation(optax.trace(MOMENTUM).init, update)


def orthogonalise(x_NM, *, eps: float = 1e-8):
    """Moves all singular values of each matrix [..., N, M] near 1 (0.7 to 1.2); a zero matrix stays zero. Computes in x's dtype."""
    if x_NM.shape[-2] > x_NM.shape[-1]:
        return jnp.swapaxes(orthogonalise(jnp.swapaxes(x_NM, -2, -1), eps=eps), -2, -1)
    a, b, c = COEFFICIENTS
    x_NM = jax.lax.optimization_barrier(x_NM)  # a sum's order depends on what is computed on the way into it
    norm_11 = jnp.sqrt(rounded(x_NM * x_NM).sum((-2, -1), keepdims=True))
    x_NM = x_NM * (1 / (norm_11 + eps))  # as in adam.py: no division by a broadcast

    def iterate(_, x_NM):
        gram_NN = x_NM @ jnp.swapaxes(x_NM, -2, -1)
        return rounded(a * x_NM) + (rounded(b * gram_NN) + (c * gram_NN) @ gram_NN) @ x_NM

    return jax.lax.fori_loop(0, NUM_ITERATIONS, iterate, x_NM)


def _step(update, path: str):
    stack, row_dims, column_dims = matrix_shape(path, update.shape)
    rows, columns = math.prod(row_dims), math.prod(column_dims)
    matrices = update.reshape(*stack, rows, columns)
    # layer by layer: the temporaries of one layer, and the same products, bit for bit, whether a layer comes alone or in a stack
    moved = jax.lax.map(orthogonalise, matrices) if path.startswith("unit/") else orthogonalise(matrices)
    return rounded(moved * math.sqrt(max(1, columns / rows))).reshape(update.shape)
