"""Samples with a common beginning, laid out as a tree: what they share stands once.

A sample is a run of tokens that is read from its first to its last: answers to one prompt, questions on one document. Samples that share
p tokens become one part of p - 1 tokens and, for each of them, a part that begins with a copy of the p-th: the token after which they
differ. So every token has one target, though the last shared one is followed by as many as there are samples.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Forest:
    """Samples that are one up to some token, from there on: one tree for all that go on alike. Which trees there are, and how large, follows
    from the samples alone, whatever their order. It never changes; `plant` makes another one, which shares the trees that stay."""

    trees: dict[object, "Tree"]
    """By the next min_shared tokens; a sample that has fewer left stands alone."""
    tokens: int = 0
    parts: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """Samples that go on alike from the token `start` on."""

    members: tuple[int, ...]
    """Places in the list of samples, rising."""
    start: int
    stop: int
    """Where they part; of a single one, its end."""
    branches: Forest
    """What comes after it; empty below a single sample."""

    @property
    def tokens(self) -> int:
        return self.stop - self.start + self.branches.tokens

    @property
    def parts(self) -> int:
        return 1 + self.branches.parts


EMPTY = Forest({})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How far samples may share."""

    min_shared: int
    """Tokens that samples must have in common, counted anew at each branching; at least 2."""
    row_segments: int
    """Segments of a row, the padding at its end among them."""

    def beginning(self, sample: np.ndarray) -> object:
        """Equal for samples that share their beginning."""
        return _next(sample, 0, self.min_shared)

    def shared(self, forest: Forest, samples: Sequence[np.ndarray], beginning: object, sample: np.ndarray) -> int:
        """Most tokens that a sample with this beginning has in common with one of the forest's."""
        return max(common(samples[member], sample) for member in forest.trees[beginning].members)

    def plant(self, forest: Forest, samples: Sequence[np.ndarray]) -> Forest:
        """The forest with the last of the samples, which the others already make."""
        return _plant(forest, samples, 0, self.min_shared)

    def forest(self, samples: Sequence[np.ndarray]) -> Forest:
        """Of all samples."""
        return _grow(samples, range(len(samples)), 0, self.min_shared)

    def room(self, seq_len: int, *forests: Forest) -> int:
        """Tokens that a row with these forests, none of whose samples begin alike, has left, 0 if it has no segment left; below 0: they do
        not fit."""
        tokens = seq_len - sum(forest.tokens for forest in forests)
        segments = self.row_segments - 1 - sum(forest.parts for forest in forests)
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

    def lay(forest: Forest, parent: int | None) -> None:
        for tree in forest.trees.values():
            parts.append(Part(tree.members[0], tree.start, tree.stop, parent))
            lay(tree.branches, len(parts) - 1)

    lay(_grow(samples, range(len(samples)), 0, min_shared), None)
    return parts


def common(one_T: np.ndarray, other_T: np.ndarray) -> int:
    """Tokens at the beginning of both."""
    size = min(one_T.size, other_T.size)
    differ_T = one_T[:size] != other_T[:size]
    first = int(differ_T.argmax()) if size else 0
    return first if size and differ_T[first] else size


def _grow(samples: Sequence[np.ndarray], members: Sequence[int], start: int, min_shared: int) -> Forest:
    groups: dict[object, list[int]] = {}
    for member in members:
        groups.setdefault(_next(samples[member], start, min_shared), []).append(member)
    trees = {key: _tree(samples, tuple(alike), start, min_shared) for key, alike in groups.items()}
    return Forest(trees, sum(tree.tokens for tree in trees.values()), sum(tree.parts for tree in trees.values()))


def _tree(samples: Sequence[np.ndarray], members: tuple[int, ...], start: int, min_shared: int) -> Tree:
    first, *others = (samples[member] for member in members)
    if not others:
        return Tree(members, start, first.size, EMPTY)
    stop = min(common(first, other) for other in others) - 1
    return Tree(members, start, stop, _grow(samples, members, stop, min_shared))


def _plant(forest: Forest, samples: Sequence[np.ndarray], start: int, min_shared: int) -> Forest:
    """With the last sample too."""
    number = len(samples) - 1
    key = _next(samples[number], start, min_shared)
    before = forest.trees.get(key)
    if before is None:
        after = Tree((number,), start, samples[number].size, EMPTY)
        return Forest({**forest.trees, key: after}, forest.tokens + after.tokens, forest.parts + 1)
    members = (*before.members, number)
    if before.branches.trees and common(samples[before.members[0]], samples[number]) > before.stop:
        after = Tree(members, start, before.stop, _plant(before.branches, samples, before.stop, min_shared))
    else:  # they part earlier now
        after = _tree(samples, members, start, min_shared)
    tokens, parts = after.tokens - before.tokens, after.parts - before.parts
    return Forest({**forest.trees, key: after}, forest.tokens + tokens, forest.parts + parts)


def _next(sample: np.ndarray, start: int, min_shared: int) -> object:
    """What samples that go on alike have in common; equal to nothing else if fewer tokens are left."""
    tokens_T = sample[start : start + min_shared]
    return tokens_T.tobytes() if tokens_T.size == min_shared else object()
