"""Where each routed row goes: plans on both ends of the all-to-all. All local to one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from moejax_kernels import RowPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SendPlan:
    """What one device sends: a bucket of Q rows to each of S devices, rows of one expert side by side."""

    rows: RowPlan
    """Places of the T*K choices among S*Q rows."""
    counts_Se: Any
    """int32, rows per receiving device and expert there."""
    load_E: Any
    """int32, rows that tokens asked for per expert, dropped ones included."""
    num_dropped: Any
    """int32, rows that found no place."""


def bucket_rows(num_tokens: int, *, experts_per_token: int, num_experts: int, num_devices: int, capacity_factor: float) -> int:
    """Rows of one bucket (Q): the worst case if dropless (factor 0), else the factor times the mean, at least 1."""
    worst = num_tokens * min(experts_per_token, num_experts // num_devices)
    if capacity_factor == 0:
        return worst
    return min(worst, max(1, round(capacity_factor * num_tokens * experts_per_token / num_devices)))


def plan_send(ids_TK, *, num_experts: int, num_devices: int, rows: int) -> SendPlan:
    """Sorts the choices by expert and gives each a row of its device's bucket; earlier tokens find a place first.

    Args:
      ids_TK: int32 experts, -1 for none.
      rows: rows of one bucket (Q).

    Raises:
      ValueError: row numbers would pass int32.
    """
    num_tokens, k = ids_TK.shape
    _require_int32(num_tokens, k, num_devices=num_devices, rows=rows)
    per_device = num_experts // num_devices
    expert_R = jnp.where(ids_TK < 0, num_experts, ids_TK).reshape(-1)
    load_E = _count(expert_R, num_experts)
    if rows < num_tokens * min(k, per_device):  # the worst case cannot overflow
        device_R = expert_R // per_device
        mine_RS = (device_R[:, None] == jnp.arange(num_devices)).astype(jnp.int32)
        rank_R = jnp.sum((jnp.cumsum(mine_RS, 0) - 1) * mine_RS, 1)
        expert_R = jnp.where(rank_R < rows, expert_R, num_experts)
    kept_E = _count(expert_R, num_experts)
    counts_Se = kept_E.reshape(num_devices, per_device)
    order_R = jnp.argsort(expert_R, stable=True).astype(jnp.int32)
    sorted_expert_R = expert_R[order_R]
    device_R = jnp.minimum(sorted_expert_R // per_device, num_devices - 1)
    sent_S = counts_Se.sum(1, dtype=jnp.int32)
    device_start_S = jnp.cumsum(sent_S, dtype=jnp.int32) - sent_S
    slot_R = device_R * rows + jnp.arange(order_R.size, dtype=jnp.int32) - device_start_S[device_R]
    slot_R = jnp.where(sorted_expert_R < num_experts, slot_R, num_devices * rows)
    source_R = jnp.full(num_devices * rows, -1, jnp.int32).at[slot_R].set(order_R // k, mode="drop")
    slot_TK = jnp.zeros(num_tokens * k, jnp.int32).at[order_R].set(jnp.where(slot_R < num_devices * rows, slot_R, -1))
    dropped = jnp.sum(load_E - kept_E, dtype=jnp.int32)
    return SendPlan(RowPlan(source_R, slot_TK.reshape(num_tokens, k)), counts_Se, load_E, dropped)


def plan_receive(counts_Se, *, rows: int) -> tuple[RowPlan, Any]:
    """Groups the rows that arrived by expert: sender s's bucket holds counts_Se[s, e] rows of expert e, in order.

    Returns:
      plan from the S*Q arrived rows to as many grouped rows (K = 1), and group sizes per expert, int32 [e].
    """
    num_senders, num_local = counts_Se.shape
    sizes_e = counts_Se.sum(0, dtype=jnp.int32)
    group_start_e = jnp.cumsum(sizes_e) - sizes_e
    before_Se = jnp.cumsum(counts_Se, 0) - counts_Se + group_start_e  # where sender s's rows of expert e begin
    bucket_end_Se = jnp.cumsum(counts_Se, 1)
    place_Q = jnp.arange(rows, dtype=jnp.int32)
    expert_SQ = jnp.sum(place_Q[None, :, None] >= bucket_end_Se[:, None, :], -1)
    real_SQ = expert_SQ < num_local
    expert_SQ = jnp.minimum(expert_SQ, num_local - 1)
    take = lambda table_Se: jnp.take_along_axis(table_Se, expert_SQ, 1)
    slot_SQ = take(before_Se) + place_Q - (take(bucket_end_Se) - take(counts_Se))
    slot_W = jnp.where(real_SQ, slot_SQ, -1).reshape(-1).astype(jnp.int32)
    num_rows = num_senders * rows
    source_W = (
        jnp.full(num_rows, -1, jnp.int32)
        .at[jnp.where(slot_W < 0, num_rows, slot_W)]
        .set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")
    )
    return RowPlan(source_W, slot_W[:, None]), sizes_e


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


def _count(expert_R, num_experts: int):
    return jnp.zeros(num_experts, jnp.int32).at[expert_R].add(1, mode="drop")
