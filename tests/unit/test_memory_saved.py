"""Whatever is kept, moved to the host or computed again, the step is the same. On a CPU a move is a smoke test: XLA leaves the array where
it is; that it happens is read from programs compiled for GPUs (tests/aot/test_offload.py)."""

import jax
import numpy as np
import pytest
import tiny

from moejax.config.memory import BALANCED, LEAN, RESULTS
from moejax.config.mixers import MLAConfig
from moejax.config.model import ResidualConfig
from moejax.config.training import LossConfig
from moejax.memory.policy import Saved

LOSSES = LossConfig(balance="sequence", balance_coef=0.1)
QUICK = tiny.model("mla", "mla", precision=tiny.FLOAT64)
EVERY = {
    "delta": tiny.model(
        "kda",
        "gdn",
        precision=tiny.FLOAT64,
        scan_layers=False,
        moe=tiny.moe(shared_gate=True),
        residual=ResidualConfig(kind="mhc", num_streams=2),
    ),
    "softmax": tiny.model(
        "gqa",
        "mla",
        precision=tiny.FLOAT64,
        scan_layers=False,
        num_dense_layers=1,
        dense_hidden=24,
        mla=MLAConfig(num_heads=2, q_lora_rank=12, kv_lora_rank=8, nope_dim=8, rope_dim=4, value_dim=8, output_gate=True),
        residual=ResidualConfig(kind="block_attnres", block_size=1),
    ),
}
ALL = tuple(RESULTS)
ODD = tuple(name for name in ALL if name in LEAN or ALL.index(name) % 2)
CHOICES = {"balanced": Saved(BALANCED), "all offloaded": Saved((), ALL)}
MORE = {
    "lean": Saved(),
    "all kept": Saved(ALL),
    "the others on the host": Saved(ODD, tuple(set(ALL) - set(ODD))),
}


def same_step(config, saved: Saved, **sizes) -> None:
    with jax.enable_x64(True):
        params, batch = tiny.weights(config, bias=0.1), tiny.batch()
        loss, grads, report = tiny.gradients(config, LOSSES, params, batch, **sizes)
        again_loss, again, again_report = tiny.gradients(config, LOSSES, params, batch, saved=saved, **sizes)
    assert again_loss == pytest.approx(loss, rel=1e-13)
    assert tiny.worst(again, grads)[0] < 1e-12, tiny.worst(again, grads)  # sums in another order
    loads = lambda report: {path: leaf for path, leaf in tiny.leaves(report.layers).items() if path.endswith("load_E")}
    for path, load in loads(report).items():
        np.testing.assert_array_equal(loads(again_report)[path], load)


@pytest.mark.parametrize("saved", CHOICES.values(), ids=CHOICES)
def test_presets_change_neither_loss_nor_gradients_nor_counts(saved):
    same_step(QUICK, saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "saved"),
    [("delta", "lean"), ("delta", "the others on the host"), ("softmax", "all kept"), ("softmax", "the others on the host")],
    ids=str,
)
def test_mixed_choices_change_neither_loss_nor_gradients_nor_counts(config, saved):
    same_step(EVERY[config], MORE[saved])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual_mix", "conv", "chunk_states", "attention", "expert_rows", "expert_hidden"])
def test_no_name_kept_alone_changes_loss_or_gradients(name):
    made = "softmax" if name in ("latent", "query", "attention", "dense_hidden") else "delta"
    same_step(EVERY[made], Saved((*LEAN, name)))


@pytest.mark.slow
@pytest.mark.parametrize("index", ["sparse", "dense"])
def test_chosen_keys_and_the_loss_of_the_indexer_are_the_same(index):
    """Of layers that choose keys, and one that shares the choice."""
    config = tiny.model("dsa", "dsa_shared", precision=tiny.FLOAT64)
    losses = LossConfig(index=index)
    with jax.enable_x64(True):
        params, batch = tiny.weights(config), tiny.batch()
        loss, grads, _ = tiny.gradients(config, losses, params, batch)
        for saved in (Saved(), Saved(BALANCED), Saved((*LEAN, "index_inputs"), ("attention",))):
            again_loss, again, _ = tiny.gradients(config, losses, params, batch, saved=saved)
            assert again_loss == pytest.approx(loss, rel=1e-13)
            assert tiny.worst(again, grads)[0] < 1e-12, tiny.worst(again, grads)


@pytest.mark.slow
def test_on_a_mesh_too():
    same_step(QUICK, Saved(BALANCED, ("expert_hidden", "query")), fsdp=2, expert=4)
