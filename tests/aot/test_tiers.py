"""Moments and master weights in pinned host memory, read from steps compiled for an H200: what lies there, and what the update takes on the device."""

import functools

import pytest

from moejax.config.data import DataConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import GQAConfig
from moejax.config.model import ModelConfig
from moejax.config.run import RunConfig
from moejax.config.tiers import TiersConfig
from moejax.config.training import OptimConfig, TrainConfig
from moejax.plan.targets import TARGETS
from moejax.plan.train_step import plan_step

pytestmark = pytest.mark.aot
NUM_LAYERS = 8
MODEL = ModelConfig(
    vocab_size=1024,
    width=1024,
    num_layers=NUM_LAYERS,
    feed_forwards=("dense",),
    dense_hidden=4096,
    gqa=GQAConfig(num_heads=8, num_kv_heads=8, head_dim=128),
)
MiB = 2**20


@functools.cache
def memory(kind: str, **tiers):
    """The compiler's account of the step's bytes."""
    config = RunConfig(
        name="tiers",
        mesh=MeshConfig(fsdp=1),
        model=MODEL,
        data=DataConfig(seq_len=256, batch_size=1),
        optim=OptimConfig(kind=kind),
        train=TrainConfig(remat="layer"),
        tiers=TiersConfig(**tiers),
    )
    return plan_step(config, TARGETS["h200"], 1).compiled.memory_analysis()
