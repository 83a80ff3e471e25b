"""Kimi K3's mixture-of-experts layer, compiled for 64 H200s that are not there."""

import functools

import jax
from jax.sharding import Mesh

from moejax.config.mesh import MeshConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.parallel.mesh import make_mesh
from moejax.parallel.xla_flags import options_for
from moejax.plan.layer import lower_moe_layer
from moejax.plan.targets import TARGETS, devices

DEVICES, TOKENS, LATENT = 64, 8192, 3584
"""GPUs of the expert axis; tokens of each; width at which expert traffic travels."""


@functools.cache
def mesh() -> Mesh:
    return make_mesh(MeshConfig(fsdp=1, expert=DEVICES), devices(TARGETS["h200"], DEVICES))


def model(**changes) -> ModelConfig:
    moe = MoEConfig(
        **{
            "num_experts": 896,
            "experts_per_token": 16,
            "hidden": 3072,
            "shared_hidden": 6144,
            "latent_width": LATENT,
            "router": RouterConfig(score="sigmoid", correction_bias=True),
        }
        | changes
    )
    return ModelConfig(width=7168, num_layers=1, moe=moe, precision=PrecisionConfig(params="bfloat16"))


@functools.cache
def compiled(**changes) -> jax.stages.Compiled:
    """Forward and backward, with the flags of a run."""
    lowered = lower_moe_layer(model(**changes), mesh(), tokens_per_device=TOKENS)
    return lowered.compile(compiler_options=options_for(mesh().devices.flat[0]).taken)


def rows_bytes(chunks: int, capacity_factor: float) -> int:
    """Bytes of all buckets that a device sends in one exchange of rows."""
    return DEVICES * round(capacity_factor * TOKENS // chunks * 16 / DEVICES) * LATENT * 2
