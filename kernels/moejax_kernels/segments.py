"""Documents packed into rows: who may see whom. Built once per batch on the host, handed to every op."""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # numpy on the host, jax.Array inside a program


class StaleSegmentsError(ValueError):
    """Segments that were not built from the ids they carry."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Segments:
    """Borders of packed documents, int32 throughout.

    A segment is a run of equal ids in a row; -1 is padding. In a tree of shared prefixes a segment continues an earlier
    one (its parent): it starts from the parent's end, and sees the parent's tokens and its ancestors'. Its documents are the
    ways from a segment without parent to one without children.
    """

    ids_BL: Array
    """Segment of each token; -1: padding."""
    starts_BL: Array
    """First position of the token's segment (a padding token: its own position)."""
    ends_BL: Array
    """One past the last position of the token's segment (a padding token: its own position)."""
    previous_BL: Array
    """Position of the token before this one in its document: one to the left, the parent's last token, or -1 at a document's start."""
    cu_seqlens_BN: Array
    """Starts of each row's segments, padding runs included, then L up to a static length of L + 1."""
    checksum_B: Array
    """CRC-32 of each row of ids (and parents), as int32 bits."""
    index_BL: Array | None = None
    """Trees only: dense number of the token's segment in its row, 0 first; padding: the last number."""
    ancestor_BUU: Array | None = None
    """Trees only: bool, [own, other]: `other` is `own` or an ancestor of it."""
    copies_BL: Array | None = None
    """Trees only: documents that hold the token; padding: 0."""
    first_BU: Array | None = None
    """Trees only: first position of each segment, by its number; L for numbers without one."""

    @classmethod
    def build(cls, ids_BL, parent=None, *, num_segments: int | None = None) -> "Segments":
        """Reads the borders off the ids, with numpy.

        Args:
          ids_BL: integers [B, L]; >= 0 and not decreasing along a row, -1 for padding (at any place).
          parent: None, or one dict per row: segment id -> id of an earlier segment of that row which it continues.
          num_segments: with parents: U, so that batches have equal shapes; None: as many as the fullest row has, padding runs included.

        Raises:
          ValueError: ids decrease along a row, an id is below -1, a parent is not an earlier segment of its row, or a row has more
            than num_segments.
        """
        ids_BL = np.ascontiguousarray(ids_BL)
        if ids_BL.ndim != 2 or not np.issubdtype(ids_BL.dtype, np.integer):
            raise ValueError(f"segment ids must be integers [B, L], got {ids_BL.dtype} {ids_BL.shape}.")
        ids_BL = ids_BL.astype(np.int32)
        _check_ids(ids_BL)
        num_rows, length = ids_BL.shape
        position_L = np.arange(length, dtype=np.int32)
        border_BL = np.ones_like(ids_BL, dtype=bool)
        border_BL[:, 1:] = ids_BL[:, 1:] != ids_BL[:, :-1]
        start_BL = border_BL | (ids_BL < 0)
        starts_BL = np.maximum.accumulate(np.where(start_BL, position_L, 0), axis=1)
        last_BL = np.ones_like(start_BL)
        last_BL[:, :-1] = start_BL[:, 1:]
        ends_BL = np.minimum.accumulate(np.where(last_BL, position_L + 1, length)[:, ::-1], axis=1)[:, ::-1]
        ends_BL = np.where(ids_BL < 0, position_L, ends_BL)
        previous_BL = np.where(start_BL, -1, position_L - 1)
        cu_seqlens_BN = np.full((num_rows, length + 1), length)
        cu_seqlens_BN[:, :length] = np.sort(np.where(border_BL, position_L, length), axis=1)
        index_BL = ancestor_BUU = copies_BL = first_BU = None
        if parent is not None:
            index_BL, ancestor_BUU, previous_BL = _tree(ids_BL, border_BL, ends_BL, previous_BL, parent, num_segments)
            copies_BL = _copies(ids_BL, index_BL, ancestor_BUU)
            first_BU = np.full(ancestor_BUU.shape[:2], length)
            row_N, at_N = np.nonzero(border_BL)
            first_BU[row_N, index_BL[row_N, at_N]] = at_N
        as_int32 = lambda array: None if array is None else np.ascontiguousarray(array, dtype=np.int32)
        return cls(
            as_int32(ids_BL),
            as_int32(starts_BL),
            as_int32(ends_BL),
            as_int32(previous_BL),
            as_int32(cu_seqlens_BN),
            _checksum(ids_BL, previous_BL),
            as_int32(index_BL),
            ancestor_BUU,
            as_int32(copies_BL),
            as_int32(first_BU),
        )

    @classmethod
    def whole(cls, num_rows: int, length: int) -> "Segments":
        """One document per row."""
        return cls.build(np.zeros((num_rows, length), np.int32))

    def verify(self) -> None:
        """Raises StaleSegmentsError unless checksum, borders and tree belong to the ids. Host arrays only."""
        ids_BL, previous_BL = np.asarray(self.ids_BL), np.asarray(self.previous_BL)
        wrong_B = _checksum(ids_BL, previous_BL) != np.asarray(self.checksum_B)
        wrong = {"the ids (or parents)": wrong_B}
        if not wrong_B.any():  # else the ids may be none that can be built from
            parent = None if self.index_BL is None else _parents(ids_BL, previous_BL)
            num_segments = None if self.ancestor_BUU is None else np.shape(self.ancestor_BUU)[1]
            fresh = Segments.build(ids_BL, parent, num_segments=num_segments)
            wrong = {
                field.name: _rows_that_differ(getattr(self, field.name), getattr(fresh, field.name)) for field in dataclasses.fields(self)
            }
        for name, wrong_B in wrong.items():
            if wrong_B.any():
                raise StaleSegmentsError(
                    f"segments are stale: in rows {np.flatnonzero(wrong_B).tolist()} {name} is not what was built from the ids. "
                    "Call Segments.build again after changing ids."
                )

    def positions(self) -> np.ndarray:
        """Position of each token in its document, int32 [B, L], padding 0. Host arrays only."""
        previous_BL, starts_BL = np.asarray(self.previous_BL), np.asarray(self.starts_BL)
        positions_BL = np.arange(previous_BL.shape[1]) - starts_BL
        if self.index_BL is None:
            return positions_BL.astype(np.int32)
        ends_BL, at_L = np.asarray(self.ends_BL), np.arange(previous_BL.shape[1])
        for row, at in np.argwhere((starts_BL == at_L) & (previous_BL >= 0)):  # parents come earlier, so one pass from the left is enough
            positions_BL[row, at : ends_BL[row, at]] += positions_BL[row, previous_BL[row, at]] + 1
        return positions_BL.astype(np.int32)

    def rebuilt(self) -> "Segments":
        """The same, read off the ids anew inside a program; what a batch brings is built once, on the host.

        Raises:
          ValueError: segments with parents, which the ids do not tell.
        """
        if self.index_BL is not None:
            raise ValueError("segments with parents cannot be rebuilt from their ids alone.")
        ids_BL = jnp.asarray(self.ids_BL)
        length = ids_BL.shape[1]
        at_L = jnp.arange(length, dtype=jnp.int32)
        border_BL = jnp.pad(ids_BL[:, 1:] != ids_BL[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        start_BL = border_BL | (ids_BL < 0)
        last_BL = jnp.pad(start_BL[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        starts_BL = jax.lax.cummax(jnp.where(start_BL, at_L, 0), axis=1)
        ends_BL = jax.lax.cummin(jnp.where(last_BL, at_L + 1, length), axis=1, reverse=True)
        borders_BL = jnp.sort(jnp.where(border_BL, at_L, length), axis=1)
        return dataclasses.replace(
            self,
            starts_BL=starts_BL,
            ends_BL=jnp.where(ids_BL < 0, at_L, ends_BL),
            previous_BL=jnp.where(start_BL, -1, at_L - 1),
            cu_seqlens_BN=jnp.pad(borders_BL, ((0, 0), (0, 1)), constant_values=length),
        )

    def multiplicity(self):
        """How often each token stands in the batch with every document written out, int32 [B, L]: 1, a tree's prefix more, padding 0."""
        return (self.ids_BL >= 0).astype("int32") if self.copies_BL is None else self.copies_BL

    def sizes(self):
        """Trees only: tokens of each segment, int32 [B, U]."""
        first_BU = jnp.asarray(self.first_BU)
        return jnp.diff(first_BU, axis=1, append=jnp.full_like(first_BU[:, :1], self.ids_BL.shape[1]))

    def visible(self, query_Q, key_K):
        """Bool [B, Q, K]: may the token at row position query_Q see the one at key_K? Causal, same document, no padding."""
        query_Q, key_K = jnp.asarray(query_Q), jnp.asarray(key_K)
        take = lambda array_BL, at: jnp.take(array_BL, at, axis=1)
        ids_BL = jnp.asarray(self.ids_BL)
        causal_QK = key_K[None, :] <= query_Q[:, None]
        real_BQK = (take(ids_BL, query_Q) >= 0)[:, :, None] & (take(ids_BL, key_K) >= 0)[:, None, :]
        if self.ancestor_BUU is None:
            related_BQK = take(ids_BL, query_Q)[:, :, None] == take(ids_BL, key_K)[:, None, :]
        else:
            own_BQ, other_BK = take(self.index_BL, query_Q), take(self.index_BL, key_K)
            related_BQK = jax.vmap(lambda ancestor_UU, own_Q, other_K: ancestor_UU[own_Q][:, other_K])(
                jnp.asarray(self.ancestor_BUU), own_BQ, other_BK
            )
        return causal_QK & real_BQK & related_BQK


def _check_ids(ids_BL: np.ndarray) -> None:
    if (ids_BL < -1).any():
        raise ValueError(f"segment ids must be >= 0, or -1 for padding; got {ids_BL.min()}.")
    highest_BL = np.maximum.accumulate(ids_BL, axis=1)
    wrong = np.argwhere((ids_BL >= 0) & (ids_BL < highest_BL))
    if wrong.size:
        row, at = wrong[0]
        raise ValueError(f"segment ids must not decrease along a row: row {row} has {ids_BL[row, at]} at {at} after {highest_BL[row, at]}.")
    split = (ids_BL[:, 1:] == highest_BL[:, :-1]) & (ids_BL[:, 1:] >= 0) & (ids_BL[:, :-1] < 0)
    if split.any():
        row, at = np.argwhere(split)[0]
        raise ValueError(f"padding must not split a segment: row {row} returns to id {ids_BL[row, at + 1]} at {at + 1}.")


def _checksum(ids_BL: np.ndarray, previous_BL: np.ndarray) -> np.ndarray:
    rows = zip(np.asarray(ids_BL, np.int32), np.asarray(previous_BL, np.int32), strict=True)
    return np.array([zlib.crc32(previous_L.tobytes(), zlib.crc32(ids_L.tobytes())) for ids_L, previous_L in rows], np.uint32).view(np.int32)


def _rows_that_differ(ours, fresh) -> np.ndarray:
    if ours is None or fresh is None:
        return np.array([ours is not fresh])
    ours, fresh = np.asarray(ours), np.asarray(fresh)
    if ours.shape != fresh.shape:
        return np.ones(fresh.shape[0], bool)
    return (ours != fresh).reshape(fresh.shape[0], -1).any(1)


def _parents(ids_BL: np.ndarray, previous_BL: np.ndarray) -> list[dict[int, int]]:
    """Back from previous_BL to what `build` takes: where a segment begins, the token before it is its parent's last."""
    start_BL = np.ones(ids_BL.shape, bool)
    start_BL[:, 1:] = ids_BL[:, 1:] != ids_BL[:, :-1]
    start_BL &= (ids_BL >= 0) & (previous_BL >= 0)
    return [
        {int(ids_L[at]): int(ids_L[previous_L[at]]) for at in np.flatnonzero(start_L)}
        for ids_L, previous_L, start_L in zip(ids_BL, previous_BL, start_BL, strict=True)
    ]


def _tree(ids_BL, border_BL, ends_BL, previous_BL, parent, num_segments):
    if len(parent) != ids_BL.shape[0]:
        raise ValueError(f"parent has {len(parent)} rows, ids have {ids_BL.shape[0]}.")
    index_BL = np.cumsum(border_BL, axis=1) - 1
    most = int(index_BL.max()) + 1
    num = most if num_segments is None else num_segments
    if most > num:
        raise ValueError(f"a row has {most} segments, padding runs included, and num_segments={num}.")
    ancestor_BUU = np.broadcast_to(np.eye(num, dtype=bool), (ids_BL.shape[0], num, num)).copy()
    previous_BL = previous_BL.copy()
    for row, edges in enumerate(parent):
        first = {int(ids_BL[row, at]): at for at in np.flatnonzero(border_BL[row]) if ids_BL[row, at] >= 0}
        for child in sorted(edges):
            above = edges[child]
            if child not in first or above not in first or above >= child:
                raise ValueError(
                    f"parent of segment {child} in row {row} is {above}: both must be in the row, the parent earlier. Row has {sorted(first)}."
                )
            own, other = index_BL[row, first[child]], index_BL[row, first[above]]
            ancestor_BUU[row, own] |= ancestor_BUU[row, other]
            previous_BL[row, first[child]] = ends_BL[row, first[above]] - 1
    return index_BL, ancestor_BUU, previous_BL


def _copies(ids_BL, index_BL, ancestor_BUU):
    """Documents below each token: segments that nobody continues, itself or a descendant."""
    is_leaf_BU = np.zeros(ancestor_BUU.shape[:2], bool)
    row_N, at_N = np.nonzero(ids_BL >= 0)
    is_leaf_BU[row_N, index_BL[row_N, at_N]] = True
    is_leaf_BU &= ancestor_BUU.sum(1) == 1
    copies_BU = (ancestor_BUU & is_leaf_BU[:, :, None]).sum(1)
    return np.where(ids_BL >= 0, np.take_along_axis(copies_BU, index_BL, axis=1), 0)
