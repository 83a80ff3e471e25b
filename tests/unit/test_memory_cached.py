"""A cached value stands in for the computation in forward, and never for another one."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from moejax.config.training import LossConfig
from moejax.data.batch import Batch
from moejax.memory.cached import Recall, cached, fingerprint
from moejax.model import language_model
from moejax.model.objective import switches_for
from moejax.model.transformer import Below
from moejax.parallel.mesh import mesh_from
from moejax.train.prefix import prefix_gradients, require_to_go_on
from moejax.train.step import gradients


class Dict(dict):
    """The least that a store is. It does not look at versions."""

    def get(self, key, version):
        return super().get(key)

    def put(self, key, version, value):
        self[key] = value


def double(weight_D, x_BD, ids_B):
    return jnp.tanh(x_BD * weight_D), ids_B + 1


def test_forward_takes_the_value_and_backward_the_inputs():
    weight_D, x_BD, ids_B = jnp.arange(1.0, 4.0), jnp.ones((2, 3)), jnp.arange(2)
    planted = jnp.full((2, 3), 7.0), ids_B

    def loss(weight_D, value, run):
        out_BD, _ = run(value, (weight_D, x_BD, ids_B))
        return jnp.sum(out_BD * jnp.arange(3.0))

    run = lambda _, inputs: double(*inputs)
    want = jax.grad(loss)(weight_D, planted, run)
    value, (grad, of_value) = jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)(weight_D, planted, cached(double))
    assert value == 7 * 2 * 3  # whatever it is given
    np.testing.assert_array_equal(grad, want)
    assert not np.asarray(of_value[0]).any()
    forward = jax.jit(functools.partial(loss, run=cached(double))).lower(weight_D, planted).compile()
    assert "tanh" not in forward.as_text()


def test_a_stale_or_foreign_entry_is_not_used():
    store = Dict()
    recall = Recall(store, "version 1")
    for number in (1, 2):
        assert recall.find(f"key-{number}") is None
        recall.keep(f"key-{number}", {"x": np.full(2, number)})
    np.testing.assert_array_equal(recall.find("key-1")["x"], [1, 1])
    assert (recall.hits, recall.misses, recall.refused) == (1, 2, 0)
    store["key-1"] = store["key-2"]  # planted: another input's
    assert recall.find("key-1") is None
    newer = Recall(store, "version 2")  # all that is there is of older weights
    assert newer.find("key-2") is None
    newer.keep("key-2", {"x": np.full(2, 3)})
    np.testing.assert_array_equal(newer.find("key-2")["x"], [3, 3])
    assert recall.find("key-2") is None
    assert (recall.hits, recall.misses, recall.refused) == (1, 4, 2) and (newer.hits, newer.misses, newer.refused) == (1, 1, 1)


@pytest.mark.parametrize("planted", [np.zeros(3), {"value": np.zeros(3)}, [np.zeros(3)]], ids=["array", "no label", "list"])
def test_an_entry_without_a_label_is_refused(planted):
    recall = Recall(Dict(key=planted), "version 1")
    assert recall.find("key") is None and (recall.hits, recall.misses, recall.refused) == (0, 1, 1)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
def test_a_fingerprint_changes_with_one_bit_one_place_and_one_name_and_not_with_the_mesh(dtype):
    weights = {"a": np.arange(64).reshape(8, 8).astype(dtype), "b": np.zeros(3, dtype)}
    want = fingerprint(weights)
    places = jax.sharding.NamedSharding(mesh_from(fsdp=4), jax.sharding.PartitionSpec("fsdp"))
    assert fingerprint(weights | {"a": jax.device_put(weights["a"], places)}) == want
    changed = weights["a"].copy()
    changed[3, 4] = 1
    swapped = weights["a"].copy()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    others = weights | {"a": changed}, weights | {"a": swapped}, {"a": weights["a"], "c": weights["b"]}, weights | {"b": np.zeros(4, dtype)}
    assert len({want, *map(fingerprint, others)}) == 5


DENSE = {"feed_forwards": ("dense",), "moe": tiny.MoEConfig(), "dense_hidden": 32, "scan_layers": False, "precision": tiny.FLOAT64}
"""Loops are counted once in a program's FLOPs, so there are none: no scan over layers, no experts."""
FROZEN = tiny.model("kda", "gqa", "gqa", **DENSE)
"""Two frozen layers below one that learns."""


