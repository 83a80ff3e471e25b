"""Results that wait in host memory, read from the train step of a model with Kimi-Linear's widths, compiled for eight H200s.

python tests/aot/test_offload.py     # prints the bytes of every preset
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from named_results import named_bytes

from moejax.config.data import DataConfig
from moejax.config.memory import MemoryConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import GQAConfig, KDAConfig, MLAConfig, RopeConfig
from moejax.config.model import ModelConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.config.run import RunConfig, layer_plan, resolve
from moejax.config.training import LossConfig, TrainConfig
from moejax.data.batch import Batch
from moejax.observe.memory import compiled_bytes
from moejax.parallel.mesh import make_mesh
from moejax.plan.schedule import host_copies
from moejax.plan.targets import TARGETS, devices
from moejax.plan.train_step import PlannedStep, plan_step
from moejax.train.placement import batch_shapes
from moejax.train.program import make_program
from moejax.train.saved import plan_saved
from moejax.train.state import placed_shapes

pytestmark = pytest.mark.aot
DEVICES = 8
MODEL = ModelConfig(
    vocab_size=16384,
    width=2304,
    num_layers=4,
    mixers=("kda", "mla"),
    kda=KDAConfig(num_heads=32, key_dim=128, value_dim=128, decay="softplus"),
    mla=MLAConfig(num_heads=32, q_lora_rank=0, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128, rope=RopeConfig(kind="none")),
    moe=MoEConfig(
        num_experts=64,
        experts_per_token=8,
        hidden=1024,
        shared_hidden=1024,
        capacity_factor=1.25,
        router=RouterConfig(score="sigmoid", correction_bias=True, scale=2.446),
    ),
)
"""Two KDA and two MLA layers in a scan of two steps; a quarter of Kimi-Linear's experts, of which a token still visits 8."""
SCANNED = ModelConfig(
    vocab_size=8192,
    width=1024,
    num_layers=5,
    mixers=("gqa",),
    feed_forwards=("dense",),
    dense_hidden=4096,
    gqa=GQAConfig(num_heads=8, num_kv_heads=8, head_dim=128),
)
SHAPES = {
    "scanned": SCANNED,
    "unrolled": dataclasses.replace(SCANNED, num_layers=4, scan_layers=False),
    "head, scanned, tail": dataclasses.replace(
        SCANNED,
        num_layers=8,
        feed_forwards=("moe", "dense"),
        num_dense_layers=1,
        moe=dataclasses.replace(MODEL.moe, num_experts=8, experts_per_token=2, hidden=512, shared_hidden=512),
    ),
}
"""Small models whose stacks have other parts: layers that are scanned one by one, layers that are not scanned, and both."""
MEMORY = {
    "fast": MemoryConfig(),
    "balanced": MemoryConfig(preset="balanced"),
    "lean": MemoryConfig(preset="lean"),
    "lean, layer inputs on the host": MemoryConfig(preset="lean", offload=("layer_input",)),
    "balanced, on the host": MemoryConfig(preset="balanced", offload=("layer_input", "attention", "chunk_states", "mixer_out", "latent")),
}


def config(memory: MemoryConfig) -> RunConfig:
    return RunConfig(
        name="offload",
        mesh=MeshConfig(fsdp=1, expert=DEVICES),
        model=MODEL,
        data=DataConfig(seq_len=4096, batch_size=DEVICES),
        losses=LossConfig(bias_update="sign"),
        train=TrainConfig(steps=10),
        memory=memory,
    )


@functools.cache
def planned(name: str) -> PlannedStep:
    return plan_step(config(MEMORY[name]), TARGETS["h200"], DEVICES)


@pytest.mark.parametrize("name", ["balanced, on the host", "lean, layer inputs on the host"])
def test_the_host_holds_the_bytes_that_were_asked_for_and_each_copy_has_matmuls_beside_it(name):
    """With layer inputs alone, nothing of a layer can be computed again before they are back."""
    step = planned(name)
    wanted = plan_saved(step.plan, gpu=True).chosen_bytes("offload")
    assert compiled_bytes(step.compiled)["host_bytes"] == wanted > 0
    copies = host_copies(step.compiled)
    there, back = (sum(copy.moved_bytes for copy in copies if copy.to_host == to_host) for to_host in (True, False))
    each = wanted // (MODEL.num_layers // 2)  # a step of the scan holds two layers
    # back: the top step's before the backward loop, the others' inside, and XLA may take the loop's first turn out of it
    assert there == each and back in (2 * each, 3 * each), (there, back, each)
    assert not [copy for copy in copies if not copy.meanwhile]


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_of_layers_that_are_not_scanned_have_matmuls_beside_them_too(shape):
    """And so has the first copy back, beside which only the loss can run; each result leaves once and comes back once."""
    model, run = SHAPES[shape], config(MEMORY["lean, layer inputs on the host"])
    has_experts = "moe" in model.feed_forwards
    mesh = run.mesh if has_experts else MeshConfig(fsdp=DEVICES, expert=1)
    losses = run.losses if has_experts else LossConfig()
    step = plan_step(dataclasses.replace(run, model=model, mesh=mesh, losses=losses), TARGETS["h200"], DEVICES)
    each = run.data.seq_len * model.width * 2  # bfloat16
    assert compiled_bytes(step.compiled)["host_bytes"] == plan_saved(step.plan, gpu=True).chosen_bytes("offload") == model.num_layers * each
    plan, copies = layer_plan(model), host_copies(step.compiled)
    single, unit = len(plan.head) + len(plan.tail), len(plan.unit)
    assert sum(copy.moved_bytes for copy in copies if copy.to_host) == (single + unit) * each
    # the top step of a scan before the loop, the others inside, where the loop's body counts once
    assert sum(copy.moved_bytes for copy in copies if not copy.to_host) == (single + 2 * unit) * each
    assert not [copy for copy in copies if not copy.meanwhile]


def test_named_results_on_a_gpu_have_the_bytes_of_the_table():
    """The Triton kernels keep other arrays than those for CPUs."""
    plan = resolve(dataclasses.replace(config(MEMORY["fast"]), model=dataclasses.replace(MODEL, num_layers=2, scan_layers=False)), DEVICES)
    run, mesh = plan.config, make_mesh(plan.config.mesh, devices(TARGETS["h200"], DEVICES))
    program = make_program(run.model, run.losses, run.optim, run.train)
    zeros_BL = np.zeros((DEVICES, run.data.seq_len), np.int32)
    with jax.set_mesh(mesh):
        state = placed_shapes(run.model, program.optimizer, mesh)
        jaxpr = jax.jit(program.step).trace(state, batch_shapes(Batch.build(zeros_BL, zeros_BL), mesh, accumulation=1)).jaxpr
    assert named_bytes(jaxpr, DEVICES) == {name: total.kept_bytes for name, total in plan_saved(plan, gpu=True).totals.items()}


def test_presets_hold_less_and_less():
    temporaries = [compiled_bytes(planned(name).compiled)["temporaries_bytes"] for name in ("fast", "balanced", "lean")]
    assert temporaries == sorted(temporaries, reverse=True), temporaries


if __name__ == "__main__":
    for name in MEMORY:
        sizes = compiled_bytes(planned(name).compiled)
        print(f"{name:32} temporaries {sizes['temporaries_bytes'] / 2**20:8.1f} MiB, host {sizes['host_bytes'] / 2**20:8.1f} MiB")
