"""The Triton kernels of gated_activation in Triton's interpreter, against the definition. Run by test_gated_activation_triton.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.gated_activation import cases, gated_activation
from moejax_kernels.implementation import UnsupportedError

KINDS = pytest.mark.parametrize("options", cases.SMALL, ids=str)


def run(gate, up, cotangent, options, implementation):
    """Output, gradient of gate and of up."""
    call = jax.jit(functools.partial(gated_activation, **options, implementation=implementation))
    out, transpose = jax.vjp(call, gate, up)
    return out, *transpose(cotangent)


@KINDS
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (2, 1024), (1025,)], ids=str)
def test_values_and_gradients_match_the_definition(options, shape):
    """Sizes at the tile, one beyond it and far below; near 0 and far from it, where tanh and sigmoid lose digits or saturate."""
    for spread in (0.01, 2.0, 20.0):
        arrays = jnp.asarray(spread * np.random.default_rng(0).standard_normal((3, *shape)), jnp.float32)
        got, want = (run(*arrays, options, name) for name in ("triton_gpu", "reference"))
        for name, ours, theirs in zip(("out", "dgate", "dup"), got, want, strict=True):
            ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
            limit = 1e-5 if name == "out" else 1e-4
            assert np.sqrt(np.mean((ours - theirs) ** 2)) <= limit * np.sqrt(np.mean(theirs**2)), (name, spread)


def test_at_the_limit_half_of_the_gradient_passes_as_in_the_definition():
    gate, up = jnp.meshgrid(jnp.array([-1.0, 0.5, 1.0, 2.0]), jnp.array([-2.0, -1.0, 0.5, 1.0, 2.0]))
    options = {"kind": "swiglu_clamped", "limit": 1.0}
    got, want = (run(gate, up, jnp.ones_like(gate), options, name) for name in ("triton_gpu", "reference"))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)  # a few roundings of float32


def test_no_rows_launch_nothing():
    empty = jnp.zeros((0, 8))
    for array in run(empty, empty, empty, {"kind": "swiglu"}, "triton_gpu"):
        assert array.shape == (0, 8)


def test_another_dtype_says_what_would_work():
    half = jnp.zeros((2, 3), jnp.float16)
    with pytest.raises(UnsupportedError, match="gated_activation: triton_gpu needs bfloat16 or float32 inputs, got float16"):
        gated_activation(half, half, implementation="triton_gpu")
