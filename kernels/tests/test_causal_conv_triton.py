"""causal_conv's Triton kernels, interpreted on the CPU."""

import pytest
from interpreted import run_interpreted


@pytest.mark.aot
def test_interpreted_kernels_match_golden_values_and_the_definition():
    run_interpreted("interpreted_causal_conv.py")
