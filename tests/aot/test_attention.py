"""attention compiled for GPUs that are not there: launches and spills."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from moejax_kernels.attention import attention, cases, triton_gpu

from moejax.plan import compiled, targets

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("case", cases.REAL, ids=str)
@pytest.mark.parametrize("name", targets.TARGETS)
def test_one_launch_forward_two_backward_and_no_spills(name, case):
    target = targets.TARGETS[name]
    call = functools.partial(attention, scale=case.key_dim**-0.5, segments=case.segments(), window=case.window, implementation="triton_gpu")

    def both_ways(q, k, v, sinks, cotangent):
        o, transpose = jax.vjp(lambda q, k, v, sinks: call(q, k, v, sinks_H=sinks), q, k, v, sinks)
        return o, transpose(cotangent)

    lowered, program = targets.compile_for(target, both_ways, *case.shapes(jnp.bfloat16))
    uses = compiled.kernel_uses(lowered, target)
    assert sorted(use.name for use in uses) == ["forward", "key_gradients", "query_gradients"]
    assert all(use.spilled_bytes == 0 for use in uses), uses
    launches = compiled.launches(program)
    assert launches.pop("triton") == 3
    # the keys' and the values' sums over parts of the query heads, where those are split; one for the gradient of the sinks
    keys = triton_gpu.tiles(target.name, case.key_dim, case.value_dim, jnp.bfloat16)[2].keys
    splits = triton_gpu.num_splits(-(-case.length // keys) * case.key_heads * case.rows, case.heads // case.key_heads)
    assert sum(launches.values()) <= 2 * (splits > 1) + case.has_sinks, launches


def test_keys_that_begin_before_the_queries_take_the_same_kernels():
    case, target = cases.REAL[1], targets.TARGETS["h200"]
    call = functools.partial(attention, scale=case.key_dim**-0.5, segments=case.segments(), implementation="triton_gpu")

    def both_ways(q, k, v, cotangent):
        o, transpose = jax.vjp(call, q, k, v)
        return o, transpose(cotangent)

    q, k, v, _, cotangent = case.shapes(jnp.bfloat16)
    shorter = lambda like: jax.ShapeDtypeStruct((like.shape[0], 1024, *like.shape[2:]), like.dtype)
    lowered, _ = targets.compile_for(target, both_ways, shorter(q), k, v, shorter(cotangent))
    uses = compiled.kernel_uses(lowered, target)
    assert sorted(use.name for use in uses) == ["forward", "key_gradients", "query_gradients"]
    assert all(use.spilled_bytes == 0 for use in uses), uses


@pytest.mark.parametrize("case", cases.REAL, ids=str)
@pytest.mark.parametrize("name", targets.TARGETS)
def test_trees_take_the_same_kernels(name, case):
    case, target = dataclasses.replace(case, documents=(1500, 1300, 1296), parents=(-1, 0, 0)), targets.TARGETS[name]
    call = functools.partial(attention, scale=case.key_dim**-0.5, segments=case.segments(), window=case.window, implementation="triton_gpu")

    def both_ways(q, k, v, cotangent):
        o, transpose = jax.vjp(call, q, k, v)
        return o, transpose(cotangent)

    q, k, v, _, cotangent = case.shapes(jnp.bfloat16)
    lowered, _ = targets.compile_for(target, both_ways, q, k, v, cotangent)
    uses = compiled.kernel_uses(lowered, target)
    assert sorted(use.name for use in uses) == ["forward", "key_gradients", "query_gradients"]
    assert all(use.spilled_bytes == 0 for use in uses), uses
