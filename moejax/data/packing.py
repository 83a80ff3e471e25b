"""First-fit packing of documents into rows.

Documents are cut into pieces of seq_len tokens and a rest; one that fits a row stays whole. A piece is a segment of its own:
the next piece does not see it, and its last token has no target. Full pieces are rows at once; the others go into the first
of `pack_rows` open rows that has room. A row is handed out when it is full, or, being the fullest, makes way for a new one.

Several documents are read side by side, a piece of each in turn: rows that follow each other come from different documents,
or a batch of short rows would see one document only. Within a document the pieces keep their order.

With shared prefixes a piece goes first to the open row with whose pieces it shares most, else to the first one with room for all
documents being read that begin like it. A row's room is counted in the tokens of its forest (`prefixes.Forest`), which follows from
its pieces alone and grows with each. A piece as long as a row still stands alone.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from moejax.data.prefixes import EMPTY, Forest, Sharing, branches
from moejax.data.sources import DataError


class StateMismatchError(ValueError):
    """A saved position in another stream of data. The message names what differs."""


class Documents(Protocol):
    """Tokens by place in the stream."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...  # int32 [T]; grain declares `T | None` and slices


@dataclasses.dataclass(slots=True, eq=False)
class _Row:
    places: list[tuple[int, int, int]]
    """Document, first token, one past the last token of each piece."""
    pieces: list[np.ndarray]
    room: int
    """Tokens that it has left."""
    forest: Forest = EMPTY
    """What its pieces make, if they share."""


class Packer:
    """Iterator of rows, each a list of pieces (int32 [T] each, seq_len tokens or fewer in all)."""

    def __init__(self, documents: Documents, *, seq_len: int, pack_rows: int, num_reading: int, epoch: int, sharing: Sharing | None = None):
        """Starts at the first document.

        Args:
          documents: tokens of document 0, 1, ...; read by place, again after `restore`.
          seq_len: tokens of a row.
          pack_rows: rows kept open.
          num_reading: documents read side by side.
          epoch: documents in which everything there is has come by; as many without a token, one after the other, are an error.
          sharing: how pieces share their beginnings; None: they do not.
        """
        self._documents, self._seq_len, self._pack_rows, self._num_reading = documents, seq_len, pack_rows, num_reading
        self._epoch, self._sharing = epoch, sharing
        self._next_document = 0
        self._reading: collections.deque[tuple[int, int]] = collections.deque()  # document, tokens taken
        self._tokens: dict[int, np.ndarray] = {}  # of the documents being read
        self._open: list[_Row] = []

    def __iter__(self) -> "Packer":
        return self

    def __next__(self) -> list[np.ndarray]:
        """The next row; where documents end, the open rows in the order of their opening. Then StopIteration."""
        while (place := self._next_place()) is not None:
            document, start, stop = place
            row = self._put(place, self._read(document)[start:stop].copy())
            self._turn(document, stop)
            if row is not None:
                return row.pieces
        if not self._open:
            raise StopIteration
        return self._open.pop(0).pieces

    def state(self) -> dict:
        """Position after the last row handed out: numbers only, no tokens."""
        return {
            "next_document": self._next_document,
            "reading": [list(at) for at in self._reading],
            "open": [[list(place) for place in row.places] for row in self._open],
        }

    def restore(self, state: dict) -> None:
        """Continues at a `state()`.

        Raises:
          StateMismatchError: a document is shorter than it was.
        """
        self._next_document = state["next_document"]
        self._reading = collections.deque((document, taken) for document, taken in state["reading"])
        self._tokens = {}
        for document, taken in self._reading:
            require_length(document, self._read(document), taken)
        self._open = [self._row_again([tuple(place) for place in places]) for places in state["open"]]

    def _next_place(self) -> tuple[int, int, int] | None:
        num_empty = 0
        while True:
            while len(self._reading) < self._num_reading and self._next_document < len(self._documents):
                self._reading.append((self._next_document, 0))
                self._next_document += 1
            if not self._reading:
                return None
            document, start = self._reading[0]
            stop = min(start + self._seq_len, self._read(document).size)
            if stop > start:
                return document, start, stop
            num_empty += 1
            if num_empty >= self._epoch:
                raise no_token_error(num_empty)
            self._turn(document, stop)

    def _turn(self, document: int, stop: int) -> None:
        """Sends the document whose piece was taken to the end of the queue, or away if it is read."""
        self._reading.popleft()
        if stop < self._tokens[document].size:
            self._reading.append((document, stop))
        else:
            del self._tokens[document]

    def _put(self, place: tuple[int, int, int], piece: np.ndarray) -> _Row | None:
        """Puts a piece where it belongs; returns a row that is done."""
        if piece.size == self._seq_len:
            return _Row([place], [piece], 0)
        (row, forest), done = self._fitting(piece), None
        if row is None:
            if len(self._open) == self._pack_rows:
                done = min(self._open, key=lambda row: row.room)
                self._open.remove(done)
            row = _Row([], [], self._seq_len)
            self._open.append(row)
        row.places.append(place)
        row.pieces.append(piece)
        row.forest, row.room = forest, self._room(row.pieces, forest)
        if not row.room:
            self._open.remove(row)
            return row
        return done

    def _fitting(self, piece: np.ndarray) -> tuple[_Row | None, Forest]:
        """The best open row with room, and its forest with the piece: where the piece shares most, then where its company has room too."""
        sharing = self._sharing
        if sharing is None:
            return next((row for row in self._open if piece.size <= row.room), None), EMPTY
        beginning = sharing.beginning(piece)
        alike = [row for row in self._open if beginning in row.forest.trees]
        if len(alike) > 1:
            alike.sort(key=lambda row: -sharing.shared(row.forest, row.pieces, beginning, piece))
        for row in alike:
            forest = sharing.plant(row.forest, [*row.pieces, piece])
            if sharing.room(self._seq_len, forest) >= 0:
                return row, forest
        company = sharing.forest([piece, *(other for other in self._heads() if sharing.beginning(other) == beginning)])
        if sharing.room(self._seq_len, company) < 0:  # no row is long enough
            company = sharing.forest([piece])
        others = (row for row in self._open if beginning not in row.forest.trees)
        row = next((row for row in others if sharing.room(self._seq_len, row.forest, company) >= 0), None)
        return row, sharing.forest([piece]) if row is None else sharing.plant(row.forest, [*row.pieces, piece])

    def _heads(self) -> Iterator[np.ndarray]:
        """The next pieces of the documents being read, but the first's."""
        for document, taken in itertools.islice(self._reading, 1, None):
            yield self._read(document)[taken : taken + self._seq_len]

    def _read(self, document: int) -> np.ndarray:
        if document not in self._tokens:
            self._tokens[document] = self._documents[document]
        return self._tokens[document]

    def _row_again(self, places: list[tuple[int, int, int]]) -> _Row:
        pieces = [self._again(*place) for place in places]
        forest = EMPTY if self._sharing is None else self._sharing.forest(pieces)
        return _Row(places, pieces, self._room(pieces, forest), forest)

    def _room(self, pieces: list[np.ndarray], forest: Forest) -> int:
        """Tokens that a row with these pieces has left."""
        if self._sharing is None:
            return self._seq_len - sum(piece.size for piece in pieces)
        return self._sharing.room(self._seq_len, forest)

    def _again(self, document: int, start: int, stop: int) -> np.ndarray:
        tokens_T = self._documents[document]
        require_length(document, tokens_T, stop)
        return tokens_T[start:stop].copy()


