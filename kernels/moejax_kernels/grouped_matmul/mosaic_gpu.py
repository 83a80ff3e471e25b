"""Grouped matmul for Hopper: Pallas Mosaic GPU kernels that feed wgmma by TMA, one launch for each product.

Grown from JAX's own `ragged_dot_mgpu` and `transposed_ragged_dot_mgpu` (jax.experimental.pallas.ops.gpu, Apache 2.0). What differs: a
tile begins where its group does, up to the 8 rows of a swizzle, so that few rows per group make few tiles; tiles find their group in a
table made before the launch, not by walking over all groups; rows beyond the sum of the sizes are a last group whose tiles store
zeros; rows of other groups are cut out of the weights' gradients by selection, since 0 times what they hold may be NaN.

Launches: one forward, two backward, beside XLA's small ones for the table (16 bytes a tile, saved for backward with the inputs). Each
weight comes from memory once a pass, as long as 8 tiles of rows stay in the L2 cache. A weight wider than the rows is cast by XLA
before the launch, once in each direction.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_CORES = 132
"""Streaming multiprocessors of an H100 SXM or H200; each runs one program at a time, which goes from tile to tile."""
TILES_TOGETHER = 8
"""Tiles of rows that are multiplied with one tile of columns before the next: rows and weights meet again in the L2 cache."""
DEPTH = 64
"""Channels (rows, in the weights' gradients) of one step of the pipeline: 128 bytes, the widest swizzle."""
ALIGNED = 8
"""Rows of one swizzle pattern: copies to shared memory begin at a multiple of it."""
STEPS = 4
"""Steps of which the loads are in flight."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of the rows' products: N of up to `rows` rows, each with rows of one group alone."""

    group_N: jax.Array
    """E: padding; tiles that are not needed have it too, and no rows."""
    base_N: jax.Array
    """Where a tile is read: a multiple of 8."""
    skip_N: jax.Array
    """Its rows before its group's first; below 8, and 0 but for a group's first tile."""
    count_N: jax.Array
    """Its rows of its group."""
    start_G: jax.Array
    """First row of each group, and of the padding."""
    end_E: jax.Array
    rows: int = dataclasses.field(metadata={"static": True})


def grouped_matmul(x_RD, w_EDF, group_sizes_E):
    return _product(x_RD, w_EDF, group_sizes_E)


@jax.custom_vjp
def _product(x_RD, w_EDF, group_sizes_E):
    return _save(x_RD, w_EDF, group_sizes_E)[0]


def _save(x_RD, w_EDF, group_sizes_E):
    tiles = _tiles(group_sizes_E, x_RD.shape[0])
    return _times_weights(x_RD, w_EDF.astype(x_RD.dtype), tiles, transposed=False), (x_RD, w_EDF, tiles)


def _grads(saved, dy_RF):
    x_RD, w_EDF, tiles = saved
    dx_RD = _times_weights(dy_RF, w_EDF.astype(x_RD.dtype), tiles, transposed=True)
    return dx_RD, _grads_of_weights(x_RD, dy_RF, tiles, w_EDF.dtype), None


_product.defvjp(_save, _grads)


def _tiles(group_sizes_E, num_rows: int) -> Tiles:
    num_groups = group_sizes_E.shape[0]
    rows = 64 if num_rows // num_groups < 128 else 128  # few rows a group: the weight's way from memory takes the time, not the products
    end_E = jnp.minimum(jnp.cumsum(group_sizes_E, dtype=jnp.int32), num_rows)
    end_G = jnp.append(end_E, num_rows)  # with the padding behind
    start_G = jnp.concatenate([jnp.zeros(1, jnp.int32), end_E])
    base_G = start_G // ALIGNED * ALIGNED
    tiles_G = jnp.where(start_G < end_G, -(-(end_G - base_G) // rows), 0)
    tiles_end_G = jnp.cumsum(tiles_G, dtype=jnp.int32)
    most = (num_rows + min(num_groups + 1, num_rows) * (rows + ALIGNED - 2)) // rows
    tile_N = jnp.arange(most, dtype=jnp.int32)
    group_N = jnp.sum(tiles_end_G[None, :] <= tile_N[:, None], axis=1, dtype=jnp.int32)
    group_N = jnp.minimum(group_N, num_groups)
    base_N = base_G[group_N] + (tile_N - (tiles_end_G - tiles_G)[group_N]) * rows
    skip_N = jnp.maximum(start_G[group_N] - base_N, 0)
    count_N = jnp.clip(end_G[group_N] - base_N - skip_N, 0, rows - skip_N)
    return Tiles(group_N, base_N, skip_N, count_N, start_G, end_E, rows)


def _columns(width: int) -> int:
    return 128 if width % 128 == 0 else 64


def _kernel(body, out: jax.ShapeDtypeStruct, num_programs: int):
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(min(NUM_CORES, num_programs),),
        grid_names=("core",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _times_weights(x_RD, w_EDF, tiles: Tiles, *, transposed: bool):
    """Rows times their group's weight, or (`transposed`) its transpose."""
    num_groups, num_tiles = w_EDF.shape[0], tiles.group_N.shape[0]
    depth, width = (w_EDF.shape[2], w_EDF.shape[1]) if transposed else w_EDF.shape[1:]
    rows, columns = tiles.rows, _columns(width)
    num_columns = width // columns

    def body(group_gmem, base_gmem, skip_gmem, count_gmem, x_gmem, w_gmem, y_gmem):
        @plgpu.nd_loop((num_tiles * num_columns,), collective_axes="core")
        def _(loop):
            tile, column = _place(loop.index[0], num_tiles, num_columns)
            group, base = group_gmem[tile], pl.multiple_of(base_gmem[tile], ALIGNED)

            def multiply(total_ref):
                step = lambda _, x_smem, w_smem: plgpu.wgmma(total_ref, x_smem, w_smem.transpose((1, 0)) if transposed else w_smem)
                w_block, w_at = ((columns, DEPTH), lambda k: (column, k)) if transposed else ((DEPTH, columns), lambda k: (k, column))

                @pl.when(group < num_groups)
                def _():
                    plgpu.emit_pipeline(
                        step,
                        grid=(depth // DEPTH,),
                        in_specs=[
                            plgpu.BlockSpec((rows, DEPTH), lambda k: (0, k), delay_release=1),
                            plgpu.BlockSpec(w_block, w_at, delay_release=1),
                        ],
                        max_concurrent_steps=STEPS,
                    )(x_gmem.at[pl.ds(base, rows)], w_gmem.at[group])

                return total_ref[...]

            total = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((rows, columns)))
            store = functools.partial(_store_rows, total, y_gmem, base, skip_gmem[tile], count_gmem[tile], column * columns)
            pl.run_scoped(store, plgpu.SMEM((rows, columns), dtype=y_gmem.dtype))

    out = jax.ShapeDtypeStruct((x_RD.shape[0], width), x_RD.dtype)
    return _kernel(body, out, num_tiles * num_columns)(tiles.group_N, tiles.base_N, tiles.skip_N, tiles.count_N, x_RD, w_EDF)


def _place(number, num_tiles: int, num_columns: int):
    """Tile of rows and tile of columns of a program's number."""
    together = number // (TILES_TOGETHER * num_columns)
    place = number % (TILES_TOGETHER * num_columns)
    height = jnp.minimum(num_tiles - together * TILES_TOGETHER, TILES_TOGETHER)
    return together * TILES_TOGETHER + place % height, place // height


def _store_rows(total, y_gmem, base, skip, count, column, y_smem):
    """Rows `skip` to `skip + count` of a tile. Copies have static sizes, so one for each bit of the count, the highest first."""
    y_smem[...] = total.astype(y_smem.dtype)
    plgpu.commit_smem()
    rows, columns = y_smem.shape
    row = skip
    for bit in reversed(range(rows.bit_length())):

        @pl.when(count & (1 << bit) != 0)
        def _(size=1 << bit, row=row):
            target = y_gmem.at[pl.ds(base + row, size), pl.ds(column, columns)]
            plgpu.copy_smem_to_gmem(y_smem.at[pl.ds(row, size)], target)

        row += count & (1 << bit)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _swizzled(dtype) -> tuple:
    elements = 128 // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]


def _grads_of_weights(x_RD, dy_RF, tiles: Tiles, dtype):
    """Each group's x^T dy, 0 for a group without rows."""
    num_rows, depth = x_RD.shape
    width, num_groups = dy_RF.shape[1], tiles.end_E.shape[0]
    high, wide = _columns(depth), _columns(width)
    num_columns = width // wide

    def body(start_gmem, end_gmem, x_gmem, dy_gmem, dw_gmem):
        @plgpu.nd_loop((num_groups, depth // high * num_columns), collective_axes="core")
        def _(loop):
            group, place = loop.index
            at_d, at_f = place // num_columns, place % num_columns
            start, end = start_gmem[group], end_gmem[group]
            base = pl.multiple_of(start // ALIGNED * ALIGNED, ALIGNED)
            num_steps = (end - base + DEPTH - 1) // DEPTH

            def multiply(total_ref):
                def step(index, x_smem, dy_smem):
                    @pl.when((index[0] == 0) | (index[0] == num_steps - 1))
                    def _():
                        first = base + index[0] * DEPTH
                        for smem in (x_smem, dy_smem):
                            _cut(smem, start - first, end - first)
                        plgpu.commit_smem()

                    plgpu.wgmma(total_ref, x_smem.transpose((1, 0)), dy_smem)

                @pl.when(start < end)
                def _():
                    spec = lambda columns, at: plgpu.BlockSpec(
                        (DEPTH, columns), lambda k: (k, at), delay_release=1, transforms=_swizzled(x_RD.dtype)
                    )
                    own = pl.ds(base, num_rows)  # reaches beyond the rows; the pipeline does not
                    plgpu.emit_pipeline(step, grid=(num_steps,), in_specs=[spec(high, at_d), spec(wide, at_f)], max_concurrent_steps=STEPS)(
                        x_gmem.at[own, :], dy_gmem.at[own, :]
                    )

                return total_ref[...]

            total = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((high, wide)))

            def store(dw_smem):
                dw_smem[...] = total.astype(dtype)
                plgpu.commit_smem()
                target = dw_gmem.at[group, pl.ds(at_d * high, high), pl.ds(at_f * wide, wide)]
                plgpu.copy_smem_to_gmem(dw_smem, target)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            pl.run_scoped(store, plgpu.SMEM((high, wide), dtype=dtype, transforms=_swizzled(dtype)))

    out = jax.ShapeDtypeStruct((num_groups, depth, width), dtype)
    return _kernel(body, out, num_groups * (depth // high) * num_columns)(tiles.start_G, tiles.end_E, x_RD, dy_RF)


def _cut(smem, start, end) -> None:
    """Rows before `start` and from `end` on become 0."""
    row = plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, smem.shape, 0), plgpu.Layout.WGMMA)
    smem[...] = jnp.where((row >= start) & (row < end), smem[...], jnp.zeros_like(smem[...]))
