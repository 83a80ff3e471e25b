"""causal_conv's Triton kernels, interpreted on the CPU."""

from interpreted import run_interpreted


def test_interpreted_kernels_match_golden_values_and_the_definition():
    run_interpreted("interpreted_causal_conv.py")
