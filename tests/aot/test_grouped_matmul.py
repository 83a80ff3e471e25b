"""grouped_matmul compiled for GPUs: launches, no spills, and which version runs where."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from moejax_kernels.grouped_matmul import cases, grouped_matmul

from moejax.plan import compiled, targets

pytestmark = pytest.mark.aot
K3_ALL, K3_PART, *_, SMALLER = cases.REAL
# one case is enough for the H200, whose code is the H100's
TRITON = [(target, case) for target in targets.TARGETS for case in cases.REAL if target != "h200" or case is K3_ALL]
MOSAIC = [("h100", K3_ALL, "bfloat16"), ("h100", K3_PART, "float32"), ("h100", SMALLER, "bfloat16"), ("h200", K3_ALL, "bfloat16")]


def both_ways(implementation, x_RD, w_EDF, group_sizes_E, dy_RF):
    call = functools.partial(grouped_matmul, group_sizes_E=group_sizes_E, implementation=implementation)
    y_RF, transpose = jax.vjp(call, x_RD, w_EDF)
    return y_RF, transpose(dy_RF)


@pytest.mark.parametrize(("target", "case"), TRITON, ids=str)
def test_triton_is_two_launches_each_way_without_spills(target, case):
    function = functools.partial(both_ways, "triton_gpu")
    lowered, program = targets.compile_for(targets.TARGETS[target], function, *case.shapes(jnp.bfloat16))
    assert compiled.launches(program) == {"triton": 4}  # table and product; gradients of rows and weights
    uses = compiled.kernel_uses(lowered, targets.TARGETS[target])
    assert len(uses) == 4
    assert all(use.spilled_bytes == 0 for use in uses), uses


@pytest.mark.parametrize(("target", "case", "w_dtype"), MOSAIC, ids=str)
def test_mosaic_is_one_launch_for_each_product_without_spills(target, case, w_dtype, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    function = functools.partial(both_ways, "mosaic_gpu")
    _, program = targets.compile_for(targets.TARGETS[target], function, *case.shapes(jnp.bfloat16, w_dtype=w_dtype))
    assert compiled.launches(program)["mosaic"] == 3  # the product, the gradients of rows and of weights
    words = "".join(capfd.readouterr())
    assert len(re.findall(r"Used \d+ registers", words)) == 3
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", words) == [("0", "0", "0")] * 3


@pytest.mark.parametrize(("target", "runs"), [("a100", "triton"), ("h100", "mosaic"), ("h200", "mosaic"), ("b200", "triton")])
def test_the_fastest_version_that_runs_is_picked(target, runs):
    """An A100 and a B200 have no wgmma."""
    case = cases.GroupedCase("small", 128, 64, 128, (100, 20))
    _, program = targets.compile_for(targets.TARGETS[target], functools.partial(both_ways, None), *case.shapes(jnp.bfloat16))
    assert compiled.launches(program)[runs] >= 3
    assert compiled.launches(program)["mosaic" if runs == "triton" else "triton"] == 0
