"""grouped_matmul: against numpy loops, for awkward sizes, with gradients, inside shard_map."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from moejax_kernels.grouped_matmul import cases, grouped_matmul

BOTH = pytest.mark.parametrize("implementation", ["reference", "xla"])
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 5e-3}  # of the peak: rounding of sums of few hundred terms, or of the result


@functools.partial(jax.jit, static_argnames="implementation")
def run(x_RD, w_EDF, group_sizes_E, dy_RF, *, implementation):
    y_RF, transpose = jax.vjp(lambda x, w: grouped_matmul(x, w, group_sizes_E, implementation=implementation), x_RD, w_EDF)
    return y_RF, *transpose(dy_RF)


def loops(x_RD, w_EDF, sizes, dy_RF):
    x_RD, w_EDF, dy_RF = (np.asarray(array, np.float64) for array in (x_RD, w_EDF, dy_RF))
    y_RF, dx_RD, dw_EDF = np.zeros_like(dy_RF), np.zeros_like(x_RD), np.zeros_like(w_EDF)
    start = 0
    for expert, size in enumerate(sizes):
        rows = slice(start, start + size)
        y_RF[rows] = x_RD[rows] @ w_EDF[expert]
        dx_RD[rows] = dy_RF[rows] @ w_EDF[expert].T
        dw_EDF[expert] = x_RD[rows].T @ dy_RF[rows]
        start += size
    return y_RF, dx_RD, dw_EDF


def check(got, want, tolerance):
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=0, atol=tolerance * max(np.abs(theirs).max(initial=0), 1e-30))


@BOTH
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float64") for case in cases.SMALL), (cases.SMALL[4], "float32"), (cases.SMALL[4], "bfloat16")], ids=str
)
def test_values_and_gradients_match_loops(case, dtype, implementation):
    with jax.enable_x64(dtype == "float64"):
        x_RD, w_EDF, group_sizes_E, dy_RF = case.arrays(dtype, seed=0)
        got = run(x_RD, w_EDF, group_sizes_E, dy_RF, implementation=implementation)
        assert [array.dtype for array in got] == [x_RD.dtype] * 3
        check(got, loops(x_RD, w_EDF, case.sizes, dy_RF), TOLERANCE[dtype])


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(borders=st.lists(st.integers(0, 300), min_size=5, max_size=5))
def test_any_sizes_match_loops(borders):
    sizes = np.diff(sorted(borders), prepend=0).tolist()
    case = cases.GroupedCase("drawn", 300, 4, 6, tuple(sizes))
    x_RD, w_EDF, group_sizes_E, dy_RF = case.arrays("float32", seed=1)
    check(run(x_RD, w_EDF, group_sizes_E, dy_RF, implementation="xla"), loops(x_RD, w_EDF, sizes, dy_RF), TOLERANCE["float32"])


@st.composite
def sizes_of_896(draw):
    """Skewed over all groups; or a few groups share the rows, or one has all, or nobody comes."""
    if draw(st.booleans()):
        return cases.skewed(draw(st.integers(0, 1200)), 896, seed=draw(st.integers(0, 99)))
    sizes, room = [0] * 896, 1200
    for group in draw(st.lists(st.integers(0, 895), max_size=6, unique=True)):
        sizes[group] = draw(st.one_of(st.just(room), st.integers(0, room)))
        room -= sizes[group]
    return tuple(sizes)


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(sizes=sizes_of_896())
def test_896_groups_match_loops(sizes):
    case = cases.GroupedCase("many", 1200, 4, 6, sizes)
    x_RD, w_EDF, group_sizes_E, dy_RF = case.arrays("float32", seed=2)
    check(run(x_RD, w_EDF, group_sizes_E, dy_RF, implementation="xla"), loops(x_RD, w_EDF, case.sizes, dy_RF), TOLERANCE["float32"])


@BOTH
def test_a_master_weight_is_rounded_for_the_product_and_its_gradient_is_not(implementation):
    case = cases.SMALL[4]
    x_RD, _, group_sizes_E, dy_RF = case.arrays("bfloat16", seed=5)
    w_EDF = case.arrays("float32", seed=6)[1]
    y_RF, dx_RD, dw_EDF = run(x_RD, w_EDF, group_sizes_E, dy_RF, implementation=implementation)
    assert (y_RF.dtype, dx_RD.dtype, dw_EDF.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    want_y, want_dx, want_dw = loops(x_RD, w_EDF.astype(jnp.bfloat16), case.sizes, dy_RF)
    check((y_RF, dx_RD), (want_y, want_dx), TOLERANCE["bfloat16"])
    check((dw_EDF,), (want_dw,), TOLERANCE["float32"])


@BOTH
def test_nan_in_padding_rows_reaches_nothing(implementation):
    case = cases.SMALL[4]
    x_RD, w_EDF, group_sizes_E, dy_RF = case.arrays("float32", seed=3)
    padding_R1 = jnp.arange(case.rows)[:, None] >= sum(case.sizes)
    y_RF, dx_RD, dw_EDF = map(
        np.asarray,
        run(
            jnp.where(padding_R1, jnp.nan, x_RD),
            w_EDF,
            group_sizes_E,
            jnp.where(padding_R1, jnp.nan, dy_RF) if implementation == "xla" else dy_RF,
            implementation=implementation,
        ),
    )
    assert not y_RF[sum(case.sizes) :].any()
    assert not dx_RD[sum(case.sizes) :].any()
    assert np.isfinite(dw_EDF).all()
    assert not dw_EDF[case.sizes.index(0)].any()


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_of_a_mesh_has_its_own_groups_and_a_shared_weight_sums_gradients(check_vma):
    """Rows and sizes are split over 4 devices, the weight is the same on all: its gradient is the sum over them."""
    sizes = np.array([[3, 0, 2], [0, 0, 0], [0, 8, 0], [1, 1, 1]])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    x_RD, w_EDF, _, dy_RF = cases.GroupedCase("split", 32, 4, 6, (0, 0, 0)).arrays("float32", seed=4)
    split = jax.shard_map(
        functools.partial(grouped_matmul, implementation="xla"),
        mesh=mesh,
        in_specs=(P("data"), P(), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )

    @jax.jit
    def value_and_gradients(x_RD, w_EDF, dy_RF):
        y_RF, transpose = jax.vjp(lambda x, w: split(x, w, jnp.asarray(sizes.reshape(-1), jnp.int32)), x_RD, w_EDF)
        return y_RF, *transpose(dy_RF)

    got = value_and_gradients(x_RD, w_EDF, dy_RF)
    parts = [loops(x_RD[8 * d : 8 * d + 8], w_EDF, sizes[d], dy_RF[8 * d : 8 * d + 8]) for d in range(4)]
    check(
        got,
        (np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), sum(part[2] for part in parts)),
        TOLERANCE["float32"],
    )


def test_temporaries_do_not_grow_with_the_number_of_groups():
    shape = jax.ShapeDtypeStruct
    arguments = shape((512, 32), jnp.float32), shape((896, 32, 16), jnp.float32), shape((896,), jnp.int32)
    memory = jax.jit(functools.partial(grouped_matmul, implementation="xla")).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * memory.output_size_in_bytes + 4 * 4 * 896


def test_bad_inputs_say_what_would_work():
    x_RD, w_EDF, sizes = jnp.zeros((5, 3)), jnp.zeros((2, 3, 4)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"w_EDF is \(2, 4, 4\), so D=4, but x_RD \(5, 3\) has D=3"):
        grouped_matmul(x_RD, jnp.zeros((2, 4, 4)), sizes)
    with pytest.raises(ValueError, match=r"x_RD is float32, w_EDF is bfloat16. Give w the dtype of x, or a wider one"):
        grouped_matmul(x_RD, w_EDF.astype(jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match="group_sizes_E must hold integers, got float32"):
        grouped_matmul(x_RD, w_EDF, jnp.zeros(2))
    with pytest.raises(ValueError, match="group_sizes_E must be an array, got list"):
        grouped_matmul(x_RD, w_EDF, [1, 2])
    with pytest.raises(ValueError, match="R=2147483648 is beyond 2147483647: positions are int32"):
        jax.eval_shape(grouped_matmul, jax.ShapeDtypeStruct((2**31, 3), jnp.float32), w_EDF, sizes)
