"""What documents share is computed once, and nothing that is minimised or counted notices."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from moejax_kernels import gpu, implementation
from moejax_kernels.segments import Segments

from moejax.config.data import DataConfig
from moejax.config.errors import ConfigError
from moejax.config.run import RunConfig, resolve
from moejax.config.training import LossConfig, TrainConfig
from moejax.data.batch import Batch
from moejax.data.packing import fill, fill_trees
from moejax.model import language_model
from moejax.parallel.mesh import mesh_from

MIN_SHARED, SEGMENTS, LENGTH, LONG = 4, 16, 64, 112
ALL = LossConfig(z_coef=0.01, balance="sequence", balance_coef=0.1, router_z_coef=0.1, bias_update="quantile")
WINDOW = tiny.GQAConfig(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True, output_gate=True, window=5, sinks=True)


def samples() -> list[list[np.ndarray]]:
    """Samples of two rows: a tree of three levels, with one sample that ends where it forks and one that stands twice, between
    documents of their own; and a tree of two levels between two that share too little."""
    rng = np.random.default_rng(0)
    draw = lambda num: rng.integers(0, 64, num).astype(np.int32)
    stem, branch = draw(9), draw(7)
    join = lambda *parts: np.concatenate(parts)
    first = [draw(5), join(stem, [1], draw(4)), join(stem, branch, [2], draw(3)), draw(3), join(stem, branch, [3], draw(6)), stem]
    twice = join(stem, branch, [5], draw(1))
    other = draw(12)
    second = [join(other[:3], draw(6)), *(join(other, [7 + number], draw(2 + 3 * number)) for number in range(3)), join(other[:3], draw(8))]
    return [[*first, twice, twice], second]


def shared_batch() -> Batch:
    return Batch.build(*fill_trees(samples(), LENGTH, MIN_SHARED), num_segments=SEGMENTS)


def written_out() -> Batch:
    """The same documents in the same rows, every one whole."""
    return Batch.build(*fill(samples(), LONG))


def run(config, losses, batch, **kwargs):
    with jax.enable_x64(True):
        return tiny.gradients(config, losses, tiny.weights(config, bias=0.1), batch, **kwargs)


def same(ours, theirs, tolerance=1e-9):
    """Loss and gradients; seen are 3e-15 (sums in another order), asked for is 1e-9."""
    assert abs(float(ours[0] - theirs[0])) <= tolerance * abs(float(theirs[0]))
    assert tiny.worst(ours[1], theirs[1])[0] < tolerance, tiny.worst(ours[1], theirs[1])


CASES = {
    "kda": (("kda",), {}, {}, {}),
    "gqa, two microbatches": (("gqa",), {}, {"balance": "global"}, {"accumulation": 2}),
    "dsa, two devices": (("dsa",), {}, {"index": "sparse"}, {"expert": 2}),
    "gqa with window and sinks": (("gqa",), {"gqa": WINDOW}, {"balance": "switch"}, {}),
    "hybrid, two devices": (("mla", "kda", "gdn", "dsa"), {}, {"index": "dense"}, {"fsdp": 2}),
    "scanned, soft constraint": (("kda", "gqa") * 2, {"moe": tiny.moe(overload_strength=1.0)}, {"balance": "global"}, {"expert": 2}),
}


@pytest.mark.parametrize("name", [name if at < 2 else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(CASES)])
def test_loss_gradients_and_statistics_are_those_of_the_batch_written_out(name):
    mixers, changes, losses, split = CASES[name]
    config, losses = tiny.model(*mixers, precision=tiny.FLOAT64, **changes), dataclasses.replace(ALL, **losses)
    ours, theirs = run(config, losses, shared_batch(), **split), run(config, losses, written_out())
    same(ours, theirs)
    for total in ("nll", "z", "balance", "router_z", "index_kl"):
        np.testing.assert_allclose(getattr(ours[2], total), getattr(theirs[2], total), rtol=1e-9)
    for section, places in theirs[2].layers.items():
        for place, layer in places.items():
            seen = ours[2].layers[section][place]
            np.testing.assert_array_equal(seen["counted_E"], layer["load_E"])
            np.testing.assert_array_equal(seen["margins_EN"], layer["margins_EN"])
            assert 0 < seen["load_E"].sum() < layer["load_E"].sum()


def test_no_branch_sees_another():
    """Other tokens in one branch move nothing in its siblings: outputs and gradients stay to the last bit."""
    config = tiny.model("kda", "gqa", vocab_size=256)
    stem = np.arange(10)
    ids_L = np.repeat([0, 1, 2, 3, -1], [10, 9, 8, 7, 2])
    mesh = mesh_from()

    @functools.partial(jax.jit, compiler_options=tiny.QUICK_TO_COMPILE)
    def run(params, batch):
        def loss(params):
            output = language_model.forward(config, params, batch)
            return language_model.cross_entropy_sums(output, batch).loss_sum, output.hidden_BLD

        (_, hidden_BLD), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return hidden_BLD, grads["embed"]["weight_VD"]

    def siblings(seed):
        """The branches 1 and 3 have tokens of their own each; 2 has others each time."""
        middle = np.random.default_rng(seed).integers(100, 200, 7)
        tokens_L = np.concatenate([stem, [50], 60 + np.arange(8), [50], middle, [50], 80 + np.arange(6), [0, 0]])
        batch = Batch.build(tokens_L[None], ids_L[None], parent=[{1: 0, 2: 0, 3: 0}])
        with jax.set_mesh(mesh):
            hidden_BLD, grad_VD = run(tiny.lay(tiny.weights(config, bias=0.1), config, mesh), jax.device_put(batch))
        return np.asarray(hidden_BLD)[0, (ids_L == 0) | (ids_L == 1) | (ids_L == 3)], np.asarray(grad_VD)[60:100]

    want = siblings(0)
    assert all(np.abs(array).max() > 1e-3 for array in want)
    for ours, theirs in zip(siblings(1), want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


GPU_OPS = {
    "attention": lambda x, w, segments: api("attention")(x, x, x, scale=1.0, segments=segments),
    "causal_conv": lambda x, w, segments: api("causal_conv")(x[:, :, 0], jnp.ones((64, 4), x.dtype), segments=segments),
    "kda": lambda x, w, segments: api("kda")(x, x, x, x, w, segments=segments),
    "gated_delta": lambda x, w, segments: api("gated_delta")(x, x, x, w, w, segments=segments),
}


def api(op: str):
    return getattr(importlib.import_module(f"moejax_kernels.{op}.api"), op)


@pytest.mark.parametrize("op", GPU_OPS)
def test_on_a_gpu_trees_run_on_the_kernels_and_the_last_choice_is_remembered(op, monkeypatch):
    module = importlib.import_module(f"moejax_kernels.{op}.api")
    monkeypatch.setattr(gpu, "why_no_triton", lambda: None)
    monkeypatch.setattr(module, "IMPLEMENTATIONS", {name: lambda *_, name=name, **__: name for name in module.IMPLEMENTATIONS})
    monkeypatch.setattr(implementation, "_say", lambda *_: None)
    monkeypatch.setattr(implementation, "CHOSEN", {})
    ids_BL = np.repeat([0, 1, 2], 8)[None]
    x_BLHC, weight_BLH = jnp.ones((1, 24, 1, 64), jnp.bfloat16), jnp.ones((1, 24, 1), jnp.float32)
    run = lambda dtype, segments: GPU_OPS[op](x_BLHC.astype(dtype), weight_BLH, segments)
    assert run("bfloat16", Segments.build(ids_BL)) == run("bfloat16", Segments.build(ids_BL, parent=[{1: 0, 2: 0}])) == "triton_gpu"
    assert run("float16", Segments.build(ids_BL)) == implementation.CHOSEN[op] == "xla"
    assert run("bfloat16", Segments.build(ids_BL)) == implementation.CHOSEN[op] == "triton_gpu"  # also if it was made before


def test_pooled_index_keys_refuse_shared_prefixes_before_a_run():
    pooled = tiny.IndexerConfig(num_heads=2, head_dim=8, topk=4, pool=2, rotary_dim=4)
    config = RunConfig(
        name="pooled",
        model=tiny.model("dsa", indexer=pooled, vocab_size=256),
        data=DataConfig(share_prefixes=True),
        train=TrainConfig(train_only="^(?!.*indexer)"),
    )
    with pytest.raises(ConfigError, match=r"data\.share_prefixes is not built for pooled index keys \(model\.indexer\.pool=2\)"):
        resolve(config, 1)
    with pytest.raises(ConfigError, match=r"train\.rebuild_metadata builds borders from ids"):
        resolve(RunConfig(name="both", data=DataConfig(share_prefixes=True), train=TrainConfig(rebuild_metadata=True)), 1)
