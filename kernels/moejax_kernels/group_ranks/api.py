"""Counting sort of rows by group."""

import jax.numpy as jnp

from moejax_kernels import gpu
from moejax_kernels.group_ranks import reference, xla
from moejax_kernels.implementation import Implementation, choose, later
from moejax_kernels.shapes import check

IMPLEMENTATIONS = {
    "triton_gpu": later("moejax_kernels.group_ranks.triton_gpu", "group_ranks"),
    "xla": xla.group_ranks,
    "reference": reference.group_ranks,
}


def group_ranks(ids_R, num_groups: int, *, implementation: Implementation | None = None):
    """The place of each row among the rows of its group, in order: with the groups' starts, a stable sort without comparing all keys.

    Args:
      ids_R: integers, the group of each row; outside of [0, num_groups): no group. Fewer than 2**31 rows.
      num_groups: E, at least 1.
      implementation: "reference", "xla", "triton_gpu" (see Raises), or None for the fastest that runs here. A name never falls back.

    Returns:
      rank_R int32, 0 for a group's first row, -1 for rows of no group; counts_E int32, rows per group. No gradients. "xla" works on
      R*(64 + E/64) numbers and holds 4*E*R/64 bytes. "triton_gpu" is one launch, holds nothing and moves 4*(2*R + E) bytes. Its
      E/n + 1 programs each read all ids, from the L2 cache after the first; n = 63 // R.bit_length(), 3 for 65536 rows, at most 8.

    Raises:
      ValueError: ids_R is not one row of integers or has 2**31 rows or more, or num_groups is below 1.
      UnsupportedError: the named implementation cannot run these ids on this device; the message says why. triton_gpu takes int32.

    Source: counting sort, as in MegaBlocks' histogram and bin counts (arXiv 2211.15841).
    """
    check("group_ranks", integer=("ids_R",), ids_R=ids_R)
    if num_groups < 1:
        raise ValueError(f"group_ranks: num_groups={num_groups} must be at least 1.")
    return choose("group_ranks", implementation, IMPLEMENTATIONS, why_not={"triton_gpu": _why_no_triton(ids_R)})(ids_R, num_groups)


def _why_no_triton(ids_R) -> str | None:
    """As the end of a sentence; None where it runs."""
    if ids_R.dtype != jnp.int32:
        return f"takes int32, got ids_R in {ids_R.dtype}. Cast it, or pass implementation='xla'."
    return gpu.why_no_triton()
