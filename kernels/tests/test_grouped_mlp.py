"""grouped_mlp: against numpy loops and its definition, for awkward sizes, with gradients, inside shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from moejax_kernels import UnsupportedError, grouped_mlp
from moejax_kernels.gated_activation import cases as activations
from moejax_kernels.grouped_matmul.cases import skewed
from moejax_kernels.grouped_mlp import cases

TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 2e-2}
"""Of the peak. float32: rounding of three chained sums of a few hundred terms; bfloat16: four chained roundings of 2**-9."""
NAMES = ("y_RD", "dx_RD", "dgate_EDF", "dup_EDF", "ddown_EFD")


@functools.partial(jax.jit, static_argnames=("implementation", "kind", "limit", "beta", "linear_beta"))
def run(x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, dy_RD, **options):
    y_RD, transpose = jax.vjp(lambda x, g, u, d: grouped_mlp(x, g, u, d, group_sizes_E, **options), x_RD, gate_EDF, up_EDF, down_EFD)
    return y_RD, *transpose(dy_RD)


def loops(x_RD, gate_EDF, up_EDF, down_EFD, sizes, dy_RD):
    """SwiGLU by hand in float64."""
    x, gate, up, down, dy = (np.asarray(array, np.float64) for array in (x_RD, gate_EDF, up_EDF, down_EFD, dy_RD))
    y, dx, dgate, dup, ddown = (np.zeros_like(array) for array in (x, x, gate, up, down))
    start = 0
    for e, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        g, u = x[rows] @ gate[e], x[rows] @ up[e]
        sigmoid = 1 / (1 + np.exp(-g))
        h = g * sigmoid * u
        y[rows], dh = h @ down[e], dy[rows] @ down[e].T
        dg, du = dh * u * sigmoid * (1 + g * (1 - sigmoid)), dh * g * sigmoid
        dx[rows] = dg @ gate[e].T + du @ up[e].T
        dgate[e], dup[e], ddown[e] = x[rows].T @ dg, x[rows].T @ du, h.T @ dy[rows]
        start += size
    return y, dx, dgate, dup, ddown


def check(got, want, tolerance):
    for name, ours, theirs in zip(NAMES, got, want, strict=True):
        error = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)).max(initial=0)
        assert error <= tolerance * max(np.abs(np.asarray(theirs, np.float64)).max(initial=0), 1e-30), name


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float64") for case in cases.SMALL), (cases.SMALL[4], "float32"), (cases.SMALL[4], "bfloat16")], ids=str
)
def test_values_and_gradients_match_loops(case, dtype, implementation):
    with jax.enable_x64(dtype == "float64"):
        arrays = case.arrays(dtype, seed=0)
        got = run(*arrays, implementation=implementation)
        assert {array.dtype for array in got} == {arrays[0].dtype}
        check(got, loops(*arrays), TOLERANCE[dtype])


@pytest.mark.parametrize("options", activations.SMALL, ids=str)
def test_every_activation_matches_the_definition(options):
    with jax.enable_x64():
        arrays = cases.SMALL[4].arrays("float64", seed=0)
        check(run(*arrays, **options, implementation="xla"), run(*arrays, **options, implementation="reference"), TOLERANCE["float64"])


def test_896_groups_match_loops():
    case = cases.MLPCase("many", 1200, 4, 6, skewed(1100, 896))
    arrays = case.arrays("float32", seed=2)
    check(run(*arrays, implementation="xla"), loops(*arrays), TOLERANCE["float32"])


def test_master_weights_get_gradients_that_are_not_rounded():
    arrays = cases.SMALL[4].arrays("bfloat16", w_dtype="float32", seed=5)
    got = run(*arrays, implementation="xla")
    assert [array.dtype for array in got] == [jnp.bfloat16] * 2 + [jnp.float32] * 3
    x_RD, gate_EDF, up_EDF, down_EFD, sizes, dy_RD = arrays
    round_ = lambda w_EDF: w_EDF.astype(jnp.bfloat16)
    check(got, loops(x_RD, round_(gate_EDF), round_(up_EDF), round_(down_EFD), sizes, dy_RD), TOLERANCE["bfloat16"])
    assert any((array != array.astype(jnp.bfloat16).astype(jnp.float32)).any() for array in got[2:])


def test_nan_in_padding_rows_reaches_nothing():
    case = cases.SMALL[4]
    x_RD, gate_EDF, up_EDF, down_EFD, sizes, dy_RD = case.arrays("float32", seed=3)
    padding_R1 = jnp.arange(case.rows)[:, None] >= sum(case.sizes)
    poison = lambda array: jnp.where(padding_R1, jnp.nan, array)
    clear = lambda array: jnp.where(padding_R1, 0, array)
    got = run(poison(x_RD), gate_EDF, up_EDF, down_EFD, sizes, poison(dy_RD), implementation="xla")
    check(got, run(clear(x_RD), gate_EDF, up_EDF, down_EFD, sizes, clear(dy_RD), implementation="xla"), 0)
    assert not np.asarray(got[0])[sum(case.sizes) :].any()
    assert not any(np.asarray(array)[case.sizes.index(0)].any() for array in got[2:]), "an empty group's weights get gradient 0"


@pytest.mark.parametrize("check_vma", [True, False])
def test_shared_weights_sum_the_gradients_of_all_devices(check_vma):
    sizes = np.array([[3, 0, 2], [0, 0, 0], [0, 8, 0], [1, 1, 1]])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    x_RD, gate_EDF, up_EDF, down_EFD, _, dy_RD = cases.MLPCase("split", 32, 4, 6, (0, 0, 0)).arrays("float32", seed=4)
    split = jax.shard_map(
        functools.partial(grouped_mlp, implementation="xla"),
        mesh=mesh,
        in_specs=(P("data"), P(), P(), P(), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )

    @jax.jit
    def value_and_gradients(x_RD, dy_RD, gate_EDF, up_EDF, down_EFD):
        shares = jnp.asarray(sizes.reshape(-1), jnp.int32)
        y_RD, transpose = jax.vjp(lambda x, g, u, d: split(x, g, u, d, shares), x_RD, gate_EDF, up_EDF, down_EFD)
        return y_RD, *transpose(dy_RD)

    of = lambda array, d: array[8 * d : 8 * d + 8]
    parts = [loops(of(x_RD, d), gate_EDF, up_EDF, down_EFD, sizes[d], of(dy_RD, d)) for d in range(4)]
    joined = [np.concatenate([part[i] for part in parts]) for i in range(2)], [sum(part[i] for part in parts) for i in range(2, 5)]
    check(value_and_gradients(x_RD, dy_RD, gate_EDF, up_EDF, down_EFD), joined[0] + joined[1], TOLERANCE["float32"])


def test_what_lies_between_the_products_never_exists_as_a_whole():
    """Forward and backward hold gate, up and results in full, beside them blocks of 512 rows."""
    rows, width, hidden, num_groups = 8192, 64, 256, 8
    shape = jax.ShapeDtypeStruct
    wide, tall = shape((num_groups, width, hidden), jnp.float32), shape((num_groups, hidden, width), jnp.float32)
    x_RD = shape((rows, width), jnp.float32)
    memory = run.lower(x_RD, wide, wide, tall, shape((num_groups,), jnp.int32), x_RD, implementation="xla").compile().memory_analysis()
    assert memory is not None
    gate_and_up, blocks = 2 * rows * hidden * 4, 8 * 512 * hidden * 4
    assert memory.temp_size_in_bytes < gate_and_up + blocks


def test_bad_inputs_say_what_would_work():
    x_RD, wide, tall, sizes = jnp.zeros((5, 3)), jnp.zeros((2, 3, 4)), jnp.zeros((2, 4, 3)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"down_EFD is \(2, 3, 4\), so F=3, but gate_EDF \(2, 3, 4\) has F=4"):
        grouped_mlp(x_RD, wide, wide, wide, sizes)
    with pytest.raises(ValueError, match=r"x_RD is float32, up_EDF is bfloat16. Give it the dtype of x, or a wider one"):
        grouped_mlp(x_RD, wide, wide.astype(jnp.bfloat16), tall, sizes)
    with pytest.raises(ValueError, match=r"grouped_mlp: kind='situ' needs beta > 0, got beta=None"):
        grouped_mlp(x_RD, wide, wide, tall, sizes, kind="situ")
    with pytest.raises(UnsupportedError, match="grouped_mlp: triton_gpu"):
        grouped_mlp(x_RD, wide, wide, tall, sizes, implementation="triton_gpu")
