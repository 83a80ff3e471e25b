"""Moments and master weights in pinned host memory, read from steps compiled for an H200: what lies there, and what the update takes on the device."""

import functools
import math

import jax
import pytest

from moejax.config.data import DataConfig
from moejax.config.memory import MemoryConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import GQAConfig
from moejax.config.model import ModelConfig
from moejax.config.run import RunConfig
from moejax.config.tiers import TiersConfig
from moejax.config.training import OptimConfig
from moejax.model import language_model
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
SIZES = {path: math.prod(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(language_model.shapes(MODEL))}
WEIGHTS_BYTES = 4 * sum(SIZES.values())
PIECE_BYTES = 4 * 4096 * 1024
"""The largest weight of one layer."""
ROUNDED_BYTES = 4 * NUM_LAYERS * (4 * 1024 * 1024 + 3 * 4096 * 1024)
"""Matrices of the layers."""
SMALL = 64 * 1024


@functools.cache
def memory(**tiers):
    """The compiler's account of the step's bytes."""
    config = RunConfig(
        name="tiers",
        mesh=MeshConfig(fsdp=1),
        model=MODEL,
        data=DataConfig(seq_len=256, batch_size=1),
        optim=OptimConfig(kind="adamw"),
        memory=MemoryConfig(preset="lean"),
        tiers=TiersConfig(**tiers),
    )
    return plan_step(config, TARGETS["h200"], 1).compiled.memory_analysis()


def test_moments_lie_in_host_memory_and_nothing_else_does():
    device, host = memory(), memory(optimizer="host")
    assert device.argument_size_in_bytes == pytest.approx(3 * WEIGHTS_BYTES, abs=SMALL) and device.host_argument_size_in_bytes == 0
    for part in ("argument", "output", "alias"):
        assert getattr(host, f"{part}_size_in_bytes") == pytest.approx(WEIGHTS_BYTES, abs=SMALL), part
        assert getattr(host, f"host_{part}_size_in_bytes") == pytest.approx(2 * WEIGHTS_BYTES, abs=SMALL), part


def test_the_update_takes_the_room_of_some_pieces_on_the_device():
    more = memory(optimizer="host").temp_size_in_bytes - memory().temp_size_in_bytes
    assert more < 3 * PIECE_BYTES < WEIGHTS_BYTES / 10, more / PIECE_BYTES  # 1.4 pieces; the moments are 65
    assert memory(optimizer="host").host_temp_size_in_bytes == 0


def test_with_master_weights_there_the_device_has_rounded_copies_alone():
    masters = memory(optimizer="host", master_weights=True)
    for part in ("argument", "output", "alias"):
        assert getattr(masters, f"{part}_size_in_bytes") == pytest.approx(WEIGHTS_BYTES - ROUNDED_BYTES / 2, abs=SMALL), part
        assert getattr(masters, f"host_{part}_size_in_bytes") == pytest.approx(2 * WEIGHTS_BYTES + ROUNDED_BYTES, abs=SMALL), part
    assert masters.temp_size_in_bytes - memory().temp_size_in_bytes < 3 * PIECE_BYTES  # no layer's weights but one are widened at a time
    assert masters.host_temp_size_in_bytes == 0
