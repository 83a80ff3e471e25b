"""Grouped matmul as a loop over blocks of rows of one group: the work follows the real rows, not R and not E."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax_kernels.grouped_matmul.varying import vary_alike

MAX_BLOCK = 128
"""Rows of one block at most. A group's last block is partly empty; a block pays for one read of its weight."""


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
    blocks = _blocks(group_sizes_E, x_RD.shape[0])
    inside = jnp.promote_types(x_RD.dtype, jnp.float32)

    def body(number, y_RF):
        group, start, member_b = blocks.at(number)
        x_bD = jax.lax.dynamic_slice_in_dim(x_RD, start, blocks.size)
        w_DF = jax.lax.dynamic_index_in_dim(w_EDF, group, keepdims=False)
        y_bF = jax.lax.dot_general(x_bD, w_DF.astype(x_RD.dtype), (((1,), (w_dim - 1,)), ((), ())), preferred_element_type=inside).astype(
            x_RD.dtype
        )
        old_bF = jax.lax.dynamic_slice_in_dim(y_RF, start, blocks.size)
        return jax.lax.dynamic_update_slice_in_dim(y_RF, jnp.where(member_b[:, None], y_bF, old_bF), start, 0)

    y_RF = jnp.zeros_like(x_RD, shape=(x_RD.shape[0], w_EDF.shape[3 - w_dim]))
    return jax.lax.fori_loop(0, blocks.num, body, vary_alike(y_RF, x_RD)[0])


def _weight_grads(x_RD, dy_RF, group_sizes_E, w_EDF):
    blocks = _blocks(group_sizes_E, x_RD.shape[0])
    inside = jnp.promote_types(x_RD.dtype, jnp.float32)

    def body(number, dw_EDF):
        group, start, member_b = blocks.at(number)
        x_bD = jnp.where(member_b[:, None], jax.lax.dynamic_slice_in_dim(x_RD, start, blocks.size), 0)
        dy_bF = jnp.where(member_b[:, None], jax.lax.dynamic_slice_in_dim(dy_RF, start, blocks.size), 0)
        dw_DF = jax.lax.dot_general(x_bD, dy_bF, (((0,), (0,)), ((), ())), preferred_element_type=inside)
        old_DF = jax.lax.dynamic_index_in_dim(dw_EDF, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw_EDF, old_DF + dw_DF, group, 0)

    dw_EDF = vary_alike(jnp.zeros(w_EDF.shape, inside), x_RD)[0]
    return jax.lax.fori_loop(0, blocks.num, body, dw_EDF).astype(w_EDF.dtype)


class _Blocks(NamedTuple):
    """Groups cut into blocks of `size` rows; none holds rows of two groups."""

    size: int
    num: jax.Array
    num_rows: int
    block_end_E: jax.Array
    """Blocks of the groups up to and including e."""
    row_end_E: jax.Array
    group_sizes_E: jax.Array

    def at(self, number):
        """Group of a block, where to slice its rows, and which of the sliced rows are its own."""
        group = jnp.searchsorted(self.block_end_E, number, side="right", method="scan_unrolled").astype(jnp.int32)
        end = self.row_end_E[group]
        first = end - self.group_sizes_E[group] + (number - self._block_start(group)) * self.size
        start = jnp.minimum(first, self.num_rows - self.size)  # near the buffer's end a slice starts earlier
        row_b = start + jnp.arange(self.size, dtype=jnp.int32)
        return group, start, (row_b >= first) & (row_b < end)

    def _block_start(self, group):
        return self.block_end_E[group] - -(-self.group_sizes_E[group] // self.size)


def _blocks(group_sizes_E, num_rows: int) -> _Blocks:
    size = min(MAX_BLOCK, num_rows)
    block_end_E = jnp.cumsum(-(-group_sizes_E // size), dtype=jnp.int32)
    return _Blocks(size, block_end_E[-1], num_rows, block_end_E, jnp.cumsum(group_sizes_E, dtype=jnp.int32), group_sizes_E)
