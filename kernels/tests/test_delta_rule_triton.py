"""The Triton kernels of KDA and Gated DeltaNet: interpreted in a process of their own, and what they refuse."""

import jax.numpy as jnp
import pytest
from interpreted import run_interpreted
from moejax_kernels import delta_inputs
from moejax_kernels.delta_cases import DeltaCase
from moejax_kernels.gated_delta.api import gated_delta
from moejax_kernels.implementation import UnsupportedError
from moejax_kernels.kda.api import kda


@pytest.mark.aot
def test_interpreted_kernels_match_golden_values_and_the_definition():
    run_interpreted("interpreted_delta_rule.py")


@pytest.mark.parametrize("op", [kda, gated_delta])
def test_a_cpu_is_refused_by_name(op):
    inputs = DeltaCase("cpu", 1, (4,), 1, 1, 64, 64).arrays(jnp.float32, seed=0, decay_per_channel=op is kda)
    with pytest.raises(UnsupportedError, match=r"triton_gpu needs .* implementation='xla'"):
        op(*inputs[:5], implementation="triton_gpu")


def why_not(case, dtype=jnp.bfloat16):
    return delta_inputs.why_not_triton(*case.shapes(dtype, decay_per_channel=True))


def test_the_kernels_say_which_inputs_they_take():
    fits = DeltaCase("fits", 1, (4,), 1, 1, 96, 192)
    assert why_not(fits) is None and why_not(fits, jnp.float32) is None
    assert "got C=40 (q is (1, 4, 1, 40)) and M=64" in (why_not(DeltaCase("narrow", 1, (4,), 1, 1, 40, 64)) or "")
    assert "got q, k, v float16, float16, float16" in (why_not(fits, jnp.float16) or "")
