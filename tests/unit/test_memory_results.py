"""The table of named results says what the layers make: names, bytes and FLOPs, read from the traced step."""

import functools
import math

import jax
import pytest
import tiny
from named_results import equations, named_bytes

from moejax.config.memory import LEAN, RESULTS, MemoryConfig
from moejax.config.mixers import GQAConfig, IndexerConfig, KDAConfig, MLAConfig
from moejax.config.model import ModelConfig, ResidualConfig
from moejax.config.training import LossConfig
from moejax.memory.policy import Saved
from moejax.memory.results import Total
from moejax.model.objective import switches_for
from moejax.model.saved import Setting, results
from moejax.parallel.mesh import mesh_from
from moejax.train import step as steps

ROWS, LENGTH = 8, 16
PLAIN = {"scan_layers": False}
MODELS = {
    "softmax": tiny.model(
        "gqa",
        "mla",
        **PLAIN,
        num_dense_layers=1,
        dense_hidden=24,
        gqa=GQAConfig(num_heads=2, num_kv_heads=1, head_dim=8, output_gate=True, qk_norm=True),
    ),
    "delta": tiny.model("kda", "gdn", **PLAIN, moe=tiny.moe(latent_width=8, overlap_chunks=2)),
    "gates": tiny.model(
        "mla",
        "kda",
        **PLAIN,
        mla=MLAConfig(num_heads=2, q_lora_rank=12, kv_lora_rank=8, nope_dim=8, rope_dim=4, value_dim=8, output_gate=True),
        kda=KDAConfig(num_heads=2, key_dim=8, value_dim=8, full_rank_gate=True),
        residual=ResidualConfig(kind="mhc", num_streams=2),
        moe=tiny.moe(capacity_factor=1.0, overflow="similar", shared_gate=True),
    ),
    "sparse": tiny.model("dsa", "dsa_shared", **PLAIN, residual=ResidualConfig(kind="block_attnres", block_size=1)),
    "pooled": tiny.model(
        "dsa",
        **PLAIN,
        gqa=GQAConfig(num_heads=2, num_kv_heads=1, head_dim=8),
        indexer=IndexerConfig(base="gqa", num_heads=2, head_dim=8, topk=2, pool=2, rotary_dim=4),
        mla=MLAConfig(),
        moe=tiny.moe(shared_hidden=0),
    ),
}
CASES = [(name, "none", {}) for name in MODELS] + [("sparse", "sparse", {}), ("sparse", "dense", {})]
CASES += [("delta", "none", {"fsdp": 2, "expert": 4}), ("nodes", "none", {"fsdp": 2, "expert": 4})]
MODELS["nodes"] = tiny.model("gqa", **PLAIN, moe=tiny.moe(transport="hierarchical", node_size=2))


@functools.cache
def traced(config: ModelConfig, losses: LossConfig = LossConfig(), saved: Saved | None = None, **mesh_sizes):
    """The gradients of one step."""
    mesh = mesh_from(**mesh_sizes)
    with jax.set_mesh(mesh):
        run = lambda params, batch: steps.gradients(config, losses, params, batch, switches_for(losses, saved=saved))
        return jax.jit(run).trace(tiny.lay(tiny.weights(config), config, mesh), tiny.put(tiny.batch(ROWS, LENGTH), mesh)).jaxpr


def product_flops(jaxpr) -> int:
    """Of the matrix products, those in loops once."""
    return sum(_flops(eqn) for eqn, _ in equations(jaxpr.jaxpr) if eqn.primitive.name == "dot_general")


def _flops(eqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)


@pytest.mark.parametrize(("name", "index", "sizes"), CASES, ids=lambda value: str(value))
def test_names_and_bytes_of_the_traced_layers_are_those_of_the_table(name, index, sizes):
    config, losses = MODELS[name], LossConfig(index=index, index_coef=1.0)
    shards = math.prod(sizes.values())
    setting = Setting(rows=ROWS // shards, length=LENGTH, expert_devices=sizes.get("expert", 1), gpu=False, index=index)
    want: dict[str, int] = {}
    for result in results(config, setting):
        want[result.name] = want.get(result.name, 0) + result.layers * result.cost.result_bytes
    assert named_bytes(traced(config, losses, **sizes), shards) == want


def test_every_name_is_made_by_one_of_the_models():
    flat = [(name, index) for name, index, sizes in CASES if not sizes]
    made = {result.name for name, index in flat for result in results(MODELS[name], Setting(rows=1, length=LENGTH, index=index))}
    assert made == RESULTS.keys()


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("softmax", ("latent", "query", "norm")),
        pytest.param("softmax", ("key_value", "mixer_out", "dense_hidden", "router_logits", "shared_hidden"), marks=pytest.mark.slow),
        pytest.param("gates", ("decay", "output_gate", "residual_mix", "shared_out"), marks=pytest.mark.slow),
        pytest.param("sparse", ("residual_mix",), marks=pytest.mark.slow),
    ],
)
def test_a_kept_result_takes_just_its_flops_out_of_the_backward_pass(model, names):
    """Traced with that name kept, and without: products of whole matrices, which are counted exactly."""
    config = MODELS[model]
    costs = dict.fromkeys(names, 0.0)
    for result in results(config, Setting(rows=ROWS, length=LENGTH, gpu=False)):
        if result.name in names:
            costs[result.name] += result.layers * result.cost.flops
    lean = product_flops(traced(config, saved=Saved()))
    assert {name: lean - product_flops(traced(config, saved=Saved((*LEAN, name)))) for name in names} == costs


@pytest.mark.parametrize(
    ("model", "names"), [("softmax", ("attention",)), ("gates", ("chunk_states",)), ("softmax", ("expert_hidden", "expert_out"))]
)
def test_an_op_whose_results_are_kept_does_not_run_again(model, names):
    """Their loops are gone from the backward pass."""
    loops = lambda saved: sum(eqn.primitive.name in ("scan", "while") for eqn, _ in equations(traced(MODELS[model], saved=saved).jaxpr))
    assert loops(Saved((*LEAN, *names))) < loops(Saved())


def test_totals_add_up_over_layers_and_makers():
    found = results(MODELS["softmax"], Setting(rows=1, length=LENGTH))
    totals = Total.of(found, MemoryConfig())
    assert totals["query"].kept_bytes == LENGTH * 4 * (2 * 16 + 2 * 12)  # gqa, its gate too, and mla
    assert totals["layer_input"].kept_bytes == 2 * LENGTH * 16 * 4
