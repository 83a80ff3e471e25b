"""The precision contract: what is float32 while the activations are bfloat16."""

import re

import jax
import numpy as np
import pytest
import tiny

from moejax.config.model import PrecisionConfig
from moejax.config.training import LossConfig, OptimConfig
from moejax.data.batch import Batch
from moejax.model import language_model
from moejax.model.objective import switches_for
from moejax.moe import layer_routing
from moejax.parallel.mesh import mesh_from
from moejax.train import step as steps

BF16 = PrecisionConfig(params="float32", compute="bfloat16")
LOSSES = LossConfig(balance="sequence", router_z_coef=0.1, index="sparse")


def test_weights_and_gradients_are_float32_and_activations_bfloat16():
    config = tiny.model("kda", "dsa", precision=BF16)
    mesh = mesh_from()
    with jax.set_mesh(mesh):
        batch = tiny.put(tiny.batch(), mesh)
        shapes = language_model.shapes(config)
        loss, grads, report = jax.eval_shape(
            lambda params, batch: steps.gradients(config, LOSSES, params, batch, switches_for(LOSSES)), shapes, batch
        )
        hidden = jax.eval_shape(
            lambda params: language_model.forward(config, params, jax.tree.map(lambda x: x[0], batch)).hidden_BLD, shapes
        )
        logits = jax.eval_shape(lambda params: language_model.logits(config, params, jax.tree.map(lambda x: x[0], batch)), shapes)
    assert {leaf.dtype for leaf in jax.tree.leaves((shapes, grads, loss, report.nll, report.index_kl, report.balance, logits))} == {
        np.dtype("float32")
    }
    assert hidden.dtype == "bfloat16"
    for counts in ("load_E", "dropped"):
        assert report.layers["head"]["0"][counts].dtype == "int32"


def test_the_router_sees_float32(monkeypatch):
    from moejax.model import feed_forward

    seen = {}

    def choose(logits_BLE, bias_E, *args, **kwargs):
        choice, *rest = layer_routing.choose_layer(logits_BLE, bias_E, *args, **kwargs)
        seen.update(logits=logits_BLE.dtype, scores=choice.scores_BLE.dtype, bias=bias_E.dtype)
        return choice, *rest

    def weigh(*args, **kwargs):
        routing, report = layer_routing.weigh_layer(*args, **kwargs)
        seen.update(probs=routing.probs_BLK.dtype)
        return routing, report

    monkeypatch.setattr(feed_forward, "choose_layer", choose)
    monkeypatch.setattr(feed_forward, "weigh_layer", weigh)
    config, mesh = tiny.model("gqa", precision=BF16), mesh_from()
    with jax.set_mesh(mesh):
        jax.eval_shape(
            lambda params: language_model.forward(config, params, jax.device_put(tiny.batch())).hidden_BLD, language_model.shapes(config)
        )
    assert set(seen) == {"logits", "scores", "probs", "bias"} and set(seen.values()) == {np.dtype("float32")}


@pytest.mark.slow
@pytest.mark.usefixtures("no_compilation_cache")
def test_no_weight_gradient_is_summed_over_devices_in_bfloat16(tmp_path):
    """Read after partitioning and before the CPU backend widens what it cannot do."""
    config, mesh = tiny.model("kda", "dsa", precision=BF16), mesh_from(fsdp=2, expert=4)
    trainer = tiny.trainer(config, LOSSES, OptimConfig(), fsdp=2, expert=4)
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partition.*|shardy.*", "xla_backend_optimization_level": 0}
    with jax.set_mesh(mesh):
        trainer.step.lower(trainer.state, tiny.put(tiny.batch(), mesh)).compile(compiler_options=options)
    texts = [path.read_text() for path in sorted(tmp_path.glob("*after_spmd-partition*.txt"))]
    assert texts
    sums = [line for line in texts[-1].splitlines() if re.search(r"= \S+ (all-reduce|reduce-scatter)\(", line)]
    sums = [line for line in sums if re.search(r"\] \{[^}]*'(data|fsdp|expert)'", line)]  # the other axes have one member: nothing is added
    assert [line for line in sums if "= f32" in line] and not [line for line in sums if "= bf16" in line]


@pytest.mark.slow
@pytest.mark.parametrize("mixers", [("gqa",), ("kda", "dsa")], ids=str)
def test_bfloat16_follows_the_loss_curve_of_float32(mixers):
    """Over 20 steps: within 5 % at each, since tokens between two experts may choose otherwise, and within 1 % on the whole."""
    optim = OptimConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant")
    batches = [learnable(seed) for seed in range(20)]
    curves = []
    for precision in (tiny.FLOAT32, BF16):
        _, told = tiny.trainer(tiny.model(*mixers, precision=precision), LossConfig(), optim).run(batches)
        curves.append(np.array([out.scalars["loss_nats"] for out in told]))
    assert curves[0][-1] < 0.8 * curves[0][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.05)
    assert curves[1].mean() == pytest.approx(curves[0].mean(), rel=0.01)


def learnable(seed):
    """Rows in which each token follows from the one before."""
    first = np.random.default_rng(seed).integers(0, 64, (8, 1))
    return Batch.build((first + 7 * np.arange(16)) % 64, np.zeros((8, 16), int))
