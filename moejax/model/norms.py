"""Norms, in float32 inside."""

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config.model import ModelConfig
from moejax.model.weights import Maker
from moejax.parallel.projection import float_inside


def rms_norm(x, scale_C, *, eps: float):
    """x / rms(x) * scale over the last dim; `scale_C` None leaves the scale out. float32 inside, rounded once."""
    wide = float_inside(x)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    return (wide if scale_C is None else wide * scale_C.astype(wide.dtype)).astype(x.dtype)


def layer_norm(x, scale_C, bias_C, *, eps: float):
    """Mean and variance normalised over the last dim, float32 inside."""
    wide = float_inside(x)
    wide = wide - jnp.mean(wide, -1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    return (wide * scale_C.astype(wide.dtype) + bias_C.astype(wide.dtype)).astype(x.dtype)


def l2_norm(x):
    """x / sqrt(sum x^2 + 1e-6): the epsilon is inside the root (fla, `l2norm`)."""
    wide = float_inside(x)
    return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), -1, keepdims=True) + 1e-6)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm with a learned scale; zero-centred if the model says so and `plain` does not."""

    def __init__(self, config: ModelConfig, width: int, *, rngs: nnx.Rngs, eps: float | None = None, plain: bool = False):
        self.centred = config.zero_centred_norm and not plain
        self.eps = config.norm_eps if eps is None else eps
        self.scale_D = Maker(config, rngs).constant(0.0 if self.centred else 1.0, (None,), width)

    def __call__(self, x):
        scale_D = self.scale_D[...]
        return rms_norm(x, 1 + scale_D if self.centred else scale_D, eps=self.eps)
