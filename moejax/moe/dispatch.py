"""Where each routed row goes: plans on both ends of the exchange. All local to one device.

Rows are sorted by counting (moejax_kernels.group_ranks). A *slot* is a place for an expert: each of S devices has x of them, slot
s*x + i lies on device s. Without copies of experts, slot and expert have the same number.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from moejax_kernels import RowPlan, group_ranks

from moejax.memory.names import named

kept = functools.partial(named, name="dispatch_plan")
"""Marks what is never computed twice: a recomputed choice could break ties differently."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SendPlan:
    """What one device sends: a bucket of rows to each of S devices, rows of one slot side by side."""

    rows: RowPlan
    """Places of the T*K choices among S*Q rows."""
    counts_Sx: Any
    """int32, rows per receiving device and slot there."""
    start_S: Any
    """int32, first row of each bucket."""
    asked_S: Any
    """int32, rows that asked for a place in each bucket."""

    @property
    def sent_S(self):
        """Rows of each bucket."""
        return self.counts_Sx.sum(1, dtype=jnp.int32)


def bucket_rows(num_tokens: int, *, choices: int, slots_per_device: int, capacity_factor: float, mean_rows: float) -> int:
    """Rows of one bucket (Q): the worst case if dropless (factor 0), else the factor times `mean_rows`, at least 1."""
    worst = num_tokens * min(choices, slots_per_device)
    if capacity_factor == 0:
        return worst
    return min(worst, max(1, round(capacity_factor * mean_rows)))


def plan_send(slots_TK, *, num_devices: int, slots_per_device: int, rows: int, limit=None, packed: bool = False) -> SendPlan:
    """Gives each choice a row of its device's bucket, sorted by slot; earlier tokens find a place first.

    Args:
      slots_TK: int32 slots, -1 for none.
      rows: rows of one bucket (Q).
      limit: traced number of rows a bucket may fill, at most Q; None: Q.
      packed: buckets lie one behind the other without room between them (`ragged`), instead of every Q rows.

    Raises:
      ValueError: row numbers would pass int32.
    """
    num_tokens, k = slots_TK.shape
    _require_int32(num_tokens, k, num_devices=num_devices, rows=rows)
    num_slots, slot_R = num_devices * slots_per_device, slots_TK.reshape(-1)
    asked_S = None
    if limit is not None or rows < num_tokens * min(k, slots_per_device):  # the worst case cannot overflow
        rank_R, asked_S = group_ranks(jnp.where(slot_R < 0, -1, slot_R // slots_per_device), num_devices)
        slot_R = jnp.where(rank_R < (rows if limit is None else jnp.minimum(rows, limit)), slot_R, -1)
    rank_R, counts_X = group_ranks(slot_R, num_slots)
    counts_Sx = counts_X.reshape(num_devices, slots_per_device)
    before_Sx = jnp.cumsum(counts_Sx, 1, dtype=jnp.int32) - counts_Sx
    sent_S = counts_Sx.sum(1, dtype=jnp.int32)
    start_S = jnp.cumsum(sent_S, dtype=jnp.int32) - sent_S if packed else jnp.arange(num_devices, dtype=jnp.int32) * rows
    first_X = (start_S[:, None] + before_Sx).reshape(-1)
    place_R = jnp.where(slot_R < 0, -1, first_X[slot_R] + rank_R)
    num_rows = num_devices * rows
    source_R = (
        jnp.full(num_rows, -1, jnp.int32)
        .at[jnp.where(place_R < 0, num_rows, place_R)]
        .set(jnp.arange(place_R.size, dtype=jnp.int32) // k, mode="drop")
    )
    return SendPlan(RowPlan(source_R, place_R.reshape(num_tokens, k)), counts_Sx, start_S, sent_S if asked_S is None else asked_S)


def plan_receive(counts_Sx, start_S, *, num_rows: int) -> tuple[RowPlan, Any]:
    """Groups the rows that arrived by slot: sender s's bucket begins at start_S[s] and holds counts_Sx[s, i] rows of slot i, in order.

    Returns:
      plan from the arrived rows to as many grouped rows (K = 1), and group sizes per slot, int32 [x].
    """
    sizes_x = counts_Sx.sum(0, dtype=jnp.int32)
    arrived_Sx = start_S[:, None] + jnp.cumsum(counts_Sx, 1, dtype=jnp.int32) - counts_Sx  # where each piece begins on arrival
    grouped_xS = (jnp.cumsum(counts_Sx.T.reshape(-1), dtype=jnp.int32)).reshape(counts_Sx.T.shape) - counts_Sx.T  # and grouped
    slot_W = _moved(arrived_Sx, counts_Sx, grouped_xS.T, num_rows)
    source_W = _moved(grouped_xS, counts_Sx.T, arrived_Sx.T, num_rows)
    return RowPlan(source_W, slot_W[:, None]), sizes_x


def _moved(start_J, count_J, target_J, num_rows: int):
    """Where each of the rows goes when pieces that begin at `start_J` (in order) move to `target_J`; -1 between pieces."""
    start_J, count_J, target_J = (array.reshape(-1) for array in (start_J, count_J, target_J))
    row_W = jnp.arange(num_rows, dtype=jnp.int32)
    piece_W = jnp.maximum(jnp.searchsorted(start_J, row_W, side="right", method="scan_unrolled") - 1, 0)
    offset_W = row_W - start_J[piece_W]
    return jnp.where((offset_W >= 0) & (offset_W < count_J[piece_W]), target_J[piece_W] + offset_W, -1).astype(jnp.int32)


def inverse(plan: RowPlan) -> RowPlan:
    """The way back of a plan in which every row goes to at most one place (K = 1)."""
    return RowPlan(plan.slot_TK[:, 0], plan.source_R[:, None])


def _require_int32(num_tokens: int, k: int, *, num_devices: int, rows: int) -> None:
    """The plans count rows in int32, and one number more stands for no place."""
    for product, spelt, instead in (
        (num_tokens * k, f"T*K = {num_tokens} tokens x {k} experts", ""),
        (
            num_devices * rows,
            f"S*Q = {num_devices} devices x buckets of {rows}",
            ", or a smaller moe.capacity_factor (0 takes the worst case)",
        ),
    ):
        if product >= 2**31:
            raise ValueError(
                f"expert parallelism: {spelt} = {product} rows, and int32 numbers {2**31 - 1}. Fewer tokens on a device at a time would fit "
                f"(more train.accumulation){instead}."
            )
