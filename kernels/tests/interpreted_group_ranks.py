"""group_ranks in Triton's interpreter: run by test_group_ranks_triton.py in a process of its own."""

import numpy as np
import pytest
from moejax_kernels.group_ranks import cases, group_ranks

CASES = (
    *cases.SMALL,
    cases.RanksCase("a_block", 2048, 7),
    cases.RanksCase("blocks_and_a_row", 4097, 9),
    cases.RanksCase("fields_are_full", 4095, 5, (4, 4)),
    cases.RanksCase("three_groups_a_program", 70000, 7),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_and_counts_match_the_portable_version(case):
    ids_R = case.ids(seed=1)
    got, want = (group_ranks(ids_R, case.groups, implementation=implementation) for implementation in ("triton_gpu", "xla"))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("group", range(4))
def test_every_group_of_a_program_can_take_all_rows(group):
    case = cases.RanksCase("one_takes_all", 2**15 - 1, 4, (group, group))  # 15 bits: four groups in a word, all bits of one set
    rank_R, counts_E = group_ranks(case.ids(seed=0), case.groups, implementation="triton_gpu")
    np.testing.assert_array_equal(rank_R, np.arange(case.rows))
    np.testing.assert_array_equal(counts_E, np.where(np.arange(4) == group, case.rows, 0))
