"""group_ranks as a Triton kernel: its tests, in Triton's interpreter."""

import pytest
from interpreted import run_interpreted


@pytest.mark.aot
def test_kernel_in_tritons_interpreter():
    run_interpreted("interpreted_group_ranks.py")
