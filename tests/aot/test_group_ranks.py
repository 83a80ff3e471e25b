"""group_ranks compiled for GPUs that are not there: one launch, nothing spilled, nothing held."""

import functools

import pytest
from moejax_kernels.group_ranks import cases, group_ranks

from moejax.plan import compiled, targets

pytestmark = pytest.mark.aot
ODD = cases.RanksCase("odd_rows_and_groups", 4097, 5)


@pytest.mark.parametrize("case", (*cases.REAL, cases.SMALL[0], ODD), ids=str)
@pytest.mark.parametrize("target", targets.TARGETS)
def test_ranks_are_one_launch_without_spills(target, case):
    function = functools.partial(group_ranks, num_groups=case.groups, implementation="triton_gpu")
    lowered, program = targets.compile_for(targets.TARGETS[target], function, case.shape())
    assert compiled.launches(program) == {"triton": 1}
    (use,) = compiled.kernel_uses(lowered, targets.TARGETS[target])
    assert use.spilled_bytes == 0, use
    assert program.memory_analysis().temp_size_in_bytes < 1024  # XLA's own table of a tuple; no array beside the results
