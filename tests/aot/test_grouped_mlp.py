"""grouped_mlp compiled for GPUs: launches each way, no spills, and which products run where."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from moejax_kernels.grouped_mlp import cases, grouped_mlp

from moejax.plan import compiled, targets

pytestmark = pytest.mark.aot
_, K3_PART, *_, SMALLER = cases.REAL  # the first: all experts of Kimi K3 leave a GPU no room for their gradients
# one case is enough for the H200, whose code is the H100's
TRITON = [(target, case) for target in targets.TARGETS for case in cases.REAL[1:] if target != "h200" or case is K3_PART]
MOSAIC = [("h100", K3_PART, "bfloat16"), ("h100", SMALLER, "float32"), ("h200", K3_PART, "bfloat16")]


def forward(implementation, x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E):
    return grouped_mlp(x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, implementation=implementation)


def both_ways(implementation, x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, dy_RD):
    call = functools.partial(forward, implementation, group_sizes_E=group_sizes_E)
    y_RD, transpose = jax.vjp(lambda x, gate, up, down: call(x, gate, up, down), x_RD, gate_EDF, up_EDF, down_EFD)
    return y_RD, transpose(dy_RD)


@pytest.mark.parametrize(("target", "case"), TRITON, ids=str)
def test_triton_is_five_launches_forward_and_nine_backward_without_spills(target, case):
    function = functools.partial(both_ways, "triton_gpu")
    lowered, program = targets.compile_for(targets.TARGETS[target], function, *case.shapes(jnp.bfloat16))
    # forward: table, three products, activation; backward: table and activation again, its gradient, six products; XLA adds two parts of dx
    assert compiled.launches(program) == {"triton": 5 + 9, "fusion": 1}
    uses = compiled.kernel_uses(lowered, targets.TARGETS[target])
    assert {use.name for use in uses} == {"_table", "_rows_times_weights", "_weight_grads", "_forward", "_backward"}
    assert all(use.spilled_bytes == 0 for use in uses), uses


@pytest.mark.parametrize(("target", "case", "w_dtype"), MOSAIC, ids=str)
def test_mosaic_is_one_launch_for_each_product_without_spills(target, case, w_dtype, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    function = functools.partial(both_ways, "mosaic_gpu")
    lowered, program = targets.compile_for(targets.TARGETS[target], function, *case.shapes(jnp.bfloat16, w_dtype=w_dtype))
    launches = compiled.launches(program)
    assert (launches["mosaic"], launches["triton"]) == (3 + 6, 1 + 2)  # products; the activation, again, and its gradient
    words = "".join(capfd.readouterr())
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", words)
    assert spills == [("0", "0", "0")] * 9
    assert all(use.spilled_bytes == 0 for use in compiled.kernel_uses(lowered, targets.TARGETS[target]))


@pytest.mark.parametrize(("target", "mosaic", "triton"), [("a100", 0, 5), ("h100", 3, 1), ("h200", 3, 1), ("b200", 0, 5)])
def test_the_fastest_version_that_runs_is_picked(target, mosaic, triton):
    """An A100 and a B200 have no wgmma."""
    case = cases.MLPCase("small", 128, 64, 128, (100, 20))
    _, program = targets.compile_for(targets.TARGETS[target], functools.partial(forward, None), *case.shapes(jnp.bfloat16)[:-1])
    launches = compiled.launches(program)
    assert (launches["mosaic"], launches["triton"]) == (mosaic, triton)
