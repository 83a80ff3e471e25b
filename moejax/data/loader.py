"""Batches for one process, cut from a stream that is the same for all."""

import itertools
import sys
from typing import Any

from grain.experimental import ThreadPrefetchDatasetIterator

from moejax.config.data import DataConfig
from moejax.config.errors import ConfigError
from moejax.data.batch import Batch
from moejax.data.mixture import SplitName, epoch_length, open_splits, require_targets, token_stream
from moejax.data.packing import Packer, StateMismatchError, fill, fill_trees
from moejax.data.prefixes import Sharing
from moejax.data.tokenizers import load_tokenizer
from moejax.data.windows import Lanes

STREAM_FIELDS = ("seq_len", "batch_size", "pack_rows", "shuffle_seed", "shuffle_block", "heldout_percent")
"""Of the config: what changes the stream by its value alone."""
_PREFETCHED_BATCHES = 2
"""Batches that the background thread keeps ready."""


class Loader:
    """Iterator of batches; packs the global stream in a background thread and keeps this process's rows.

    Every process reads all documents, which costs little beside a training step, so the position in the stream is the same
    everywhere and a run continues the very same global batches with any number of processes. Training never ends. Held-out data
    is gone through once, in the same order each time; its last batch is filled up with rows of padding.
    """

    def __init__(self, config: DataConfig, *, split: SplitName, process_index: int = 0, process_count: int = 1):
        """Opens the sources; reading starts with the first batch.

        Args:
          config: what to read.
          split: "train" or "heldout".
          process_index: this process; it gets rows [index, index + 1) * batch_size / process_count of each global batch.
          process_count: processes that share each batch.

        Raises:
          ConfigError: process_count does not divide batch_size, a source matches nothing, or a split of it is empty.
          DataError: a file is not what the config says, or a split of a source has no document of two tokens.
        """
        if config.batch_size % process_count:
            raise ConfigError(f"data.batch_size={config.batch_size} must be a multiple of the {process_count} processes.")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index={process_index} must lie between 0 and process_count - 1 = {process_count - 1}.")
        windows = config.windows and split == "train"
        self.tokenizer = load_tokenizer(config.tokenizer)
        both = open_splits(config)
        require_targets(config, both, self.tokenizer)
        splits = both[split]
        self.identity = {
            "split": split,
            "sources": [documents.digest() for documents in splits],
            "weights": [source.weight for source in config.sources],
            "prompts": prompts if any(prompts := [source.prompt_field for source in config.sources]) else None,
            "tokenizer": self.tokenizer.identity,
            "prefixes": [config.min_shared, config.row_segments] if config.share_prefixes else None,
            **{key: getattr(config, key) for key in STREAM_FIELDS},
            **({"windows": True} if windows else {}),
        }
        """What makes the stream this one: equal on all processes, or they read different data. Part of the state."""
        self.skipped = tuple(name for documents in splits for name in documents.source.skipped)
        """Names of files left out because they cannot be read as UTF-8 text."""
        stream = token_stream(config, splits, split, self.tokenizer)
        sizes = {"seq_len": config.seq_len, "pack_rows": config.pack_rows, "epoch": epoch_length(config, splits)}
        sharing = Sharing(min_shared=config.min_shared, row_segments=config.row_segments) if config.share_prefixes else None
        num_rows = config.batch_size // process_count
        rows = slice(process_index * num_rows, (process_index + 1) * num_rows)
        if windows:
            batches = _Windows(Lanes(stream, num_lanes=config.batch_size, **sizes), config, rows)
        else:
            batches = _Batches(Packer(stream, num_reading=config.batch_size, sharing=sharing, **sizes), config, rows)
        self._batches = _Prefetch(batches, _PREFETCHED_BATCHES)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        """This process's rows of the next global batch, as host arrays. Errors of the background thread are raised here."""
        return next(self._batches)

    def state(self) -> dict:
        """Position after the batch last handed out, whatever is prefetched; fit for json, the same on all processes."""
        return {"identity": self.identity, "position": self._batches.get_state()}

    def restore(self, state: dict) -> None:
        """Continues at a `state()`, saved by any process of any number.

        Raises:
          StateMismatchError: the state belongs to another stream, or a document has become shorter since.
        """
        saved = state["identity"]
        now = dict.fromkeys(saved) | self.identity
        different = [f"{key}: saved {saved.get(key)!r}, now {value!r}" for key, value in now.items() if saved.get(key) != value]
        if different:
            raise StateMismatchError(
                f"the data's position belongs to another stream; {'; '.join(different)}. Set back what differs, or start anew."
            )
        self._batches.set_state(state["position"])

    def close(self) -> None:
        """Ends the background thread. No batch can be read after it."""
        self._batches.close()


class _Prefetch(ThreadPrefetchDatasetIterator):
    """Grain's background thread; a state belongs to the batch handed out with it."""

    def __del__(self, finalizing=sys.is_finalizing):  # grain's own closes once more while the interpreter takes its modules apart
        if not finalizing():
            super().__del__()


class _Batches:
    """Iterator of this process's rows, as grain's prefetching thread takes it."""

    def __init__(self, packer: Any, config: DataConfig, rows: slice):  # a Packer, or Lanes
        self._packer, self._config, self._rows = packer, config, rows

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> Batch:
        rows = list(itertools.islice(self._packer, self._config.batch_size))
        if not rows:
            raise StopIteration
        rows += [[]] * (self._config.batch_size - len(rows))
        rows, config = rows[self._rows], self._config
        if not config.share_prefixes:
            return Batch.build(*fill(rows, config.seq_len))
        return Batch.build(*fill_trees(rows, config.seq_len, config.min_shared), num_segments=config.row_segments)

    def get_state(self) -> dict:
        return self._packer.state()

    def set_state(self, state: dict) -> None:
        self._packer.restore(state)


class _Windows(_Batches):
    """The same for lanes, whose documents go on from batch to batch."""

    def __next__(self) -> Batch:
        rows = next(self._packer)[self._rows]
        tokens_BL, ids_BL = fill([row.pieces for row in rows], self._config.seq_len)
        return Batch.build(tokens_BL, ids_BL, start_B=[row.start for row in rows], next_B=[row.following for row in rows])