def require_length(document: int, tokens_T: np.ndarray, taken: int) -> None:
    """Raises StateMismatchError if a document is shorter than a saved position says."""
    if tokens_T.size < taken:
        raise StateMismatchError(
            f"document {document} of the stream has {tokens_T.size} tokens, and had {taken} or more when the state was "
            "saved: its file has changed. Put back the data as it was, or start anew."
        )


def no_token_error(num_empty: int) -> DataError:
    """What to raise after an epoch of documents without a token."""
    return DataError(
        f"{num_empty} documents one after the other, an epoch of data.sources, have no token. There was text when they were "
        "opened: their files have changed."
    )


def fill(rows: Sequence[Sequence[np.ndarray]], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of pieces as arrays: tokens_BL and segment_ids_BL, int32; what is left of a row is token 0 with id -1."""
    tokens_BL = np.zeros((len(rows), seq_len), np.int32)
    ids_BL = np.full((len(rows), seq_len), -1, np.int32)
    for row, pieces in enumerate(rows):
        at = 0
        for number, piece in enumerate(pieces):
            tokens_BL[row, at : at + piece.size] = piece
            ids_BL[row, at : at + piece.size] = number
            at += piece.size
    return tokens_BL, ids_BL


def fill_trees(rows: Sequence[Sequence[np.ndarray]], seq_len: int, min_shared: int) -> tuple[np.ndarray, np.ndarray, list[dict[int, int]]]:
    """As `fill`, what pieces share written once: tokens_BL, segment_ids_BL, and the parents of each row's segments."""
    forests = [branches(pieces, min_shared) for pieces in rows]
    parts = [[pieces[part.sample][part.start : part.stop] for part in forest] for pieces, forest in zip(rows, forests, strict=True)]
    parents = [{number: part.parent for number, part in enumerate(forest) if part.parent is not None} for forest in forests]
    return *fill(parts, seq_len), parents
