"""gated_activation's Triton kernels, interpreted on the CPU."""

from interpreted import run_interpreted


def test_interpreted_kernels_match_the_definition():
    run_interpreted("interpreted_gated_activation.py")
