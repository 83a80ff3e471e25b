"""What is cheaper to redo than to store is not stored: between the passes lie inputs alone."""

import jax
import jax.numpy as jnp
import numpy as np
from moejax_kernels import causal_conv, grouped_mlp

from moejax.model.linear_attention import gated_norm
from moejax.model.norms import rms_norm

ROWS, WIDTH, HIDDEN, EXPERTS = 64, 32, 16, 2


def draw(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


def kept(function, *inputs) -> int:
    """Numbers that the backward pass is handed, each array once."""
    pull = jax.vjp(function, *inputs)[1]
    return sum({id(array): array.size for array in jax.tree.leaves(pull) if jnp.issubdtype(array.dtype, jnp.floating)}.values())


def test_the_short_convolution_keeps_its_inputs():
    x_BLD, weight_D4 = draw(1, ROWS, WIDTH), draw(WIDTH, 4)
    assert kept(lambda x, w: causal_conv(x, w, implementation="xla")[0], x_BLD, weight_D4) <= x_BLD.size + weight_D4.size


def test_norms_keep_their_inputs():
    x_BLHM, gate_BLHM, scale_M = draw(1, ROWS, 2, WIDTH), draw(1, ROWS, 2, WIDTH), draw(WIDTH)
    assert kept(lambda x, scale: rms_norm(x, scale, eps=1e-6), x_BLHM, scale_M) <= x_BLHM.size + scale_M.size
    gated = lambda x, gate, scale: gated_norm(x, gate, scale, activation=jax.nn.silu, eps=1e-6)
    assert kept(gated, x_BLHM, gate_BLHM, scale_M) <= 2 * x_BLHM.size + scale_M.size


def test_experts_keep_their_rows_and_the_two_products_but_not_the_activation():
    wide, sizes_e = (EXPERTS, WIDTH, HIDDEN), jnp.full(EXPERTS, ROWS // EXPERTS)
    run = lambda x_WD, *weights: grouped_mlp(x_WD, *weights, sizes_e, implementation="xla")
    inputs = draw(ROWS, WIDTH), draw(*wide), draw(*wide), draw(EXPERTS, HIDDEN, WIDTH)
    assert kept(run, *inputs) <= ROWS * (WIDTH + 2 * HIDDEN) + 3 * EXPERTS * WIDTH * HIDDEN
