"""Rows sorted by group, cut into blocks of one group each: the loop of the portable grouped products."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCKS = (512, 128, 32)
"""Rows of a block. A block pays for one read of its weight, so a group is cut into large ones first."""
LANES = 2
"""Blocks of one turn at least, as one batched product: two CPU threads share two products better than one of the largest size."""
MAX_LANES = 8
"""Blocks of one turn at most, if they are smaller than the largest: a turn pays for one hand-out to the threads for each product."""
SHARE = 16
"""A turn whose blocks are above 64 rows holds at most 1/SHARE of all rows: its temporaries count for little beside them."""


class Blocks(NamedTuple):
    """The blocks of one `size`; none holds rows of two groups."""

    size: int
    lanes: int
    """Blocks of one turn."""
    num_rows: int
    block_end_E: jax.Array
    """Blocks of the groups up to and including e."""
    origin_E: jax.Array
    """Where block 0 would begin if the group's blocks went on to the left."""
    row_end_E: jax.Array

    def turn(self, number) -> "Turn":
        """The blocks number * lanes and on. Beyond the last one, a lane stays with that one's group and owns no rows."""
        return Turn(tuple(self._at(number * self.lanes + lane) for lane in range(self.lanes)))

    @property
    def num_turns(self):
        return (self.block_end_E[-1] + self.lanes - 1) // self.lanes

    def _at(self, number) -> "Block":
        total = self.block_end_E[-1]
        exists, number = number < total, jnp.minimum(number, total - 1)
        group = jnp.searchsorted(self.block_end_E, number, side="right", method="scan_unrolled").astype(jnp.int32)
        first = self.origin_E[group] + number * self.size
        start = jnp.minimum(first, self.num_rows - self.size)  # near the buffer's end a slice starts earlier
        row_b = start + jnp.arange(self.size, dtype=jnp.int32)
        return Block(self.size, group, start, (exists & (row_b >= first) & (row_b < self.row_end_E[group]))[:, None])


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


class Turn(NamedTuple):
    """The blocks of one turn; N lanes. They may be of one group, and one that is not full may reach into another's rows."""

    lanes: tuple[Block, ...]

    def rows(self, x_RD):
        """The slices as they lie, with rows of others, [N, b, D]."""
        return jnp.stack([block.rows(x_RD) for block in self.lanes])

    def own_rows(self, x_RD):
        """The slices, 0 where a row is not the group's, whatever lies there."""
        return jnp.stack([jnp.where(block.own_b1, block.rows(x_RD), 0) for block in self.lanes])

    def put(self, y_RF, y_NbF):
        """`y_RF` with the groups' rows of the slices replaced."""
        for block, y_bF in zip(self.lanes, y_NbF, strict=True):
            y_RF = jax.lax.dynamic_update_slice_in_dim(y_RF, jnp.where(block.own_b1, y_bF, block.rows(y_RF)), block.start, 0)
        return y_RF

    def weights(self, w_EDF, dtype):
        """The groups' matrices, rounded for the product, [N, D, F]."""
        return jnp.stack([jax.lax.dynamic_index_in_dim(w_EDF, block.group, keepdims=False) for block in self.lanes]).astype(dtype)

    def add(self, dw_EDF, dw_NDF):
        """`dw_EDF` with the groups' matrices increased."""
        for block, dw_DF in zip(self.lanes, dw_NDF, strict=True):
            old_DF = jax.lax.dynamic_index_in_dim(dw_EDF, block.group, keepdims=False)
            dw_EDF = jax.lax.dynamic_update_index_in_dim(dw_EDF, old_DF + dw_DF, block.group, 0)
        return dw_EDF


def over_blocks(body, sums, group_sizes_E, num_rows: int):
    """`sums = body(turn, sums)` until every block had its turn, those of one size after the other."""
    for blocks in _cut(group_sizes_E, num_rows):
        step = lambda number, sums, blocks: body(blocks.turn(number), sums)
        sums = jax.lax.fori_loop(0, blocks.num_turns, functools.partial(step, blocks=blocks), sums)
    return sums


def _cut(group_sizes_E, num_rows: int):
    """Groups cut into blocks, the largest first. A block is filled up with rows that are not the group's only where they are few."""
    full = min(-(-num_rows // LANES), max(64, num_rows // (LANES * SHARE)), BLOCKS[0])
    sizes = [full, *(size for size in BLOCKS if size < full)]
    row_end_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    first_E = row_end_E - group_sizes_E
    for size, smaller in zip(sizes, [*sizes[1:], 2 * (sizes[-1] - 1)], strict=True):  # the last size takes all that is left
        # as many rows as a turn of the largest; of each block's weight there is a copy, which should stay few beside the weights
        lanes = min(LANES * full // size, MAX_LANES, max(LANES, len(group_sizes_E)))
        num_E = (jnp.maximum(row_end_E - first_E, 0) + smaller // 2) // size
        block_end_E = jnp.cumsum(num_E, dtype=jnp.int32)
        if size != sizes[-1]:  # what would not fill a turn is cut smaller
            block_end_E = jnp.minimum(block_end_E, block_end_E[-1] // lanes * lanes)
            num_E = jnp.diff(block_end_E, prepend=0)
        first_E = first_E + num_E * size
        yield Blocks(size, lanes, num_rows, block_end_E, first_E - block_end_E * size, row_end_E)


def transposed(x_NbD):
    """A copy of its own: the CPU's matmul of a turned left operand takes twice as long."""
    return jax.lax.optimization_barrier(jnp.swapaxes(x_NbD, -1, -2))
