"""Experts on other devices than their own: where a choice goes, and how a copy's weights get there.

The host decides a placement now and then (`moejax.moe.placement`); the tables made of it enter the step as arrays, so nothing compiles
anew. Weights of copies are fetched inside the step; the transpose of the fetch sums their gradients at the expert's home, and the
optimizer never sees a copy.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.moe.placement import Plan

UNITS = 1 << 16
"""Rows of an expert are numbered in 1/UNITS, and go to a copy by that number."""
ROW_STEP, DEVICE_STEP = 40503, 49471
"""UNITS / 1.6180 and UNITS / 1.3247, odd: steps of low-discrepancy sequences, which spread the rows of one sender, and the first rows of
all senders, over the copies evenly. Products wrap around in int32, which leaves the lower 16 bits right."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """A placement as the step reads it; the same on every device. J = S*C copies, sorted by expert; without room for any, C = 0, all but the
    homes is None."""

    position_E: Any
    """int32, home of each expert: device position // e, place position % e there."""
    copy_SC: Any
    """int32, position of the expert that a device holds a copy of; -1: none."""
    position_J: Any
    """int32, positions of the copied experts in order; E for no copy."""
    begin_J: Any
    """int32, a row goes to this copy if its number lies between begin and end."""
    end_J: Any
    slot_J: Any
    """int32, the copy's slot."""
    share_SC: Any
    """float32, share of the expert's rows that go to a copy; from it and the rest the plan can be read back."""


def tables(plan: Plan) -> Tables:
    """Tables of a placement; numpy."""
    num_experts = plan.expert_at_E.size
    num_devices, num_copies = plan.copy_SC.shape
    own = num_experts // num_devices
    position_E = np.empty(num_experts, np.int32)
    position_E[plan.expert_at_E] = np.arange(num_experts)
    if not num_copies:
        return Tables(position_E, *(None,) * 6)
    position_J, share_J = plan.copy_SC.reshape(-1), plan.share_SC.reshape(-1)
    device_J, copy_J = np.divmod(np.arange(position_J.size), num_copies)
    slot_J = device_J * (own + num_copies) + own + copy_J
    position_J = np.where(position_J < 0, num_experts, position_J)
    order_J = np.argsort(position_J, kind="stable")
    position_J, share_J, slot_J = position_J[order_J], share_J[order_J], slot_J[order_J]
    end_J = np.zeros(position_J.size)
    for position in np.unique(position_J):
        of_expert = position_J == position
        end_J[of_expert] = np.cumsum(share_J[of_expert])
    begin_J, end_J = np.rint((end_J - share_J) * UNITS), np.rint(end_J * UNITS)
    whole = lambda array: np.asarray(array, np.int32)
    return Tables(
        position_E,
        whole(plan.copy_SC),
        whole(position_J),
        whole(begin_J),
        whole(end_J),
        whole(slot_J),
        np.asarray(plan.share_SC, np.float32),
    )


def plan_of(tables: Tables, *, num_devices: int) -> Plan:
    """The placement that tables were made of."""
    expert_at_E = np.argsort(np.asarray(tables.position_E)).astype(np.int32)
    if tables.copy_SC is None:
        return Plan(expert_at_E=expert_at_E, copy_SC=np.zeros((num_devices, 0), np.int32), share_SC=np.zeros((num_devices, 0), np.float32))
    return Plan(expert_at_E=expert_at_E, copy_SC=np.asarray(tables.copy_SC), share_SC=np.asarray(tables.share_SC))


def slots_of(ids_TK, rank_TK, tables: Tables, *, device):
    """Slot of each choice; without copies the expert's position.

    Args:
      ids_TK: int32 experts, -1 for none.
      rank_TK: int32, how many earlier choices on this device are of the same expert.
      device: this device's index on the `expert` axis; shifts which rows go to a copy.
    """
    position_TK = tables.position_E[jnp.maximum(ids_TK, 0)]
    if tables.copy_SC is None:
        return jnp.where(ids_TK < 0, -1, position_TK)
    num_devices, num_copies = tables.copy_SC.shape
    own = tables.position_E.size // num_devices
    slot_TK = position_TK // own * (own + num_copies) + position_TK % own
    number_TK = (rank_TK * ROW_STEP + device * DEVICE_STEP) & (UNITS - 1)
    # the last copy that begins at or before the row's number, if it is one of this expert and does not end before
    key_J = tables.position_J * UNITS + tables.begin_J
    at_TK = jnp.searchsorted(key_J, position_TK * UNITS + number_TK, side="right", method="scan_unrolled") - 1
    hit_TK = (at_TK >= 0) & (tables.position_J[at_TK] == position_TK) & (number_TK < tables.end_J[at_TK])
    slot_TK = jnp.where(hit_TK, tables.slot_J[at_TK], slot_TK)
    return jnp.where(ids_TK < 0, -1, slot_TK)


def with_copies(array_eXX, tables: Tables):
    """This device's experts, and behind them its copies, fetched from their homes over the `expert` axis; inside shard_map.

    A sum over devices of which one adds something else than 0, scattered: (S - 1)*C experts cross the wire for each device.
    """
    if tables.copy_SC is None:
        return array_eXX
    own = array_eXX.shape[0]
    local_SC = tables.copy_SC - jax.lax.axis_index("expert") * own
    mine_SC = (local_SC >= 0) & (local_SC < own) & (tables.copy_SC >= 0)
    wide = (..., *(None,) * (array_eXX.ndim - 1))
    asked_SCXX = jnp.where(mine_SC[wide], array_eXX[jnp.clip(local_SC, 0, own - 1)], 0)
    copies_CXX = jax.lax.psum_scatter(asked_SCXX, "expert", scatter_dimension=0, tiled=False)
    return jnp.concatenate([array_eXX, copies_CXX])
