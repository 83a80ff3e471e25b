"""logit_sums and logit_gradients compiled for GPUs that are not there: one launch each, nothing spilled, no float32 logits."""

import functools

import jax.numpy as jnp
import pytest
from moejax_kernels import logit_gradients, logit_sums
from moejax_kernels.logits import cases

from moejax.plan import compiled, targets

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("case", cases.REAL, ids=str)
@pytest.mark.parametrize("name", targets.TARGETS)
def test_one_launch_each_and_no_spills(name, case):
    target, shapes = targets.TARGETS[name], case.shapes(jnp.bfloat16)

    def both(inputs):
        of_sums = {name: inputs[name] for name in ("hidden_TD", "weight_DV", "targets_T")}
        sums = functools.partial(logit_sums, **case.options, implementation="triton_gpu")(**of_sums)
        return sums, functools.partial(logit_gradients, **case.options, implementation="triton_gpu")(**inputs)

    lowered, program = targets.compile_for(target, both, shapes)
    uses = compiled.kernel_uses(lowered, target)
    assert sorted(use.name for use in uses) == ["_gradients", "_sums"]
    assert all(use.spilled_bytes == 0 for use in uses), uses
    assert compiled.launches(program)["triton"] == 2
    assert program.memory_analysis().temp_size_in_bytes < case.tokens * case.columns  # three numbers for each 128 columns
