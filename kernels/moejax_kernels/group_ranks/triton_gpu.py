"""Ranks in one launch: each program counts a few groups over all rows, their counts side by side in one 64-bit word.

A row of a program's g-th group adds 1 << (g * BITS), so that one prefix sum over rows counts all its groups; BITS hold the number of rows.
The ids come from memory once, to the other programs from the L2 cache; each rank and count is written once, without atomics.
"""

import jax
import jax.numpy as jnp

from moejax_kernels import triton_launch  # isort: skip  (before triton: it points triton at the right assembler)

import triton
import triton.language as tl

BLOCK = 2048
"""Rows of one prefix sum: 8 in each of 256 threads, two 16-byte loads. Registers let three programs run on a multiprocessor."""
MOST_GROUPS = 8
"""Of one program. Short rows would let more into a word, and leave the GPU idle."""


@triton.jit
def _ranks_of_groups(
    ids_ptr,
    rank_ptr,
    counts_ptr,
    R: tl.constexpr,
    E: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ranks of the rows of this program's groups, and how many they are."""
    first = tl.program_id(0) * GROUPS
    end = tl.minimum(first + GROUPS, E)
    row = tl.arange(0, BLOCK)
    seen = tl.zeros((), tl.int64)
    ids = tl.load(ids_ptr + row, mask=row < R, other=-1)
    for block in range(0, NUM_BLOCKS):
        ids_ptr += BLOCK
        left = R - (block + 1) * BLOCK
        ids_after = tl.load(ids_ptr + row, mask=row < left, other=-1)  # asked for early: they come while this block is counted
        mine = (ids >= first) & (ids < end)
        shift = tl.where(mine, (ids - first) * BITS, 0).to(tl.int64)
        one = mine.to(tl.int64) << shift
        rank = ((seen + tl.cumsum(one, axis=0)) >> shift) & ((1 << BITS) - 1)
        tl.store(rank_ptr + row, rank.to(tl.int32) - 1, mask=mine)
        rank_ptr += BLOCK
        seen += tl.sum(one, axis=0)
        ids = ids_after
    for group in tl.static_range(GROUPS):  # pyright: ignore[reportGeneralTypeIssues]
        count = (seen >> (group * BITS)) & ((1 << BITS) - 1)
        tl.store(counts_ptr + first + group, count.to(tl.int32), mask=first + group < E)


@triton.jit
def _no_ranks(ids_ptr, rank_ptr, R: tl.constexpr, E: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """-1 for the rows of no group."""
    row = tl.arange(0, BLOCK)
    for block in range(0, NUM_BLOCKS):
        inside = row < R - block * BLOCK
        ids = tl.load(ids_ptr + row, mask=inside, other=0)
        tl.store(rank_ptr + row, tl.full((BLOCK,), -1, tl.int32), mask=inside & ((ids < 0) | (ids >= E)))
        ids_ptr += BLOCK
        rank_ptr += BLOCK


@triton.jit
def _ranks(
    ids_ptr,
    rank_ptr,
    counts_ptr,
    R: tl.constexpr,  # a constant: only where it divides by 4 is a tile's mask known to let 16-byte loads through
    E: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A few groups for each program, and one program more for the rows of no group."""
    if tl.program_id(0) * GROUPS < E:
        _ranks_of_groups(ids_ptr, rank_ptr, counts_ptr, R, E, NUM_BLOCKS, GROUPS, BITS, BLOCK)
    else:
        _no_ranks(ids_ptr, rank_ptr, R, E, NUM_BLOCKS, BLOCK)


def group_ranks(ids_R, num_groups: int):
    num_rows = ids_R.size
    if num_rows == 0:
        return jnp.zeros(0, jnp.int32), jnp.zeros(num_groups, jnp.int32)
    bits = num_rows.bit_length()
    groups = min(63 // bits, num_groups, MOST_GROUPS)
    rank_R, counts_E = triton_launch.launch(
        _ranks,
        ids_R,
        out_type=[jax.ShapeDtypeStruct((num_rows,), jnp.int32), jax.ShapeDtypeStruct((num_groups,), jnp.int32)],
        grid=triton.cdiv(num_groups, groups) + 1,
        num_warps=8,
        R=num_rows,
        E=num_groups,
        NUM_BLOCKS=triton.cdiv(num_rows, BLOCK),
        GROUPS=groups,
        BITS=bits,
        BLOCK=BLOCK,
    )
    return rank_R, counts_E
