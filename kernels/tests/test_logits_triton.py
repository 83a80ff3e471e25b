"""The Triton kernels of logit_sums and logit_gradients, interpreted on the CPU."""

from interpreted import run_interpreted


def test_interpreted_kernels_match_the_definition():
    run_interpreted("interpreted_logits.py")
