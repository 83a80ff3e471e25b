"""Grouped matmul as a loop over blocks of rows of one group: the work follows the real rows, not R and not E."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax_kernels.varying import vary_alike

BLOCKS = (512, 256, 128, 64, 16)
"""Rows of a block. A block pays for one read of its weight and one hand-out to the threads, so a group is cut into large ones first."""


def grouped_matmul(x_RD, w_EDF, group_sizes_E):
    if 0 in (*x_RD.shape, *w_EDF.shape):
        return jnp.zeros((x_RD.shape[0], w_EDF.shape[2]), x_RD.dtype)
    return _product(*vary_alike(x_RD, w_EDF, group_sizes_E.astype(jnp.int32)))


@jax.custom_vjp
def _product(x_RD, w_EDF, group_sizes_E):
    return _rows_times_weights(x_RD, w_EDF, group_sizes_E, w_dim=1)


def _save(x_RD, w_EDF, group_sizes_E):
    return _product(x_RD, w_EDF, group_sizes_E), (x_RD, w_EDF, group_sizes_E)


def _grads(saved, dy_RF):
    x_RD, w_EDF, group_sizes_E = saved
    return _rows_times_weights(dy_RF, w_EDF, group_sizes_E, w_dim=2), _weight_grads(x_RD, dy_RF, group_sizes_E, w_EDF), None


_product.defvjp(_save, _grads)


def _rows_times_weights(x_RD, w_EDF, group_sizes_E, *, w_dim: int):
    """Rows times their group's weight, contracted with dim `w_dim` of it (2: the transpose)."""
    inside = jnp.promote_types(x_RD.dtype, jnp.float32)

    def body(blocks, number, y_RF):
        group, start, member_b = blocks.at(number)
        x_bD = jax.lax.dynamic_slice_in_dim(x_RD, start, blocks.size)
        w_DF = jax.lax.dynamic_index_in_dim(w_EDF, group, keepdims=False)
        y_bF = jax.lax.dot_general(x_bD, w_DF.astype(x_RD.dtype), (((1,), (w_dim - 1,)), ((), ())), preferred_element_type=inside).astype(
            x_RD.dtype
        )
        old_bF = jax.lax.dynamic_slice_in_dim(y_RF, start, blocks.size)
        return jax.lax.dynamic_update_slice_in_dim(y_RF, jnp.where(member_b[:, None], y_bF, old_bF), start, 0)

    y_RF = jnp.zeros_like(x_RD, shape=(x_RD.shape[0], w_EDF.shape[3 - w_dim]))
    return _over_blocks(body, vary_alike(y_RF, x_RD)[0], group_sizes_E, x_RD.shape[0])


def _weight_grads(x_RD, dy_RF, group_sizes_E, w_EDF):
    inside = jnp.promote_types(x_RD.dtype, jnp.float32)

    def body(blocks, number, dw_EDF):
        group, start, member_b = blocks.at(number)
        x_bD = jnp.where(member_b[:, None], jax.lax.dynamic_slice_in_dim(x_RD, start, blocks.size), 0)
        dy_bF = jnp.where(member_b[:, None], jax.lax.dynamic_slice_in_dim(dy_RF, start, blocks.size), 0)
        # turned by a copy of its own: the CPU's matmul of a turned left operand takes twice as long
        x_Db = jax.lax.optimization_barrier(x_bD.T)
        dw_DF = jnp.matmul(x_Db, dy_bF, preferred_element_type=inside)
        old_DF = jax.lax.dynamic_index_in_dim(dw_EDF, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw_EDF, old_DF + dw_DF, group, 0)

    dw_EDF = vary_alike(jnp.zeros(w_EDF.shape, inside), x_RD)[0]
    return _over_blocks(body, dw_EDF, group_sizes_E, x_RD.shape[0]).astype(w_EDF.dtype)


def _over_blocks(body, sums, group_sizes_E, num_rows: int):
    """`sums = body(blocks, number, sums)` for every block, those of one size after the other."""
    for blocks in _blocks(group_sizes_E, num_rows):
        sums = jax.lax.fori_loop(0, blocks.block_end_E[-1], functools.partial(body, blocks), sums)
    return sums


class _Blocks(NamedTuple):
    """The blocks of one `size`; none holds rows of two groups."""

    size: int
    num_rows: int
    block_end_E: jax.Array
    """Blocks of the groups up to and including e."""
    num_E: jax.Array
    first_E: jax.Array
    """First row of the group's first block of this size."""
    row_end_E: jax.Array

    def at(self, number):
        """Group of a block, where to slice its rows, and which of the sliced rows are its own."""
        group = jnp.searchsorted(self.block_end_E, number, side="right", method="scan_unrolled").astype(jnp.int32)
        first = self.first_E[group] + (number - self.block_end_E[group] + self.num_E[group]) * self.size
        start = jnp.minimum(first, self.num_rows - self.size)  # near the buffer's end a slice starts earlier
        row_b = start + jnp.arange(self.size, dtype=jnp.int32)
        return group, start, (row_b >= first) & (row_b < self.row_end_E[group])


def _blocks(group_sizes_E, num_rows: int):
    """Groups cut into blocks, the largest first. A block is filled up with rows that are not the group's only where they are few."""
    full = min(BLOCKS[0], num_rows)
    sizes = [full, *(size for size in BLOCKS if size < full)]
    row_end_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    first_E = row_end_E - group_sizes_E
    for size, smaller in zip(sizes, [*sizes[1:], 2 * (sizes[-1] - 1)], strict=True):  # the last size takes all that is left
        num_E = (jnp.maximum(row_end_E - first_E, 0) + smaller // 2) // size
        yield _Blocks(size, num_rows, jnp.cumsum(num_E, dtype=jnp.int32), num_E, first_E, row_end_E)
        first_E = first_E + num_E * size
