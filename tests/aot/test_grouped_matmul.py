"""grouped_matmul compiled for GPUs: launches, and no spills."""

import functools

import jax
import jax.numpy as jnp
import pytest
from moejax_kernels.grouped_matmul import cases, grouped_matmul

from moejax.plan import compiled, targets

pytestmark = pytest.mark.aot


def both_ways(implementation, x_RD, w_EDF, group_sizes_E, dy_RF):
    call = functools.partial(grouped_matmul, group_sizes_E=group_sizes_E, implementation=implementation)
    y_RF, transpose = jax.vjp(call, x_RD, w_EDF)
    return y_RF, transpose(dy_RF)


@pytest.mark.parametrize("case", cases.REAL, ids=str)
@pytest.mark.parametrize("target", targets.TARGETS)
def test_triton_is_two_launches_each_way_without_spills(target, case):
    function = functools.partial(both_ways, "triton_gpu")
    lowered, program = targets.compile_for(targets.TARGETS[target], function, *case.shapes(jnp.bfloat16))
    assert compiled.launches(program) == {"triton": 4}  # table and product; gradients of rows and weights
    uses = compiled.kernel_uses(lowered, targets.TARGETS[target])
    assert len(uses) == 4
    for use in uses:
        print(target, case, use)
        assert use.spilled_bytes == 0, use
