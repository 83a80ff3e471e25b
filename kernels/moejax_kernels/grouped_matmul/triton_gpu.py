"""Grouped matmul on the GPU: two launches forward (a table of tiles, the product), two backward (the gradients of rows and weights).

A tile is up to BM rows of one group. The table says which; it is made on the device and saved for backward (12 bytes a tile, 4 a
group) beside the inputs. Rows beyond the sum of the sizes are one more group, whose tiles write zeros. Programs that follow each
other share a weight tile, so that with few rows per group each weight comes from memory once. A weight wider than the rows is cast
before the launch, by XLA, once in each direction.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax_kernels import triton_launch  # isort: skip  (before triton: it points triton at the right assembler)

import triton
import triton.language as tl

TABLE_COMPARISONS = 8192
"""Tiles times groups of one program of the table, which compares each tile's number with the ends of all groups: 64 in a thread."""
TILES_TOGETHER = 8
"""Tiles of rows that are multiplied with one tile of columns before the next: rows and weights meet again in the L2 cache."""


class Tiling(NamedTuple):
    """Sizes of the product's tiles and how a program works on them."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


@triton.jit
def _table(
    sizes_ptr, tiles_ptr, ends_ptr, R: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr
):
    """tiles = [3, N]: a tile's group (E: padding, beyond E: no tile), its first row, the end of its rows. ends = [E]: each group's."""
    group = tl.arange(0, EP)
    size = tl.load(sizes_ptr + group, mask=group < E, other=0).to(tl.int32)
    end = tl.cumsum(size, axis=0)
    start = tl.minimum(end - size, R)
    end = tl.where(group < E, tl.minimum(end, R), R)  # of a padding group: all rows that are left
    num_tiles = tl.where(group <= E, (end - start + BM - 1) // BM, 0)
    tiles_end = tl.cumsum(num_tiles, axis=0)
    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    mine = tl.sum((tl.expand_dims(tiles_end, 0) <= tile[:, None]).to(tl.int32), axis=1)
    own = (group[None, :] == tl.expand_dims(mine, 1)).to(tl.int32)
    end_of_mine = tl.sum(own * end[None, :], axis=1)
    first = tl.sum(own * (start - BM * (tiles_end - num_tiles))[None, :], axis=1) + BM * tile
    tl.store(tiles_ptr + tile, mine, mask=tile < N)
    tl.store(tiles_ptr + N + tile, first, mask=tile < N)
    tl.store(tiles_ptr + 2 * N + tile, tl.minimum(first + BM, end_of_mine), mask=tile < N)
    if tl.program_id(0) == 0:
        tl.store(ends_ptr + group, end, mask=group < E)


@triton.jit
def _product_tile(
    x_ptrs,
    w_ptrs,
    depth,
    D: tl.constexpr,
    W_STRIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows times columns, both given by pointers to their first BK channels."""
    channel = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        if D % BK == 0:
            x, w = tl.load(x_ptrs), tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(start + channel < D)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=(start + channel < D)[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        x_ptrs += BK
        w_ptrs += BK * W_STRIDE
    return total


@triton.jit
def _rows_times_weights(
    x_ptr,
    w_ptr,
    tiles_ptr,
    y_ptr,
    E: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    D_STRIDE: tl.constexpr,
    F_STRIDE: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y = x @ w[group of the row], w's dims by their strides, so that a transposed weight needs no copy."""
    num_columns: tl.constexpr = (F + BN - 1) // BN
    first = tl.program_id(0) // (TOGETHER * num_columns) * TOGETHER
    place = tl.program_id(0) % (TOGETHER * num_columns)
    height = tl.minimum(N - first, TOGETHER)
    tile = first + place % height
    group = tl.load(tiles_ptr + tile).to(tl.int64)
    if group <= E:
        end = tl.load(tiles_ptr + 2 * N + tile)
        row = tl.load(tiles_ptr + N + tile) + tl.arange(0, BM)
        column = place // height * BN + tl.arange(0, BN)
        channel = tl.arange(0, BK)
        read = tl.minimum(row, end - 1).to(tl.int64)  # rows and columns that are not there repeat the last one, and are not stored
        x_ptrs = x_ptr + read[:, None] * D + channel[None, :]
        w_ptrs = w_ptr + group * D * F + channel[:, None] * D_STRIDE + tl.minimum(column, F - 1)[None, :] * F_STRIDE
        depth = tl.where(group < E, D, 0)
        total = _product_tile(x_ptrs, w_ptrs, depth, D, D_STRIDE, BM, BN, BK, PRECISION)
        at = row.to(tl.int64)[:, None] * F + column[None, :]
        tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < F)[None, :])


