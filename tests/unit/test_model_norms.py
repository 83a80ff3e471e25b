"""The gradients of the norms, written by hand, against autodiff of their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.model.norms import l2_norm, rms_norm

ROWS, WIDTH, EPS = 8, 7, 1e-3
ROUNDING = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 2**-8}
"""A few roundings inside in float64 and float32; one in bfloat16, of the result."""


def rms_by_definition(x, scale_C):
    normed = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + EPS)
    return normed if scale_C is None else normed * scale_C


def l2_by_definition(x, scale_C):
    return x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6)


def draw(dtype, scale_dtype):
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((ROWS, 3, WIDTH)) for _ in range(2))
    x[0, 0] = 0  # padding
    scale_C = None if scale_dtype is None else jnp.asarray(rng.standard_normal(WIDTH), scale_dtype)
    return jnp.asarray(x, dtype), scale_C, jnp.asarray(dy, dtype)


@pytest.mark.parametrize("scale_dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_values_and_gradients_equal_autodiff_of_the_definition(norm, dtype, scale_dtype):
    ours = (lambda x, scale_C: rms_norm(x, scale_C, eps=EPS)) if norm == "rms" else (lambda x, scale_C: l2_norm(x))
    definition = rms_by_definition if norm == "rms" else l2_by_definition
    with jax.enable_x64(True):
        x, scale_C, dy = draw(dtype, scale_dtype)
        y, pull = jax.vjp(ours, x, scale_C)
        wide = jax.tree.map(lambda array: array.astype("float64"), (x, scale_C))
        want, pull_wide = jax.vjp(definition, *wide)
        got, expected = (y, *pull(dy)), (want, *pull_wide(dy.astype("float64")))
        for ours_, theirs, like in zip(jax.tree.leaves(got), jax.tree.leaves(expected), jax.tree.leaves((x, x, scale_C)), strict=True):
            assert ours_.dtype == like.dtype
            limit = max(ROUNDING[dtype], ROUNDING[str(like.dtype)]) * np.abs(theirs).max()
            np.testing.assert_allclose(np.asarray(ours_, np.float64), theirs, rtol=0, atol=limit)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_scale_shared_by_devices_sums_their_gradients(check_vma):
    x, scale_C, dy = draw("float32", "float32")
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, scale_C):
        run = lambda x, scale_C: rms_norm(x, scale_C, eps=EPS)
        island = jax.shard_map(run, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"), check_vma=check_vma)
        return jnp.sum(island(x, scale_C) * dy)

    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, scale_C)
    want = jax.grad(lambda x, scale_C: jnp.sum(rms_by_definition(x, scale_C) * dy), argnums=(0, 1))(x, scale_C)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())  # float32 sums of 24 terms
