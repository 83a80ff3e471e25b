"""grouped_matmul as Triton kernels: its tests, in Triton's interpreter; what the GPU versions refuse, here."""

import jax
import jax.numpy as jnp
import pytest
from interpreted import run_interpreted
from moejax_kernels import UnsupportedError, gpu, grouped_matmul


@pytest.mark.aot
def test_kernels_in_tritons_interpreter():
    run_interpreted("interpreted_grouped_matmul.py")


def test_without_a_gpu_the_names_say_what_would_work():
    x_RD, w_EDF, sizes = jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((2, 64, 64), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    for name in ("triton_gpu", "mosaic_gpu"):
        with pytest.raises(UnsupportedError, match=rf"grouped_matmul: {name} needs .*implementation='xla'"):
            grouped_matmul(x_RD, w_EDF, sizes, implementation=name)
    assert grouped_matmul(x_RD, w_EDF, sizes).shape == (64, 64)  # by default what runs here does


@pytest.mark.parametrize(
    ("kind", "rows", "width", "dtype", "words"),
    [
        ("NVIDIA B200", 64, 64, "bfloat16", "needs a Hopper GPU .* this program is for NVIDIA B200"),
        ("NVIDIA A100-SXM4-80GB", 64, 64, "bfloat16", "needs a Hopper GPU .* this program is for NVIDIA A100"),
        ("NVIDIA H200", 64, 64, "float32", "multiplies bfloat16 or float16, got x_RD in float32"),
        ("NVIDIA H200", 64, 40, "bfloat16", r"D and F multiples of 64, got w_EDF \(2, 40, 64\)"),
        ("NVIDIA H100 80GB HBM3", 65, 64, "bfloat16", r"R a multiple of 8 and at least 64, got x_RD \(65, 64\)"),
        ("NVIDIA H100 80GB HBM3", 56, 64, "bfloat16", r"R a multiple of 8 and at least 64, got x_RD \(56, 64\)"),
    ],
)
def test_what_mosaic_gpu_cannot_run_is_said(monkeypatch, kind, rows, width, dtype, words):
    monkeypatch.setattr(gpu, "device_kind", lambda: kind)
    x_RD, w_EDF = jnp.zeros((rows, width), dtype), jnp.zeros((2, width, 64), dtype)
    with pytest.raises(UnsupportedError, match=f"grouped_matmul: mosaic_gpu .*{words}"):
        grouped_matmul(x_RD, w_EDF, jnp.zeros(2, jnp.int32), implementation="mosaic_gpu")


def test_triton_gpu_takes_no_float64():
    with jax.enable_x64(True), pytest.raises(UnsupportedError, match=r"triton_gpu accumulates in float32 .* got x_RD in float64"):
        grouped_matmul(
            jnp.zeros((3, 4), jnp.float64), jnp.zeros((1, 4, 5), jnp.float64), jnp.zeros(1, jnp.int32), implementation="triton_gpu"
        )