@functools.cache
def frozen_gradients(with_cache):
    """Gradients of what learns, by path; and the FLOPs of the compiled program."""
    batch, losses = tiny.batch(rows=2), LossConfig()
    learns = lambda path: path.startswith(("head/2", "final_norm", "unembed"))
    with jax.enable_x64(True), jax.set_mesh(mesh_from()):
        params = tiny.weights(FROZEN)
        below = jax.jit(lambda params: language_model.lower(FROZEN, params, batch, num_stages=2))(params) if with_cache else None

        def run(params, below):
            below = None if below is None else Below(below, 2)
            batches = jax.tree.map(lambda array: array[None], batch)
            loss, grads, _ = gradients(FROZEN, losses, params, batches, switches_for(losses), below=below)
            return loss, {path: grad for path, grad in flat(grads).items() if learns(path)}

        compiled = jax.jit(run, compiler_options=tiny.QUICK_TO_COMPILE).lower(params, below).compile()
        return jax.device_get(compiled(params, below)), compiled.cost_analysis()["flops"]


def flat(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_layers_below_the_first_that_learns_are_left_out_and_gradients_stay():
    (want_loss, want), want_flops = frozen_gradients(False)
    (loss, grads), flops = frozen_gradients(True)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-12)
    error, path = tiny.worst(grads, want)
    assert error < 1e-9, path
    assert flops < 0.85 * want_flops, (flops, want_flops)


def test_frozen_stages_are_those_below_the_first_weight_that_learns():
    config = tiny.model("kda", "gqa", "kda", "gqa", "mla")  # two stacked units, and a tail
    trainable = lambda *paths: jax.tree_util.tree_map_with_path(
        lambda path, _: any(wanted in jax.tree_util.keystr(path, simple=True, separator="/") for wanted in paths),
        language_model.shapes(config),
    )
    assert language_model.num_frozen(config, trainable("tail/0/mixer/out")) == 1
    assert language_model.num_frozen(config, trainable("unit/0")) == 0
    assert language_model.num_frozen(config, trainable("final_norm")) == 2
    assert language_model.num_frozen(config, trainable("embed/", "tail")) == 0


SHARED, RECURRENT = tiny.model("gqa", "gqa", **DENSE), tiny.model("kda", "gqa", **DENSE)
SHARED_EXPERTS = tiny.model("kda", "gqa", "kda", "gqa", "mla", precision=tiny.FLOAT64)
PREFIX, SUFFIX, NUM_MICROBATCHES = 32, 4, 3
"""Two prompts, and three answers to each, one a microbatch."""


def prompts_and_answers():
    """Prompts, answers behind them, and the same documents written out."""
    rng = np.random.default_rng(0)
    tokens_ABL = rng.integers(0, 64, (NUM_MICROBATCHES, 2, PREFIX + SUFFIX))
    tokens_ABL[:, :, :PREFIX] = tokens_ABL[0, :, :PREFIX]
    build = lambda tokens_BL, **where: Batch.build(tokens_BL, np.zeros(tokens_BL.shape, int), **where)
    stack = lambda batches: jax.tree.map(lambda *arrays: np.stack(arrays), *batches)
    whole = stack(build(tokens_BL) for tokens_BL in tokens_ABL)
    whole = dataclasses.replace(whole, weights_BL=whole.weights_BL * (np.arange(PREFIX + SUFFIX) >= PREFIX))
    answers = stack(build(tokens_BL[:, PREFIX:], start_B=[PREFIX] * 2) for tokens_BL in tokens_ABL)
    return build(tokens_ABL[0, :, :PREFIX]), answers, whole


@functools.cache
def shared_gradients(config, way, lowest=0):
    """Loss, gradients and FLOPs; layers of `head` from `lowest` on share what the prompt left. way None: documents written out."""
    prefix, answers, whole = prompts_and_answers()
    losses, shared = LossConfig(), lambda section, place: section != "head" or int(place) >= lowest

    def run(params):
        if way is None:
            return gradients(config, losses, params, whole, switches_for(losses))[:2]
        switches, unroll = switches_for(losses, past_keys=PREFIX), NUM_MICROBATCHES
        return prefix_gradients(config, losses, params, prefix, answers, switches, way=way, shared=shared, unroll=unroll)[:2]

    with jax.enable_x64(True), jax.set_mesh(mesh_from()):
        params = tiny.weights(config, bias=0.1)
        compiled = jax.jit(run, compiler_options=tiny.QUICK_TO_COMPILE).lower(params).compile()
        return jax.device_get(compiled(params)), compiled.cost_analysis()["flops"]


def check_shared(config, way, lowest):
    (want_loss, want), _ = shared_gradients(config, None)
    (loss, grads), flops = shared_gradients(config, way, lowest)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-12)
    error, path = tiny.worst(grads, want)
    assert error < 1e-9, path
    return flops


