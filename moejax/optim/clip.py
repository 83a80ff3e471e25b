"""The global norm of the gradients, and clipping by it. On sharded arrays under jit the norm is that of the whole arrays."""

import functools
import operator

import jax
import jax.numpy as jnp

from moejax.optim.rounding import rounded


def global_norm(grads, *, trainable=None):
    """Root of the sum of all squares, summed in float32 (float64 if a gradient is).

    Args:
      grads: tree of float arrays.
      trainable: tree of bool like `grads`; False leaves a gradient out, as a frozen parameter's must be. None: all count.
    """
    leaves = jax.tree.leaves(grads)
    counted = [True] * len(leaves) if trainable is None else jax.tree.leaves(trainable)
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))))
        for leaf, count in zip(leaves, counted, strict=True)
        if count
    ]
    return jnp.sqrt(functools.reduce(operator.add, squares, jnp.zeros(())))


def clip(grads, norm, max_norm: float):
    """Gradients, or some of them, scaled so that the global norm of all, `norm` before, is at most `max_norm`. 0: no clipping.

    Up to `max_norm`, 0 included, they stay bit for bit. One non-finite gradient makes the norm, and then all, non-finite: look at the norm
    before updating.
    """
    if max_norm == 0:
        return grads
    scale = max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda leaf: rounded(leaf * scale.astype(leaf.dtype)), grads)
