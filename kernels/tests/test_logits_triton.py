"""The Triton kernels of logit_sums and logit_gradients, interpreted on the CPU."""

import pytest
from interpreted import run_interpreted


@pytest.mark.aot
def test_interpreted_kernels_match_the_definition():
    run_interpreted("interpreted_logits.py")
