"""What hides the exchanges of a mixture of experts on GPUs, and what the layer holds, read from programs compiled for 64 H200s."""

import dataclasses

import k3_layer
import pytest

from moejax.config.data import DataConfig
from moejax.config.memory import MemoryConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import MLAConfig
from moejax.config.model import PrecisionConfig
from moejax.config.run import RunConfig
from moejax.config.training import LossConfig, OptimConfig, TrainConfig
from moejax.parallel import xla_flags
from moejax.plan.schedule import exchanges
from moejax.plan.targets import TARGETS, devices
from moejax.plan.train_step import plan_step

pytestmark = pytest.mark.aot
EXEMPT_BYTES = 64 * 1024
"""Counts of rows per expert (3.5 KB a device) take the time of a message, not of its bytes, and must arrive before anything is grouped."""
MUST_EXIST = 0.94e9 + 0.94e9 + 1.61e9 + 0.94e9
"""Bytes of the rows sent, received, of gate and up, and returned, at capacity factor 1."""


def of_rows(compiled):
    return [exchange for exchange in exchanges(compiled, "all-to-all") if exchange.operand_bytes > EXEMPT_BYTES]


def test_every_exchange_of_rows_has_matmuls_beside_it_forward_and_backward():
    found = of_rows(k3_layer.compiled(capacity_factor=1.25, overlap_chunks=2))
    forward = [exchange for exchange in found if "transpose(" not in exchange.op_name]
    assert (len(forward), len(found)) == (4, 8)  # two chunks, there and back
    for exchange in found:
        assert exchange.meanwhile, f"nothing runs beside {exchange}"
    shared, expert = "->bl", "mpmd_map"
    assert all(shared in name for name in forward[0].meanwhile), "the shared expert's inside beside the first rows that leave"
    assert all(any(expert in name for name in exchange.meanwhile) for exchange in forward[1:-1])
    assert all(shared in name for name in forward[-1].meanwhile), "its output beside the last that come home"


def test_expert_traffic_of_a_latent_layer_is_of_the_latent_width():
    found = of_rows(k3_layer.compiled(capacity_factor=1.25, overlap_chunks=2))
    assert {exchange.operand_bytes for exchange in found} == {k3_layer.rows_bytes(2, 1.25)}
    assert {len(group) for exchange in found for group in exchange.groups} == {64}


def test_one_chunk_has_no_overlap_of_its_own():
    """moe.overlap_chunks=1: one exchange each way, and no expert matmul that could run beside it."""
    found = of_rows(k3_layer.compiled(capacity_factor=1.0, overlap_chunks=1))
    assert [exchange.operand_bytes for exchange in found] == [k3_layer.rows_bytes(1, 1.0)] * 4
    assert not any("mpmd_map" in name for exchange in found[:-1] for name in exchange.meanwhile)


def test_a_layer_holds_little_more_than_it_must():
    """The shared expert, its gathered weights and all whole gradients of weights before they are scattered are in it."""
    memory = k3_layer.compiled(capacity_factor=1.0, overlap_chunks=1).memory_analysis()
    assert memory.temp_size_in_bytes <= 1.6 * MUST_EXIST, f"{memory.temp_size_in_bytes / 1e9:.3f} GB"


def test_the_train_step_of_a_model_hides_all_exchanges_of_rows_but_one():
    """Two layers in a scan, recomputed backward: XLA takes the backward pass of one out of its loop, and there schedules one exchange of
    gradients bare. Each layer has 4 exchanges forward, 4 recomputed, 4 backward; the loops' bodies count once."""
    mla = MLAConfig(num_heads=64, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    model = dataclasses.replace(
        k3_layer.model(capacity_factor=1.25, overlap_chunks=2),
        vocab_size=16384,
        num_layers=2,
        mixers=("mla",),
        mla=mla,
        precision=PrecisionConfig(),
    )
    config = RunConfig(
        name="k3",
        mesh=MeshConfig(fsdp=1, expert=64),
        model=model,
        data=DataConfig(seq_len=k3_layer.TOKENS, batch_size=64),
        losses=LossConfig(bias_update="sign", balance="sequence", balance_coef=1e-4),
        optim=OptimConfig(kind="adamw"),
        train=TrainConfig(steps=10),
        memory=MemoryConfig(preset="lean"),
    )
    planned = plan_step(config, TARGETS["h200"], 64)
    found = [exchange for exchange in of_rows(planned.compiled) if exchange.operand_bytes == k3_layer.rows_bytes(2, 1.25)]
    bare = [exchange for exchange in found if not exchange.meanwhile]
    assert len(found) == 4 + 2 * 8
    assert len(bare) <= 1 and all("transpose(" in exchange.op_name for exchange in bare), bare


def test_flags_that_the_compiler_does_not_know_are_told_and_left_out():
    (device,) = devices(TARGETS["h200"], 1)
    known = xla_flags.TABLE[0]
    odd = dataclasses.replace(known, name="xla_gpu_no_such_flag")
    wrong = dataclasses.replace(known, value="perhaps")
    options = xla_flags.options_for(device, (xla_flags.TABLE[1], odd, wrong))
    assert options.taken == {xla_flags.TABLE[1].name: xla_flags.TABLE[1].value}
    assert options.rejected == {
        odd.name: "No such compile option: 'xla_gpu_no_such_flag'",
        wrong.name: f"While setting option {wrong.name}, 'perhaps' is not a valid bool value.",
    }
    assert [line for line in options.lines() if "rejected" in line and odd.name in line]


def test_this_jaxlib_takes_the_whole_table():
    (device,) = devices(TARGETS["h200"], 1)
    options = xla_flags.options_for(device, xla_flags.OFFLOADING)
    assert list(options.taken) == [flag.name for flag in xla_flags.wanted(xla_flags.JAXLIB, xla_flags.OFFLOADING)] and not options.rejected
