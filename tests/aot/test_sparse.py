"""Sparse attention, its index and the index's loss, compiled for GPUs that are not there: launches and spills."""

import functools

import jax
import jax.numpy as jnp
import pytest
from moejax_kernels.index_kl import index_kl
from moejax_kernels.index_topk import index_topk
from moejax_kernels.sparse_attention import cases, sparse_attention

from moejax.plan.compiled import kernel_uses, launches
from moejax.plan.targets import TARGETS, compile_for

pytestmark = pytest.mark.aot
MODELS = {case.name: case for case in cases.REAL}
ON_EACH_TARGET = pytest.mark.parametrize("target", ["a100", "h100", "h200", "b200"])


def compiled(target, function, shapes, names):
    lowered, done = compile_for(TARGETS[target], function, *(shapes[name] for name in names))
    uses = kernel_uses(lowered, TARGETS[target])
    assert [use for use in uses if use.spilled_bytes] == []
    return {use.name for use in uses}, launches(done)


def attend(q, k, v, ids, do, *, case):
    call = lambda q, k, v: sparse_attention(
        q, k, v, ids, scale=0.1, value_dim=case.value_dim if case.latent else None, implementation="triton_gpu"
    )
    o, transpose = jax.vjp(call, q, k, v)
    return o, transpose(do)


@ON_EACH_TARGET
@pytest.mark.parametrize("model", ["deepseek_v32", "mha_192"])
def test_attention_is_one_launch_forward_and_three_backward_without_spills(model, target):
    """Backward: queries, keys, and the cast of the float32 sums of the keys' gradients, by XLA where there are no values beside them."""
    case = MODELS[model]
    kernels, counts = compiled(target, functools.partial(attend, case=case), case.shapes(jnp.bfloat16), ("q", "k", "v", "ids", "do"))
    assert kernels == {"attend", "gradient_of_queries", "gradient_of_keys"} | (set() if case.latent else {"cast_both"})
    assert counts["triton"] == len(kernels)
    assert counts.total() == 4


@pytest.mark.parametrize("target", ["a100", "h100"])
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_every_width_of_grouped_heads_compiles_without_spills(width, target):
    case = cases.RealSparseCase(name="width", length=2048, heads=32, key_heads=4, key_dim=width, value_dim=width, latent=False, topk=1024)
    compiled(target, functools.partial(attend, case=case), case.shapes(jnp.bfloat16), ("q", "k", "v", "ids", "do"))


@ON_EACH_TARGET
def test_the_choice_is_one_launch_without_spills(target):
    case = MODELS["deepseek_v32"]
    choose = functools.partial(index_topk, topk=case.topk, implementation="triton_gpu")
    kernels, counts = compiled(target, choose, case.shapes(jnp.bfloat16), ("index_q", "index_k", "index_w"))
    assert kernels == {"choose_keys"}
    assert counts["triton"] == 1
    assert counts.total() <= 2


@ON_EACH_TARGET
@pytest.mark.parametrize("dense", [False, True], ids=["chosen", "all"])
def test_the_loss_compiles_without_spills(target, dense):
    case = MODELS["deepseek_v32"]

    def loss(q, k, index_q, index_k, index_w, ids, dkl):
        call = lambda *index: index_kl(q, k, *index, None if dense else ids, scale=0.1, implementation="triton_gpu")
        kl, transpose = jax.vjp(call, index_q, index_k, index_w)
        return kl, transpose(dkl)

    names = ("q", "k", "index_q", "index_k", "index_w", "ids", "dkl")
    _, counts = compiled(target, loss, case.shapes(jnp.bfloat16), names)
    assert counts["triton"] == (3 if dense else 2)
