"""The baseline that a trained byte model must beat: the next byte given the two before it, counted.

A document is preceded by two zero bytes, so its first byte is counted too: contexts are (0, 0), (0, first), (first, second), ...
The estimate is add-0.1: p(byte | context) = (count(context, byte) + 0.1) / (count(context) + 25.6).
"""

from collections.abc import Iterable

import numpy as np

from moejax.config.data import DataConfig
from moejax.data.batch import Batch
from moejax.data.mixture import open_splits

_SMOOTHING = 0.1
_CHUNK_BYTES = 2**24  # documents are joined up to about this size: one bincount over 2**24 bins costs as much as counting 10 MB


class MarkovModel:
    """Order-2 byte model; 64 MB of counts."""

    def __init__(self, counts_XV: np.ndarray):
        """Takes counts of each byte after each context, integers [65536, 256]; a context is 256 * (byte before last) + last byte."""
        self._counts_N = counts_XV.reshape(-1)
        self._totals_X = counts_XV.sum(axis=1, dtype=np.int64)

    @classmethod
    def fit(cls, documents: Iterable[bytes]) -> "MarkovModel":
        """Counts every byte of every document."""
        counts_N = np.zeros(2**24, np.int32)
        for index_T in _joined_indices(documents):
            counts_N += np.bincount(index_T, minlength=2**24)
        return cls(counts_N.reshape(2**16, 2**8))

    def batch_nats(self, batch: Batch) -> tuple[float, float]:
        """Scores exactly the targets that a model's loss counts, with no context that the model does not see.

        Args:
          batch: host batch of the byte tokenizer. A piece of a document is preceded by two zero bytes like a document.

        Returns:
          Sum of weights * -log p over the batch, and the sum of weights. Divide the sums over all batches.

        Raises:
          ValueError: a token is no byte.
        """
        tokens_BL, previous_BL = np.asarray(batch.tokens_BL, np.int64), np.asarray(batch.segments.previous_BL)
        if tokens_BL.max() > 255:
            raise ValueError(f"the Markov baseline reads bytes, but the batch holds token {tokens_BL.max()}; use data.tokenizer='bytes'.")
        before_BL = np.where(previous_BL >= 0, np.take_along_axis(tokens_BL, np.maximum(previous_BL, 0), axis=1), 0)
        nats_BL = self._nats((before_BL << 16) + (tokens_BL << 8) + np.asarray(batch.targets_BL))
        weights_BL = np.asarray(batch.weights_BL, np.float64)
        return float((weights_BL * nats_BL).sum()), float(weights_BL.sum())

    def _nats(self, index):
        return np.log(self._totals_X[index >> 8] + 256 * _SMOOTHING) - np.log(self._counts_N[index] + _SMOOTHING)


def fit_baseline(config: DataConfig) -> MarkovModel:
    """The model of the bytes of all training documents, each once, whatever the weights of the mixture."""
    splits = open_splits(config)["train"]
    return MarkovModel.fit(documents[at].text.encode("utf-8") for documents in splits for at in range(len(documents)))


def _joined_indices(documents):
    """Yields (context, byte) of every byte as one 24-bit number, int64 [T], many documents at a time."""
    parts, size = [], 0
    for document in documents:
        parts.append(document)
        size += len(document)
        if size >= _CHUNK_BYTES:
            yield _indices(parts)
            parts, size = [], 0
    if parts:
        yield _indices(parts)


def _indices(documents):
    joined_T = np.frombuffer(b"".join(b"\0\0" + document for document in documents), np.uint8)
    index_T = joined_T[2:].astype(np.int64)
    index_T += joined_T[1:-1].astype(np.int64) << 8
    index_T += joined_T[:-2].astype(np.int64) << 16
    ends = np.cumsum([len(document) + 2 for document in documents])[:-1]
    real_T = np.ones(index_T.size, bool)
    real_T[ends - 2] = real_T[ends - 1] = False  # the two zeros before each later document are context, not text
    return index_T[real_T]