def test_a_prompt_that_answers_share_is_computed_once():
    once, upper = check_shared(SHARED, "once", 0), check_shared(SHARED, "once", 1)  # `upper`: the lower layer is run by each microbatch
    written_out = NUM_MICROBATCHES * shared_gradients(SHARED, None)[1]  # its loop over microbatches is counted once
    tokens = (PREFIX + NUM_MICROBATCHES * SUFFIX) / (NUM_MICROBATCHES * (PREFIX + SUFFIX))
    assert once < 1.25 * tokens * written_out, (once, written_out)  # answers attend to more keys than the prompt does
    assert once < upper < written_out


@pytest.mark.slow
def test_a_prompt_is_shared_by_states_too():
    check_shared(RECURRENT, "once", 0)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "lowest"), [("each", 0), ("rebuild", 0), ("rebuild", 1)])
def test_every_way_has_the_gradients_of_documents_written_out(way, lowest):
    check_shared(RECURRENT, way, lowest)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["each", "rebuild", "once"])
def test_prompts_are_shared_in_stacked_layers_with_experts(way):
    check_shared(SHARED_EXPERTS, way, 0)


def of_prompts(config, losses, prefix, answers, past_keys=PREFIX):
    """Loss, gradients and report, with the prompts computed once."""
    run = functools.partial(
        prefix_gradients, config, losses, prefix=prefix, batches=answers, switches=switches_for(losses, past_keys=past_keys)
    )
    with jax.enable_x64(True), jax.set_mesh(mesh_from()):
        params = tiny.weights(config, bias=0.1)
        return jax.device_get(jax.jit(lambda params: run(params), compiler_options=tiny.QUICK_TO_COMPILE)(params))


@pytest.mark.parametrize("router", [{}, {"overload_strength": 1.0}], ids=str)
def test_experts_are_balanced_over_all_answers_however_they_are_split_into_microbatches(router):
    prefix, answers, _ = prompts_and_answers()
    together = jax.tree.map(lambda array: array.reshape(1, -1, *array.shape[2:]), answers)
    prompts = jax.tree.map(lambda array: np.concatenate([array] * NUM_MICROBATCHES), prefix)
    config = tiny.model("gqa", precision=tiny.FLOAT64, moe=tiny.moe(**router))
    losses = LossConfig(balance="none" if router else "global", balance_coef=0.0 if router else 1.0)
    want_loss, want, want_report = of_prompts(config, losses, prompts, together)
    loss, grads, report = of_prompts(config, losses, prefix, answers)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-9)
    np.testing.assert_allclose(report.balance, want_report.balance, rtol=1e-9)
    error, path = tiny.worst(grads, want)
    assert error < 1e-9, path


def test_a_prefix_that_would_not_be_seen_as_a_whole_is_refused():
    prefix, answers, _ = prompts_and_answers()
    with pytest.raises(ValueError, match=r"past_keys=31 leaves out .* \(gqa, kda\) see of a prefix of 32 tokens; 32 or more fit"):
        of_prompts(RECURRENT, LossConfig(), prefix, answers, past_keys=PREFIX - 1)
    with pytest.raises(ValueError, match=r"past_keys=None"):
        of_prompts(RECURRENT, LossConfig(), prefix, answers, past_keys=None)
    later = dataclasses.replace(answers, positions_BL=answers.positions_BL + (np.arange(NUM_MICROBATCHES) == 1)[:, None, None])
    with pytest.raises(
        ValueError, match=r"row 0 of microbatch 1 begins at position 33, and its prefix ends at position 31; rows begin one"
    ):
        of_prompts(RECURRENT, LossConfig(), prefix, later)
    require_to_go_on(prefix, answers)
    with pytest.raises(ValueError, match="its prefix ends with padding"):
        ends = dataclasses.replace(prefix.segments, ids_BL=np.where(np.arange(PREFIX) < PREFIX - 1, prefix.segments.ids_BL, -1))
        require_to_go_on(dataclasses.replace(prefix, segments=ends), answers)


def test_layers_with_a_window_need_no_more_of_a_prefix_than_they_see():
    prefix, answers, _ = prompts_and_answers()
    config = tiny.model("gqa", gqa=dataclasses.replace(tiny.SIZES["gqa"]["gqa"], window=8), precision=tiny.FLOAT64)
    want_loss, want, _ = of_prompts(config, LossConfig(), prefix, answers)
    loss, grads, _ = of_prompts(config, LossConfig(), prefix, answers, past_keys=7)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-12)
    error, path = tiny.worst(grads, want)
    assert error < 1e-9, path
    with pytest.raises(ValueError, match="7 or more fit"):
        of_prompts(config, LossConfig(), prefix, answers, past_keys=6)


@pytest.mark.slow
def test_the_example_in_the_docs_runs():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "windows.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    told: dict = {}
    exec(example, told)
    assert np.isfinite(told["loss"]) and jax.tree.map(np.shape, told["grads"]) == jax.tree.map(np.shape, told["params"])
    assert told["report"].layers
