"""Norms, in float32 inside. Those without a mean save their inputs alone for the backward pass."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from moejax_kernels.varying import vary_alike

from moejax.config.model import ModelConfig
from moejax.model.weights import Maker
from moejax.parallel.projection import float_inside


def rms_norm(x, scale_C, *, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last dim; `scale_C` None leaves the scale out. float32 inside, rounded once."""
    return _scaled_by_length(1 / x.shape[-1], eps, *vary_alike(x, scale_C))


def l2_norm(x) -> jax.Array:
    """x / sqrt(sum x^2 + 1e-6): the epsilon is inside the root (fla, `l2norm`)."""
    return _scaled_by_length(1.0, 1e-6, x, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scaled_by_length(share: float, eps: float, x, scale_C) -> jax.Array:
    """x * scale / sqrt(share * sum x^2 + eps)."""
    unit, _ = _unit(share, eps, x)
    return (unit if scale_C is None else unit * scale_C.astype(unit.dtype)).astype(x.dtype)


def _unit(share, eps, x):
    wide = float_inside(x)
    rate = jax.lax.rsqrt(share * jnp.sum(jnp.square(wide), -1, keepdims=True) + eps)
    return wide * rate, rate


def _save(share, eps, x, scale_C):
    return _scaled_by_length(share, eps, x, scale_C), (x, scale_C)


def _grads(share, eps, saved, dy):
    x, scale_C = saved
    unit, rate = _unit(share, eps, x)
    dy = dy.astype(unit.dtype)
    dunit = dy if scale_C is None else dy * scale_C.astype(unit.dtype)
    dx = rate * (dunit - share * unit * jnp.sum(unit * dunit, -1, keepdims=True))
    dscale_C = None if scale_C is None else jnp.sum(dy * unit, tuple(range(x.ndim - 1))).astype(scale_C.dtype)
    return dx.astype(x.dtype), dscale_C


_scaled_by_length.defvjp(_save, _grads)


def layer_norm(x, scale_C, bias_C, *, eps: float):
    """Mean and variance normalised over the last dim, float32 inside."""
    wide = float_inside(x)
    wide = wide - jnp.mean(wide, -1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    return (wide * scale_C.astype(wide.dtype) + bias_C.astype(wide.dtype)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm with a learned scale; zero-centred if the model says so and `plain` does not."""

    def __init__(self, config: ModelConfig, width: int, *, rngs: nnx.Rngs, eps: float | None = None, plain: bool = False):
        self.centred = config.zero_centred_norm and not plain
        self.eps = config.norm_eps if eps is None else eps
        self.scale_D = Maker(config, rngs).constant(0.0 if self.centred else 1.0, (None,), width)

    def __call__(self, x):
        scale_D = self.scale_D[...]
        return rms_norm(x, 1 + scale_D if self.centred else scale_D, eps=self.eps)
