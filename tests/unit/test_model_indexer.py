"""The indexer of sparse attention learns from its own loss alone, and nothing else does."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from moejax.config.training import LossConfig, OptimConfig

CONFIG = tiny.model("dsa", precision=tiny.FLOAT64)
LOSSES = {stage: LossConfig(index=stage, balance="sequence", balance_coef=0.1) for stage in ("sparse", "dense")}


def run(stage, coef, **kwargs):
    with jax.enable_x64(True):
        losses = dataclasses.replace(LOSSES[stage], index_coef=coef)
        loss, grads, report = tiny.gradients(CONFIG, losses, tiny.weights(CONFIG), tiny.batch(), **kwargs)
    return float(loss), tiny.leaves(grads), report


@pytest.mark.parametrize("stage", ["sparse", pytest.param("dense", marks=pytest.mark.slow)])
def test_the_text_teaches_the_indexer_nothing_and_the_indexer_the_model_nothing(stage):
    zero_loss, zero, report = run(stage, 0.0)
    one_loss, one, _ = run(stage, 1.0)
    assert report.index_kl > 1e-3
    np.testing.assert_allclose(one_loss - zero_loss, report.index_kl / (tiny.batch().segments.ids_BL >= 0).sum(), rtol=1e-9)
    for path in zero:
        if "indexer" in path:
            assert np.all(zero[path] == 0) and np.abs(one[path]).max() > 1e-9, path
        else:
            np.testing.assert_array_equal(one[path], zero[path], err_msg=path)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"expert": 2, "fsdp": 2, "accumulation": 2},
        *(pytest.param(kwargs, marks=pytest.mark.slow) for kwargs in ({"accumulation": 4}, {"expert": 8})),
    ],
    ids=str,
)
def test_the_indexers_loss_is_the_same_on_every_mesh_and_split(kwargs):
    _, want, want_report = run("sparse", 1.0)
    _, got, report = run("sparse", 1.0, **kwargs)
    np.testing.assert_allclose(report.index_kl, want_report.index_kl, rtol=1e-12)
    assert tiny.worst(got, want)[0] < 1e-9, tiny.worst(got, want)


def test_dense_warm_up_is_attention_over_all_keys():
    plain, params = dataclasses.replace(CONFIG, mixers=("mla",), precision=tiny.FLOAT32, indexer=tiny.IndexerConfig()), {}
    sparse = dataclasses.replace(CONFIG, precision=tiny.FLOAT32)
    params = tiny.weights(sparse)
    of_plain = params | {"head": {"0": params["head"]["0"] | {"mixer": params["head"]["0"]["mixer"]["base"]}}}
    batch = tiny.batch(length=16)
    want, _ = tiny.hidden(plain, of_plain, batch)
    real_BL = batch.segments.ids_BL >= 0
    dense, _ = tiny.hidden(sparse, params, batch, index="dense")
    np.testing.assert_allclose(dense[real_BL], want[real_BL], atol=1e-5)
    chosen, _ = tiny.hidden(sparse, params, batch)
    assert np.abs(chosen[real_BL] - want[real_BL]).max() > 1e-3  # 4 keys of up to 16 are not all


@pytest.mark.slow
@pytest.mark.parametrize("losses", [LossConfig(), LossConfig(index="sparse", index_coef=0.0)], ids=["no loss", "coefficient 0"])
def test_adamw_takes_an_indexer_without_gradients(losses):
    config = tiny.model("dsa")
    optim = OptimConfig(warmup_steps=0, schedule="constant", weight_decay=0.0)
    trainer = tiny.trainer(config, losses, optim)
    state, told = trainer.run([tiny.batch()])
    before, after = tiny.leaves(trainer.state.params), tiny.leaves(state.params)
    assert told[0].scalars["skipped_steps"] == 0
    for path in before:
        assert np.array_equal(before[path], after[path]) == ("indexer" in path or path.endswith("bias_E")), path
