"""Rows sorted by group, cut into blocks of one group each: the loop of the portable grouped products."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCKS = (512, 256, 128, 64, 16)
"""Rows of a block. A block pays for one read of its weight and one hand-out to the threads, so a group is cut into large ones first."""


class Blocks(NamedTuple):
    """The blocks of one `size`; none holds rows of two groups."""

    size: int
    num_rows: int
    block_end_E: jax.Array
    """Blocks of the groups up to and including e."""
    num_E: jax.Array
    first_E: jax.Array
    """First row of the group's first block of this size."""
    row_end_E: jax.Array

    def at(self, number) -> "Block":
        """One of them."""
        group = jnp.searchsorted(self.block_end_E, number, side="right", method="scan_unrolled").astype(jnp.int32)
        first = self.first_E[group] + (number - self.block_end_E[group] + self.num_E[group]) * self.size
        start = jnp.minimum(first, self.num_rows - self.size)  # near the buffer's end a slice starts earlier
        row_b = start + jnp.arange(self.size, dtype=jnp.int32)
        return Block(self.size, group, start, ((row_b >= first) & (row_b < self.row_end_E[group]))[:, None])


class Block(NamedTuple):
    """A slice of rows, of which some are its group's."""

    size: int
    group: jax.Array
    start: jax.Array
    own_b1: jax.Array
    """Which of the sliced rows are the group's."""

    def rows(self, x_RD):
        """The slice as it lies, with rows of others."""
        return jax.lax.dynamic_slice_in_dim(x_RD, self.start, self.size)

    def own_rows(self, x_RD):
        """The slice, 0 where a row is not the group's, whatever lies there."""
        return jnp.where(self.own_b1, self.rows(x_RD), 0)

    def put(self, y_RF, y_bF):
        """`y_RF` with the group's rows of the slice replaced."""
        return jax.lax.dynamic_update_slice_in_dim(y_RF, jnp.where(self.own_b1, y_bF, self.rows(y_RF)), self.start, 0)

    def weight(self, w_EDF, dtype):
        """The group's matrix, rounded for the product."""
        return jax.lax.dynamic_index_in_dim(w_EDF, self.group, keepdims=False).astype(dtype)

    def add(self, dw_EDF, dw_DF):
        """`dw_EDF` with the group's matrix increased."""
        old_DF = jax.lax.dynamic_index_in_dim(dw_EDF, self.group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw_EDF, old_DF + dw_DF, self.group, 0)


def over_blocks(body, sums, group_sizes_E, num_rows: int):
    """`sums = body(block, sums)` for every block, those of one size after the other."""
    for blocks in _cut(group_sizes_E, num_rows):
        step = lambda number, sums, blocks: body(blocks.at(number), sums)
        sums = jax.lax.fori_loop(0, blocks.block_end_E[-1], functools.partial(step, blocks=blocks), sums)
    return sums


def _cut(group_sizes_E, num_rows: int):
    """Groups cut into blocks, the largest first. A block is filled up with rows that are not the group's only where they are few."""
    full = min(BLOCKS[0], num_rows)
    sizes = [full, *(size for size in BLOCKS if size < full)]
    row_end_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    first_E = row_end_E - group_sizes_E
    for size, smaller in zip(sizes, [*sizes[1:], 2 * (sizes[-1] - 1)], strict=True):  # the last size takes all that is left
        num_E = (jnp.maximum(row_end_E - first_E, 0) + smaller // 2) // size
        yield Blocks(size, num_rows, jnp.cumsum(num_E, dtype=jnp.int32), num_E, first_E, row_end_E)
        first_E = first_E + num_E * size


def transposed(x_bD):
    """A copy of its own: the CPU's matmul of a turned left operand takes twice as long."""
    return jax.lax.optimization_barrier(x_bD.T)
