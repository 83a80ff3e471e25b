"""Training and held-out documents, and the endless stream that mixes the sources."""

import functools
import hashlib
import sys
from collections.abc import Mapping
from typing import Any, Literal

import grain
import numpy as np

from moejax.config.data import DataConfig
from moejax.config.errors import ConfigError
from moejax.data.sources import DataError, Document, Source, open_source
from moejax.data.tokenizers import Tokenizer

SplitName = Literal["train", "heldout"]


class Split:
    """The training or the held-out documents of a source; a random-access data source like it.

    Its blocks are runs of `data.shuffle_block` documents of the source, which are kept for evaluation, or not, together.
    """

    def __init__(self, source: Source, indices_N: np.ndarray, block: int = 1):
        self.source = source
        self._indices_N = indices_N
        self._starts = np.flatnonzero(np.diff(indices_N // block, prepend=-1))

    def __len__(self) -> int:
        return self._indices_N.size

    def __getitem__(self, index: int) -> Document:
        return self.source[int(self._indices_N[index])]

    @property
    def num_blocks(self) -> int:
        """Blocks of the split."""
        return self._starts.size

    def block(self, number: int) -> range:
        """Documents of a block."""
        stop = self._starts[number + 1] if number + 1 < self.num_blocks else len(self)
        return range(int(self._starts[number]), int(stop))

    def name(self, index: int) -> str:
        """Name of a document, without reading its text."""
        return self.source.name(int(self._indices_N[index]))

    def digest(self) -> str:
        """Hash of the documents' names in order."""
        names = hashlib.sha256()
        for index in range(len(self)):
            names.update(self.name(index).encode("utf-8", "surrogateescape") + b"\n")
        return names.hexdigest()[:16]


def is_heldout(name: str, percent: int) -> bool:
    """Whether a document is kept for evaluation: a hash of its name alone, so other documents come and go without moving it."""
    return _hash(name) % 100 < percent


def open_splits(config: DataConfig) -> dict[SplitName, tuple[Split, ...]]:
    """Both splits of every source: a run that could not be evaluated ends before its first step.

    Raises:
      ConfigError: a source has no document in one of them.
      DataError: see `open_source`.
    """
    splits: dict[SplitName, list[Split]] = {"train": [], "heldout": []}
    for at, source_config in enumerate(config.sources):
        source, block = open_source(source_config), config.shuffle_block
        firsts = (source.name(index) for index in range(0, len(source), block))
        heldout_N = np.fromiter((is_heldout(name, config.heldout_percent) for name in firsts), bool, -(-len(source) // block))
        heldout_N = np.repeat(heldout_N, block)[: len(source)]
        for split, opened in splits.items():
            indices_N = np.flatnonzero(heldout_N == (split == "heldout"))
            if not indices_N.size:
                raise ConfigError(
                    f"{_spell(config, at)} has no {split} document: data.heldout_percent={config.heldout_percent} keeps "
                    f"{int(heldout_N.sum())} of its {len(source)} for evaluation. More and smaller documents, or another "
                    "percentage, would fit."
                )
            opened.append(Split(source, indices_N, block))
    return {split: tuple(opened) for split, opened in splits.items()}


def require_targets(config: DataConfig, splits: Mapping[SplitName, tuple[Split, ...]], tokenizer: Tokenizer) -> None:
    """Raises DataError if all documents of a source in a split are shorter than two tokens, so that there is nothing to predict.

    Reads each split up to its first document that is long enough, which is nearly always the first.
    """
    for split, opened in splits.items():
        for at, documents in enumerate(opened):
            longest = 0
            for index in range(len(documents)):
                longest = max(longest, tokenizer.encode(documents[index].text).size + bool(documents[index].prompt))
                if longest > 1:
                    break
            else:
                raise DataError(
                    f"{_spell(config, at)}: none of its {len(documents)} {split} documents has two tokens (the longest has {longest}), so "
                    f"there is nothing to predict. Give longer documents{'' if split == 'train' else ', or another data.heldout_percent'}."
                )


def epoch_length(config: DataConfig, splits: tuple[Split, ...]) -> int:
    """Documents of the mixture's stream in which each source is gone through at least once."""
    total = sum(source.weight for source in config.sources)
    # one percent more, and one: grain keeps to the weights up to that
    return config.shuffle_block * max(
        int(1.01 * documents.num_blocks * total / source.weight) + 1 for documents, source in zip(splits, config.sources, strict=True)
    )


class TokenStream:
    """Tokens of documents by place, int32 [T] each, those of a prompt as complements (`Batch.build`); a block that is short of documents
    has empty ones at its end."""

    def __init__(self, blocks: grain.MapDataset, splits: tuple[Split, ...], tokenizer: Tokenizer, size: int):
        """Takes the order of the blocks, (source, number) each, and how many documents one has at most."""
        self._blocks, self._splits, self._tokenizer, self._size = blocks, splits, tokenizer, size
        # each of a block's documents asks for it, and a shuffled place takes 0.1 ms
        self._block = functools.lru_cache(maxsize=16)(blocks.__getitem__)

    def __len__(self) -> int:
        return min(len(self._blocks) * self._size, sys.maxsize)

    def __getitem__(self, place: int) -> np.ndarray:
        block: Any = self._block(place // self._size)  # grain declares None too
        at, number = block
        members = self._splits[at].block(number)
        if place % self._size >= len(members):
            return np.zeros(0, np.int32)
        document, encode = self._splits[at][members[place % self._size]], self._tokenizer.encode
        return np.concatenate([~encode(document.prompt), encode(document.text)]) if document.prompt else encode(document.text)


def token_stream(config: DataConfig, splits: tuple[Split, ...], split: SplitName, tokenizer: Tokenizer) -> TokenStream:
    """Tokens of the mixture's documents by place in the stream.

    Sources give documents, or blocks of them, in shares of their weights (grain keeps them to 1 %). Training: without end, each source
    in a new order each epoch. Held-out: one order whatever the seed, each document at most once, up to where the first source ends.
    """
    streams = []
    for at, documents in enumerate(splits):
        # grain seeds epoch n with seed + n: hashing keeps the sources' (and neighbouring seeds') orders apart
        seed = _hash(f"{config.shuffle_seed if split == 'train' else 'heldout'}/{at}") % 2**32
        stream = grain.MapDataset.range(documents.num_blocks).shuffle(seed=seed).map(lambda number, at=at: (at, number))
        streams.append(stream.repeat() if split == "train" else stream)
    stream = streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, [source.weight for source in config.sources])
    return TokenStream(stream, splits, tokenizer, config.shuffle_block)


def _spell(config: DataConfig, at: int) -> str:
    return f"data.sources[{at}] (kind={config.sources[at].kind!r}, path={config.sources[at].path!r})"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")
