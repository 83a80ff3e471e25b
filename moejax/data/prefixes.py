"""Samples with a common beginning, laid out as a tree: what they share stands once.

A sample is a run of tokens that is read from its first to its last: answers to one prompt, questions on one document. Samples that share
p tokens become one part of p - 1 tokens and, for each of them, a part that begins with a copy of the p-th: the token after which they
differ. So every token has one target, though the last shared one is followed by as many as there are samples.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How far samples may share."""

    min_shared: int
    """Tokens that samples must have in common, counted anew at each branching; at least 2."""
    row_segments: int
    """Segments of a row, the padding at its end among them."""

    def shared(self, sample: np.ndarray, others: Sequence[np.ndarray]) -> int:
        """Most tokens that a sample has in common with one of the others; 0 if they are too few."""
        beginning, size = sample[: self.min_shared].tobytes(), self.min_shared * sample.itemsize
        alike = (other for other in others if len(beginning) == size and other[: self.min_shared].tobytes() == beginning)
        return max((common(sample, other) for other in alike), default=0)

    def room(self, samples: Sequence[np.ndarray], seq_len: int) -> int:
        """Tokens that a row with these samples has left, 0 if it has no segment left; below 0: they do not fit."""
        parts = branches(samples, self.min_shared)
        tokens, segments = seq_len - sum(part.stop - part.start for part in parts), self.row_segments - 1 - len(parts)
        return tokens if segments > 0 else min(tokens, segments)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Tokens start to stop of a sample, after those of the parent."""

    sample: int
    start: int
    stop: int
    parent: int | None
    """Place in the list of parts."""


def branches(samples: Sequence[np.ndarray], min_shared: int) -> list[Part]:
    """The parts of a forest, parents before children and each tree in one run; trees in the order of their first samples.

    Args:
      samples: int32 [T] each.
      min_shared: see Sharing.
    """
    parts: list[Part] = []

    def grow(members: list[int], start: int, parent: int | None) -> None:
        for alike in _alike([(number, samples[number][start : start + min_shared]) for number in members], min_shared):
            if len(alike) == 1:
                parts.append(Part(alike[0], start, samples[alike[0]].size, parent))
                continue
            fork = min(common(samples[alike[0]], samples[other]) for other in alike[1:]) - 1
            parts.append(Part(alike[0], start, fork, parent))
            grow(alike, fork, len(parts) - 1)

    grow(list(range(len(samples))), 0, None)
    return parts


def common(one_T: np.ndarray, other_T: np.ndarray) -> int:
    """Tokens at the beginning of both."""
    size = min(one_T.size, other_T.size)
    differ_T = one_T[:size] != other_T[:size]
    return int(differ_T.argmax()) if differ_T.any() else size


def _alike(beginnings: list[tuple[int, np.ndarray]], size: int) -> list[list[int]]:
    """Members whose beginnings are equal, together; one that is shorter than `size` stays alone."""
    groups: dict[object, list[int]] = {}
    for number, tokens_T in beginnings:
        groups.setdefault(tokens_T.tobytes() if tokens_T.size == size else number, []).append(number)
    return list(groups.values())
