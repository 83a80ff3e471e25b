"""gated_activation compiled for GPUs that are not there: one launch each way, nothing spilled."""

import functools

import jax
import jax.numpy as jnp
import pytest
from moejax_kernels.gated_activation import cases, gated_activation

from moejax.plan import compiled, targets

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("case", cases.REAL, ids=str)
@pytest.mark.parametrize("name", targets.TARGETS)
def test_one_launch_each_way_and_no_spills(name, case):
    target = targets.TARGETS[name]
    call = functools.partial(gated_activation, **dict(case.options), implementation="triton_gpu")

    def both_ways(gate, up, cotangent):
        out, transpose = jax.vjp(call, gate, up)
        return out, transpose(cotangent)

    gate, up = case.shapes(jnp.bfloat16)
    lowered, program = targets.compile_for(target, both_ways, gate, up, gate)
    uses = compiled.kernel_uses(lowered, target)
    assert sorted(use.name for use in uses) == ["_backward", "_forward"]
    assert all(use.spilled_bytes == 0 for use in uses), uses
    assert compiled.launches(program) == {"triton": 2}
