"""Training and held-out documents, and the endless stream that mixes the sources."""

import hashlib
from collections.abc import Mapping
from typing import Literal

import grain
import numpy as np

from moejax.config.data import DataConfig
from moejax.config.errors import ConfigError
from moejax.data.sources import DataError, Document, Source, open_source
from moejax.data.tokenizers import Tokenizer

SplitName = Literal["train", "heldout"]


class Split:
    """The training or the held-out documents of a source; a random-access data source like it."""

    def __init__(self, source: Source, indices_N: np.ndarray):
        self.source = source
        self._indices_N = indices_N

    def __len__(self) -> int:
        return self._indices_N.size

    def __getitem__(self, index: int) -> Document:
        return self.source[int(self._indices_N[index])]

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
        source = open_source(source_config)
        heldout_N = np.fromiter((is_heldout(source.name(index), config.heldout_percent) for index in range(len(source))), bool, len(source))
        for split, opened in splits.items():
            indices_N = np.flatnonzero(heldout_N == (split == "heldout"))
            if not indices_N.size:
                raise ConfigError(
                    f"{_spell(config, at)} has no {split} document: data.heldout_percent={config.heldout_percent} keeps "
                    f"{int(heldout_N.sum())} of its {len(source)} for evaluation. More and smaller documents, or another "
                    "percentage, would fit."
                )
            opened.append(Split(source, indices_N))
    return {split: tuple(opened) for split, opened in splits.items()}


def require_targets(config: DataConfig, splits: Mapping[SplitName, tuple[Split, ...]], tokenizer: Tokenizer) -> None:
    """Raises DataError if all documents of a source in a split are shorter than two tokens, so that there is nothing to predict.

    Reads each split up to its first document that is long enough, which is nearly always the first.
    """
    for split, opened in splits.items():
        for at, documents in enumerate(opened):
            longest = 0
            for index in range(len(documents)):
                longest = max(longest, tokenizer.encode(documents[index].text).size)
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
    return max(int(1.01 * len(documents) * total / source.weight) + 1 for documents, source in zip(splits, config.sources, strict=True))


def token_stream(config: DataConfig, splits: tuple[Split, ...], split: SplitName, tokenizer: Tokenizer) -> grain.MapDataset:
    """Tokens of the mixture's documents by place in the stream, int32 [T] each.

    Sources give documents in shares of their weights (grain keeps them to 1 %). Training: without end, each source in a new
    order each epoch. Held-out: one order whatever the seed, each document at most once, up to where the first source ends.
    """
    streams = []
    for at, documents in enumerate(splits):
        # grain seeds epoch n with seed + n: hashing keeps the sources' (and neighbouring seeds') orders apart
        seed = _hash(f"{config.shuffle_seed if split == 'train' else 'heldout'}/{at}") % 2**32
        stream = grain.MapDataset.source(documents).shuffle(seed=seed)
        streams.append(stream.repeat() if split == "train" else stream)
    stream = streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, [source.weight for source in config.sources])
    return stream.map(lambda document: tokenizer.encode(document.text))


def _spell(config: DataConfig, at: int) -> str:
    return f"data.sources[{at}] (kind={config.sources[at].kind!r}, path={config.sources[at].path!r})"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")
