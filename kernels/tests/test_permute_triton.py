"""permute and unpermute as Triton kernels: their tests, in Triton's interpreter; what they refuse, here."""

import jax.numpy as jnp
import pytest
from interpreted import run_interpreted
from moejax_kernels import UnsupportedError
from moejax_kernels.permute import cases, permute, unpermute


@pytest.mark.aot
def test_kernels_in_tritons_interpreter():
    run_interpreted("interpreted_permute.py")


def test_without_a_gpu_the_name_says_what_would_work():
    case = cases.SMALL[0]
    plan, (x_TD, y_RD, probs_TK) = case.plan(seed=0), case.arrays("float32", seed=1)
    with pytest.raises(UnsupportedError, match=r"permute: triton_gpu needs .*implementation='xla'"):
        permute(x_TD, plan, implementation="triton_gpu")
    with pytest.raises(UnsupportedError, match=r"unpermute: triton_gpu needs .*implementation='xla'"):
        unpermute(y_RD, plan, probs_TK, implementation="triton_gpu")
    assert permute(x_TD, plan).dtype == jnp.float32  # by default what runs here does
