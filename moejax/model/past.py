"""What an earlier stretch of the same documents left, and what a later one starts from.

Of a row, only the document of its last token can go on. Attention leaves its last N keys and values (MLA: latents), linear attention its
state and the last inputs of its convolutions. The row of a later batch whose first token comes next in that document starts from them; any
other row starts from nothing. Whether a gradient flows back into a past is the caller's to say: it is an argument like any other.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from moejax_kernels.implementation import UnsupportedError
from moejax_kernels.segments import Segments

from moejax.model.context import Before, Context


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """What B rows leave."""

    next_B: Any
    """int32: place in its document of the token that would go on with the row; 0 if none can."""
    held_B: Any
    """int32: tokens right before it that the layers' arrays know of."""
    layers: dict
    """Each layer's arrays by name, a tree by section and place. Rows are their first dim; entries of `unit` are stacked along the depth."""


def before(past: Past, batch, *, num_keys: int) -> Before:
    """Which rows of a batch go on, and the borders of the past's keys and the rows' tokens together."""
    if batch.segments.ancestor_BUU is not None:
        raise UnsupportedError("a past goes on in plain documents, not in segments with parents; build the batch without parents.")
    goes_on_B = goes_on(past, batch.positions_BL[:, 0])
    held_B = jnp.where(goes_on_B, past.held_B, 0)
    return Before(goes_on_B=goes_on_B, held_B=held_B, segments=_joined(batch.segments, held_B, num_keys))


def goes_on(past: Past, first_B):
    """bool: is a row's first token, at this place in its document, the one that comes next?"""
    return (first_B > 0) & (first_B == past.next_B) & (past.held_B > 0)


def left(batch, layers: dict, before: Before | None) -> Past:
    """The past after a batch."""
    segments = batch.segments
    start_B, length = segments.starts_BL[:, -1], segments.ids_BL.shape[1]
    held_B = length - start_B
    if before is not None:  # the row's one document may have begun in the past
        held_B += jnp.where(start_B == 0, before.held_B, 0)
    open_B = segments.ids_BL[:, -1] >= 0
    return Past(jnp.where(open_B, batch.positions_BL[:, -1] + 1, 0), jnp.where(open_B, held_B, 0), layers)


def split(aux: dict) -> tuple[dict, dict]:
    """The layers' reports without what they leave, and what they leave."""
    without = {
        section: {place: {name: value for name, value in report.items() if name != "past"} for place, report in places.items()}
        for section, places in aux.items()
    }
    return without, {section: {place: report.get("past", {}) for place, report in places.items()} for section, places in aux.items()}


def extend(context: Context, **now) -> tuple[dict, dict]:
    """Arrays [B, L, ...] along the sequence behind the past's, [B, N + L, ...], and the last N of each for `left`; {} if none is asked for."""
    num_keys = context.switches.past_keys
    if not num_keys:
        return now, {}
    longer = now if context.past is None else {name: jnp.concatenate([context.past[name], array], 1) for name, array in now.items()}
    return longer, {name: _last(array, num_keys) for name, array in longer.items()}


def start(context: Context, name: str):
    """The state that rows start from, zeros in those that begin anew; None without a past."""
    if context.past is None or context.before is None:
        return None
    state = context.past[name]
    return jnp.where(context.before.goes_on_B.reshape(-1, *(1,) * (state.ndim - 1)), state, 0)


def report(kept: dict) -> dict:
    """What a layer reports of what it leaves."""
    return {"past": kept} if kept else {}


def _last(array_BSX, num_keys: int):
    missing = max(num_keys - array_BSX.shape[1], 0)
    padding = ((0, 0), (missing, 0), *((0, 0),) * (array_BSX.ndim - 2))
    return jnp.pad(array_BSX, padding)[:, array_BSX.shape[1] + missing - num_keys :]


def _joined(segments: Segments, held_B, num_keys: int) -> Segments:
    """Segments of `num_keys` positions before each row and of the row; the last held_B of them belong to the row's first document."""
    if num_keys == 0:
        return segments
    at_P, begin_B1 = jnp.arange(num_keys, dtype=jnp.int32), num_keys - jnp.minimum(held_B, num_keys)[:, None]
    in_past_BP = at_P >= begin_B1
    ids_BS = jnp.concatenate([jnp.where(in_past_BP, segments.ids_BL[:, :1], -1), segments.ids_BL], 1)
    of_row_BL = jnp.where(segments.starts_BL == 0, begin_B1, segments.starts_BL + num_keys)
    starts_BS = jnp.concatenate([jnp.where(in_past_BP, begin_B1, at_P), of_row_BL], 1)
    ends_BS = jnp.concatenate([jnp.where(in_past_BP, segments.ends_BL[:, :1] + num_keys, at_P), segments.ends_BL + num_keys], 1)
    at_S, length = jnp.arange(ids_BS.shape[1], dtype=jnp.int32), ids_BS.shape[1]
    previous_BS = jnp.where((starts_BS == at_S) | (ids_BS < 0), -1, at_S - 1)
    border_BS = jnp.concatenate([jnp.ones_like(ids_BS[:, :1], bool), ids_BS[:, 1:] != ids_BS[:, :-1]], 1)
    cu_seqlens_BN = jnp.pad(jnp.sort(jnp.where(border_BS, at_S, length), axis=1), ((0, 0), (0, 1)), constant_values=length)
    # made inside a program, where nobody verifies a checksum
    return Segments(ids_BS, starts_BS, ends_BS, previous_BS, cu_seqlens_BN, jnp.zeros_like(segments.checksum_B))