@triton.jit
def _weight_grads(
    x_ptr,
    dy_ptr,
    ends_ptr,
    dw_ptr,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program makes a tile of one group's gradient, BK rows at a time; a group without rows gets zeros."""
    num_columns: tl.constexpr = (F + BN - 1) // BN
    num_tiles: tl.constexpr = (D + BM - 1) // BM * num_columns
    group = tl.program_id(0) // num_tiles
    place = tl.program_id(0) % num_tiles
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    d = place // num_columns * BM + tl.arange(0, BM)
    f = place % num_columns * BN + tl.arange(0, BN)
    row = start.to(tl.int64) + tl.arange(0, BK)
    x_ptrs = x_ptr + row[None, :] * D + tl.minimum(d, D - 1)[:, None]
    dy_ptrs = dy_ptr + row[:, None] * F + tl.minimum(f, F - 1)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for left in range(end - start, 0, -BK):
        mine = tl.arange(0, BK) < left
        x = tl.load(x_ptrs, mask=mine[None, :], other=0.0)
        dy = tl.load(dy_ptrs, mask=mine[:, None], other=0.0)
        total = tl.dot(x, dy, total, input_precision=PRECISION)
        x_ptrs += BK * D
        dy_ptrs += BK * F
    at = group.to(tl.int64) * D * F + d[:, None] * F + f[None, :]
    tl.store(dw_ptr + at, total.to(dw_ptr.dtype.element_ty), mask=(d < D)[:, None] & (f < F)[None, :])


def grouped_matmul(x_RD, w_EDF, group_sizes_E):
    if 0 in (*x_RD.shape, *w_EDF.shape):
        return jnp.zeros((x_RD.shape[0], w_EDF.shape[2]), x_RD.dtype)
    return _product(x_RD, w_EDF, group_sizes_E)


@jax.custom_vjp
def _product(x_RD, w_EDF, group_sizes_E):
    return _save(x_RD, w_EDF, group_sizes_E)[0]


def _save(x_RD, w_EDF, group_sizes_E):
    tiles_3N, ends_E = _tiles(group_sizes_E, num_rows=x_RD.shape[0], tiling=_tiling(x_RD, w_EDF.shape[0]))
    return _times_weights(x_RD, w_EDF, tiles_3N, w_dim=1), (x_RD, w_EDF, tiles_3N, ends_E)


def _grads(saved, dy_RF):
    x_RD, w_EDF, tiles_3N, ends_E = saved
    return _times_weights(dy_RF, w_EDF, tiles_3N, w_dim=2), _grads_of_weights(x_RD, dy_RF, ends_E, w_EDF), None


_product.defvjp(_save, _grads)


def _tiling(x_RD, num_groups: int) -> Tiling:
    if x_RD.dtype == jnp.float32:
        return Tiling(64, 64, 32, num_warps=4, num_stages=2)
    if x_RD.shape[0] // num_groups < 128:  # mostly one tile a group: it is the weight's way from memory that takes the time
        return Tiling(64, 128, 64, num_warps=4, num_stages=3)
    return Tiling(128, 128, 64, num_warps=8, num_stages=3)


def _precision(dtype) -> str:
    return "ieee" if dtype == jnp.float32 else "tf32"  # of float32 alone; bfloat16 and float16 have but one


def _tiles(group_sizes_E, *, num_rows: int, tiling: Tiling):
    """Tables [3, N] and [E] of `_table`."""
    num_groups = group_sizes_E.shape[0]
    most = triton.cdiv(num_rows, tiling.rows) + min(num_groups, num_rows)  # each group and the padding may leave its last tile part empty
    groups_padded = triton.next_power_of_2(num_groups + 1)
    tiles_each = min(max(TABLE_COMPARISONS // groups_padded, 1), 64)
    return triton_launch.launch(
        _table,
        group_sizes_E,
        out_type=[jax.ShapeDtypeStruct((3, most), jnp.int32), jax.ShapeDtypeStruct((num_groups,), jnp.int32)],
        grid=triton.cdiv(most, tiles_each),
        R=num_rows,
        E=num_groups,
        EP=groups_padded,
        N=most,
        BM=tiling.rows,
        BT=tiles_each,
    )


def _times_weights(x_RD, w_EDF, tiles_3N, *, w_dim: int):
    """Rows times their group's weight, contracted with dim `w_dim` of it (2: the transpose)."""
    num_groups, num_tiles, tiling = w_EDF.shape[0], tiles_3N.shape[1], _tiling(x_RD, w_EDF.shape[0])
    depth, width = w_EDF.shape[w_dim], w_EDF.shape[3 - w_dim]
    if x_RD.dtype != jnp.float32 and depth <= 10 * tiling.depth:  # the assembler unrolls up to 10 steps, and spills on an A100
        tiling = tiling._replace(depth=32, num_stages=5)
    return triton_launch.launch(
        _rows_times_weights,
        *(x_RD, w_EDF.astype(x_RD.dtype), tiles_3N),
        out_type=[jax.ShapeDtypeStruct((x_RD.shape[0], width), x_RD.dtype)],
        grid=num_tiles * triton.cdiv(width, tiling.columns),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        E=num_groups,
        D=depth,
        F=width,
        D_STRIDE=w_EDF.shape[2] if w_dim == 1 else 1,
        F_STRIDE=w_EDF.shape[2] if w_dim == 2 else 1,
        N=num_tiles,
        BM=tiling.rows,
        BN=tiling.columns,
        BK=tiling.depth,
        TOGETHER=TILES_TOGETHER,
        PRECISION=_precision(x_RD.dtype),
    )[0]


def _grads_of_weights(x_RD, dy_RF, ends_E, w_EDF):
    num_groups, depth, width = w_EDF.shape
    tiling = Tiling(64, 64, 32, 4, 2) if x_RD.dtype == jnp.float32 else Tiling(128, 128, 64, num_warps=8, num_stages=3)
    return triton_launch.launch(
        _weight_grads,
        *(x_RD, dy_RF, ends_E),
        out_type=[w_EDF],
        grid=num_groups * triton.cdiv(depth, tiling.rows) * triton.cdiv(width, tiling.columns),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        D=depth,
        F=width,
        BM=tiling.rows,
        BN=tiling.columns,
        BK=tiling.depth,
        PRECISION=_precision(x_RD.dtype),
    )[0]
