"""Counting sort of rows by group."""

from moejax_kernels.group_ranks import reference, xla
from moejax_kernels.implementation import Implementation, choose
from moejax_kernels.shapes import check

IMPLEMENTATIONS = {"xla": xla.group_ranks, "reference": reference.group_ranks}


def group_ranks(ids_R, num_groups: int, *, implementation: Implementation | None = None):
    """The place of each row among the rows of its group, in order: with the groups' starts, a stable sort without comparing all keys.

    Args:
      ids_R: integers, the group of each row; outside of [0, num_groups): no group.
      num_groups: E.
      implementation: "reference", "xla", or None for the fastest that runs here. A name never falls back.

    Returns:
      rank_R int32, 0 for a group's first row, -1 for rows of no group; counts_E int32, rows per group. No gradients. "xla" works on
      R*(128 + E/128) numbers and holds 4*E*R/128 bytes.

    Raises:
      ValueError: ids_R is not one row of integers.
      UnsupportedError: the named implementation does not exist.

    Source: counting sort, as in MegaBlocks' histogram and bin counts (arXiv 2211.15841).
    """
    check("group_ranks", integer=("ids_R",), ids_R=ids_R)
    return choose("group_ranks", implementation, IMPLEMENTATIONS)(ids_R, num_groups)
