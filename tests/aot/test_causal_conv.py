"""causal_conv compiled for GPUs that are not there: launches and spills."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from moejax_kernels.causal_conv import cases
from moejax_kernels.causal_conv.api import causal_conv

from moejax.plan import compiled, targets

pytestmark = pytest.mark.aot


def compile_both_ways(case, target):
    """Forward and backward, bfloat16."""
    call = functools.partial(causal_conv, segments=case.segments(), implementation="triton_gpu")

    def both_ways(x, weight, history, cotangent):
        y, transpose = jax.vjp(lambda x, weight, history: call(x, weight, history_B3D=history)[0], x, weight, history)
        return y, transpose(cotangent)

    x, weight, history = case.shapes(jnp.bfloat16)
    return targets.compile_for(target, both_ways, x, weight, history, x)


@pytest.mark.parametrize("case", cases.REAL, ids=str)
@pytest.mark.parametrize("name", targets.TARGETS)
def test_one_launch_forward_two_backward_and_no_spills(name, case):
    target = targets.TARGETS[name]
    lowered, program = compile_both_ways(case, target)
    uses = compiled.kernel_uses(lowered, target)
    assert sorted(use.name for use in uses) == ["_backward", "_forward"]
    assert all(use.spilled_bytes == 0 for use in uses), uses
    launches = compiled.launches(program)
    assert launches.pop("triton") == 2
    assert sum(launches.values()) == 1, launches  # the sum of the weight's partial gradients


@pytest.mark.parametrize("name", targets.TARGETS)
def test_trees_take_the_same_kernels(name):
    target = targets.TARGETS[name]
    lowered, program = compile_both_ways(dataclasses.replace(cases.REAL[0], documents=(1500, 1300, 1296), parents=(-1, 0, 0)), target)
    uses = compiled.kernel_uses(lowered, target)
    assert sorted(use.name for use in uses) == ["_backward", "_forward"]
    assert all(use.spilled_bytes == 0 for use in uses), uses
    assert compiled.launches(program)["triton"] == 2
