"""grouped_matmul as Mosaic GPU kernels, in the GPU interpreter: memory poisoned with NaN, races detected, persistent programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from moejax_kernels.grouped_matmul import cases, mosaic_gpu, reference

TOLERANCE = {"bfloat16": 4e-3, "float32": 1e-5}  # of the peak: one bfloat16 rounding (2**-8), which another order of sums can flip
CASES = (
    cases.GroupedCase("unaligned_with_room", 136, 128, 64, (5, 0, 66, 20, 0)),
    cases.GroupedCase("one_takes_all_in_tall_tiles", 264, 64, 64, (0, 261)),
    cases.GroupedCase("nobody_comes", 64, 64, 64, (0, 0)),
    cases.GroupedCase("many", 96, 64, 64, cases.skewed(91, 11)),
)


@pytest.fixture(autouse=True)
def _few_cores(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "NUM_CORES", 2)  # so that a program goes through many tiles, and reuses its buffers


def interpreted(capfd, x_RD, w_EDF, group_sizes_E, dy_RF):
    """Value and gradients; outputs and shared memory start as NaN, copies run on threads of their own."""

    @jax.jit
    def both_ways(x_RD, w_EDF, dy_RF):
        y_RF, transpose = jax.vjp(lambda x, w: mosaic_gpu.grouped_matmul(x, w, group_sizes_E), x_RD, w_EDF)
        return y_RF, *transpose(dy_RF)

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        results = jax.block_until_ready(both_ways(x_RD, w_EDF, dy_RF))
    assert "RACE" not in capfd.readouterr().out  # how the interpreter reports one
    return results


@jax.jit
def defined(x_RD, w_EDF, group_sizes_E, dy_RF):
    y_RF, transpose = jax.vjp(lambda x, w: reference.grouped_matmul(x, w, group_sizes_E), x_RD, w_EDF)
    return y_RF, *transpose(dy_RF)


def check(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        ours, theirs, tolerance = np.asarray(ours, np.float64), np.asarray(theirs, np.float64), TOLERANCE[ours.dtype.name]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max(initial=0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_match_the_definition(case, capfd):
    arrays = case.arrays("bfloat16", seed=0)
    got = interpreted(capfd, *arrays)
    check(got, defined(*arrays))
    assert not np.asarray(got[0], np.float32)[sum(case.sizes) :].any()
    assert not np.asarray(got[1], np.float32)[sum(case.sizes) :].any()
    assert not np.asarray(got[2], np.float32)[np.asarray(case.sizes) == 0].any()


def test_nan_in_padding_rows_reaches_nothing_and_a_master_weights_gradient_is_not_rounded(capfd):
    case = CASES[0]
    x_RD, _, group_sizes_E, dy_RF = case.arrays("bfloat16", seed=1)
    w_EDF = case.arrays("float32", seed=2)[1]
    padding_R1 = jnp.arange(case.rows)[:, None] >= sum(case.sizes)
    x_poisoned, dy_poisoned = (jnp.where(padding_R1, jnp.nan, array) for array in (x_RD, dy_RF))
    got = interpreted(capfd, x_poisoned, w_EDF, group_sizes_E, dy_poisoned)
    assert got[2].dtype == jnp.float32
    check(got, defined(x_RD, w_EDF, group_sizes_E, dy_RF))


def test_the_interpreter_reports_races(capfd):
    """Without which the tests above could not fail for one."""

    def body(out_gmem, smem):
        smem[...] = jnp.full_like(smem[...], jax.lax.axis_index("thread"))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64,), jnp.int32),
        scratch_types=[plgpu.SMEM((64,), jnp.int32)],
        num_threads=2,
        thread_name="thread",
    )
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        jax.block_until_ready(kernel())
    assert "RACE" in capfd.readouterr().out


@pytest.mark.parametrize("sizes", [cases.skewed(1100, 896), (0,) * 896, (0,) * 895 + (1200,), (1200,), (7, 1193), (1,) * 896], ids=len)
def test_tiles_hold_every_row_once(sizes):
    tiles = jax.tree.map(np.asarray, mosaic_gpu._tiles(jnp.asarray(sizes, jnp.int32), 1200))
    group_of_row = np.repeat(np.arange(len(sizes) + 1), (*sizes, 1200 - sum(sizes)))
    seen = np.zeros(1200, int)
    for group, base, skip, count in zip(tiles.group_N, tiles.base_N, tiles.skip_N, tiles.count_N, strict=True):
        rows = slice(base + skip, base + skip + count)
        assert base % 8 == 0
        assert skip + count <= tiles.rows
        assert (group_of_row[rows] == group).all()
        seen[rows] += 1
    np.testing.assert_array_equal(seen, 1)
