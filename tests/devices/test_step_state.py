"""What a step moves and what it leaves, and what it says when a number is not finite."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from moejax.config.mesh import MeshConfig
from moejax.config.model import ResidualConfig
from moejax.config.run import RunConfig, resolve
from moejax.config.training import GroupConfig, LossConfig, OptimConfig
from moejax.train.report import first_non_finite

ADAMW = OptimConfig(warmup_steps=0, schedule="constant", learning_rate=1e-3, weight_decay=0.0)
LOSSES = LossConfig(bias_update="sign", index="sparse")
DEEP = tiny.model("gqa", "mla", "gqa", "mla")


def moved(trainer):
    """Paths of the weights that one step changed, and of those that it did not."""
    state, _ = trainer.run([tiny.batch()])
    before, after = tiny.leaves(trainer.state.params), tiny.leaves(state.params)
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    return changed, set(before) - changed


def test_one_step_moves_every_weight():
    config = tiny.model("kda", "dsa")
    _, still = moved(tiny.trainer(config, LOSSES, ADAMW))
    assert not still


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        tiny.model("gdn", "mla", residual=ResidualConfig(kind="mhc", num_streams=2), moe=tiny.moe(latent_width=8)),
        tiny.model("gqa", "gqa", "gqa", residual=ResidualConfig(kind="block_attnres", block_size=2), moe=tiny.moe(shared_gate=True)),
        tiny.model(
            "gqa",
            gqa=tiny.GQAConfig(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True, output_gate=True, sinks=True),
            tie_embeddings=True,
        ),
    ],
    ids=["gdn and mla, mhc, latent experts", "block_attnres, shared gate", "gqa with all switches"],
)
def test_one_step_moves_every_weight_of_other_models(config):
    _, still = moved(tiny.trainer(config, LossConfig(bias_update="sign"), ADAMW))
    # the first mix of Block AttnRes has one entry, the embedding: its weight is 1 whatever the query
    first_mix = {"head/0/mixer_residual/norm/scale_D", "head/0/mixer_residual/query_D"}
    assert still == (first_mix if config.residual.kind == "block_attnres" else set())


def test_train_only_and_groups_freeze_the_rest():
    config = tiny.model("dsa")
    optim = dataclasses.replace(ADAMW, groups=(GroupConfig(pattern="indexer/k_norm", lr_scale=0.0),))
    changed, still = moved(tiny.trainer(config, LossConfig(index="dense"), optim, train_only="indexer"))
    assert changed == {path for path in changed | still if "indexer" in path and "k_norm" not in path}


def debug_step():
    return tiny.trainer(DEEP, LossConfig(bias_update="sign"), debug=True)


def poisoned(state, path, stack):
    """The state with one NaN in one layer's weight."""
    section, place, *rest = path.split("/")
    params = jax.tree.map(lambda leaf: leaf, state.params)
    node = params[section][place]
    for key in rest[:-1]:
        node = node[key]
    node[rest[-1]] = node[rest[-1]].at[(stack, *[0] * (node[rest[-1]].ndim - 1))].set(np.nan)
    return dataclasses.replace(state, params=params)


@pytest.mark.parametrize(
    "path, stack, name",
    [
        ("unit/1/mixer/q_DHC", 1, "layer 3, mixer (mla)"),
        ("unit/0/mixer/v_DGC", 1, "layer 2, mixer (gqa)"),
        ("unit/1/feed_forward/shared/up_DF", 0, "layer 1, feed-forward (moe)"),
        ("unit/0/mixer_norm/scale_D", 0, "layer 0, mixer (gqa)"),
    ],
)
def test_debug_names_the_layer_that_makes_the_first_nan(path, stack, name):
    trainer = debug_step()
    plan = resolve(RunConfig(name="debug", model=dataclasses.replace(DEEP, vocab_size=256), mesh=MeshConfig(fsdp=1)), 1)
    _, (out,) = trainer.run([tiny.batch()], poisoned(trainer.state, path, stack))
    assert first_non_finite(plan, out.finite_layers, out.finite_gradients) == name


def test_debug_finds_nothing_in_a_healthy_model():
    trainer = debug_step()
    plan = resolve(RunConfig(name="debug", model=dataclasses.replace(DEEP, vocab_size=256), mesh=MeshConfig(fsdp=1)), 1)
    _, (out,) = trainer.run([tiny.batch()])
    assert first_non_finite(plan, out.finite_layers, out.finite_gradients) is None


def test_a_gradient_that_is_not_finite_while_all_activations_are_is_named():
    plan = resolve(RunConfig(name="debug", model=dataclasses.replace(DEEP, vocab_size=256), mesh=MeshConfig(fsdp=1)), 1)
    flags = {"unit": {place: np.ones((2, 2), bool) for place in "01"}}
    text = first_non_finite(plan, flags, {"embed": {"weight_VD": np.array(True)}, "unembed": {"weight_DV": np.array(False)}})
    assert text is not None and text.startswith("the gradient of unembed/weight_DV")


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    trainer = debug_step()
    before = poisoned(trainer.state, "unit/1/mixer/q_DHC", 1)
    state, told = trainer.run([tiny.batch(), tiny.batch(seed=1)], before)
    for which in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, which), getattr(before, which))
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (2, 2, 2)
    healed = dataclasses.replace(state, params=trainer.state.params)
    state, told = trainer.run([tiny.batch()], healed)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (3, 2, 0)
    assert told[0].scalars["skipped_steps"] == 2
