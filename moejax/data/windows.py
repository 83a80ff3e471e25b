"""Long documents in windows: a row of the batch after goes on where the row ended.

Row r of every batch belongs to lane r. A document that fits a row stays whole, and is put where room for it is left; a longer one begins
where room is left and goes on at the start of the lane's next row, until it is read. So a lane has one unfinished document at most, and
what a layer left at the end of row r is what row r of the next batch starts from. The target of a window's last token is the next window's
first one.
"""

import dataclasses
from typing import Any

import numpy as np

from moejax.data.batch import NOTHING
from moejax.data.packing import Documents, no_token_error, require_length


@dataclasses.dataclass(frozen=True, slots=True)
class WindowRow:
    """A row of one lane."""

    pieces: list[np.ndarray]
    """int32 [T] each, seq_len tokens or fewer in all."""
    start: int
    """Place in its document of the row's first token."""
    following: int
    """The token that comes after the row's last one in its document; NOTHING: none."""


class Lanes:
    """Iterator of batches, each a list of rows, one a lane."""

    def __init__(self, documents: Documents, *, seq_len: int, pack_rows: int, num_lanes: int, epoch: int):
        """Starts at the first document.

        Args:
          documents: tokens of document 0, 1, ...; read by place, again after `restore`.
          seq_len: tokens of a row.
          pack_rows: documents that wait at a time for a row with room.
          num_lanes: rows of a batch.
          epoch: documents in which everything there is has come by; as many without a token, one after the other, are an error.
        """
        self._documents, self._seq_len, self._pack_rows, self._epoch = documents, seq_len, pack_rows, epoch
        self._next_document, self._num_empty = 0, 0
        self._waiting: list[int] = []
        self._lanes: list[tuple[int, int] | None] = [None] * num_lanes  # document, tokens taken
        self._tokens: dict[int, Any] = {}  # of the documents that wait or are unfinished

    def __iter__(self) -> "Lanes":
        return self

    def __next__(self) -> list[WindowRow]:
        """The next row of each lane, empty ones where documents end. Then StopIteration."""
        rows = [self._row(lane) for lane in range(len(self._lanes))]
        if not any(row.pieces for row in rows):
            raise StopIteration
        return rows

    def state(self) -> dict:
        """Position after the last batch handed out: numbers only, no tokens."""
        lanes = [None if at is None else list(at) for at in self._lanes]
        return {"next_document": self._next_document, "num_empty": self._num_empty, "waiting": list(self._waiting), "lanes": lanes}

    def restore(self, state: dict) -> None:
        """Continues at a `state()`.

        Raises:
          StateMismatchError: a document is shorter than it was.
        """
        self._next_document, self._num_empty, self._waiting = state["next_document"], state["num_empty"], list(state["waiting"])
        self._lanes = [None if at is None else tuple(at) for at in state["lanes"]]
        self._tokens = {document: self._documents[document] for document in self._waiting}
        for document in self._waiting:
            require_length(document, self._tokens[document], 1)
        for document, taken in filter(None, self._lanes):
            self._tokens[document] = self._documents[document]
            require_length(document, self._tokens[document], taken + 1)

    def _row(self, lane: int) -> WindowRow:
        unfinished, room, pieces = self._lanes[lane], self._seq_len, []
        start, following = (0 if unfinished is None else unfinished[1]), NOTHING
        self._lanes[lane] = None
        while room and (at := unfinished or self._begin(room)) is not None:
            (document, taken), unfinished = at, None
            tokens_T = self._tokens[document]
            stop = min(taken + room, tokens_T.size)
            pieces.append(tokens_T[taken:stop].copy())
            room -= stop - taken
            if stop < tokens_T.size:
                self._lanes[lane], following = (document, stop), int(tokens_T[stop])
            else:
                del self._tokens[document]
        return WindowRow(pieces, start, following)

    def _begin(self, room: int) -> tuple[int, int] | None:
        """The first waiting document that fits the room, or that no row can hold."""
        while len(self._waiting) < self._pack_rows and self._next_document < len(self._documents):
            self._wait(self._next_document)
            self._next_document += 1
        for document in self._waiting:
            size = self._tokens[document].size
            if size <= room or size > self._seq_len:
                self._waiting.remove(document)
                return document, 0
        return None

    def _wait(self, document: int) -> None:
        tokens_T = self._documents[document]
        self._num_empty = 0 if tokens_T.size else self._num_empty + 1
        if self._num_empty >= self._epoch:
            raise no_token_error(self._num_empty)
        if tokens_T.size:
            self._tokens[document] = tokens_T
            self._waiting.append(document)
