"""permute and unpermute compiled for GPUs: one launch each way, no spills."""

import functools

import jax
import jax.numpy as jnp
import pytest
from moejax_kernels.permute import cases, permute, unpermute

from moejax.plan import compiled, targets

pytestmark = pytest.mark.aot


def forward(x_TD, y_RD, probs_TK, plan):
    """One permute and one unpermute."""
    triton = functools.partial(permute, plan=plan, implementation="triton_gpu")
    return triton(x_TD), unpermute(y_RD, plan, probs_TK, implementation="triton_gpu")


def backward(x_TD, y_RD, probs_TK, plan):
    """Their gradients alone: the values are not asked for, so their launches go."""
    _, transpose = jax.vjp(lambda *arrays: forward(*arrays, plan), x_TD, y_RD, probs_TK)
    return transpose((y_RD, x_TD))


@pytest.mark.parametrize("case", cases.REAL, ids=str)
@pytest.mark.parametrize("target", targets.TARGETS)
def test_each_way_is_one_launch_without_spills(target, case):
    for function in (forward, backward):
        lowered, program = targets.compile_for(targets.TARGETS[target], function, *case.shapes(jnp.bfloat16))
        assert compiled.launches(program) == {"triton": 2}  # permute and unpermute
        uses = compiled.kernel_uses(lowered, targets.TARGETS[target])
        assert len(uses) == 2
        for use in uses:
            assert use.spilled_bytes == 0, use
        assert program.memory_analysis().temp_size_in_bytes < 1024  # XLA's own table of a tuple; no array beside the results
