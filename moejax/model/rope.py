"""Rotary position embeddings."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config.mixers import RopeConfig
from moejax.parallel.projection import float_inside


def frequencies(config: RopeConfig, dim: int) -> np.ndarray:
    """Angle per position of each channel pair, float32 [dim / 2]; YaRN-scaled if asked (Peng et al. 2023, arXiv 2309.00071)."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    plain = (np.float32(1) / np.power(np.float32(config.theta), exponent)).astype(np.float32)
    if config.yarn_factor == 1:
        return plain
    length, theta = config.yarn_original_length, config.theta
    pair_of = lambda rotations: dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))
    low = max(math.floor(pair_of(config.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_of(config.yarn_beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)  # 0: keep, 1: interpolate
    return (plain / config.yarn_factor * ramp + plain * (1 - ramp)).astype(np.float32)


def yarn_correction(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1, or 1 without YaRN."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def attention_scale(config: RopeConfig, channels: int) -> float:
    """channels^-1/2, times the squared YaRN correction where the config has one (DeepSeek-V3)."""
    correction = yarn_correction(config.yarn_factor, config.yarn_mscale_all_dim) if config.yarn_mscale_all_dim else 1.0
    return channels**-0.5 * correction**2


def rotate(x_BLHC, positions_BL, config: RopeConfig, *, dim: int):
    """Rotates the first `dim` channels by their position; the rest pass. Angles and arithmetic in float32 (float64 for float64)."""
    if config.kind == "none" or dim == 0:
        return x_BLHC
    wide = float_inside(x_BLHC)
    angle_BL1P = positions_BL.astype(wide.dtype)[:, :, None, None] * frequencies(config, dim).astype(wide.dtype)
    factor = yarn_correction(config.yarn_factor, config.yarn_mscale)
    if config.yarn_mscale_all_dim:
        factor /= yarn_correction(config.yarn_factor, config.yarn_mscale_all_dim)
    # kept out of the fusions that read them, which would form them anew for queries, keys, each pass and each layer that is not stacked
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angle_BL1P) * factor, jnp.sin(angle_BL1P) * factor))
    turned, rest = wide[..., :dim], wide[..., dim:]
    if config.kind == "half":
        first, second = jnp.split(turned, 2, -1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(turned.shape)
    return jnp.concatenate([turned, rest], -1).astype(x_BLHC.dtype)
