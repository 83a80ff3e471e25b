"""Where tokens come from."""

import dataclasses
from typing import Literal

from moejax.config.errors import refuse_unused, require, require_ranges


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One source of documents."""

    kind: Literal["stdlib", "text", "jsonl", "parquet"] = "stdlib"
    """`stdlib`: the Python standard library's source on this machine; `text`: one document a file; else one a record."""
    path: str = ""
    """File or glob pattern (`**` allowed) of text, jsonl and parquet; empty for stdlib."""
    field: str = "text"
    """Field of a jsonl record, or column of a parquet file, that holds the text."""
    prompt_field: str = ""
    """Field or column of what stands before the text and is read but not learned: of an answer, its prompt; empty: none."""
    weight: float = 1.0
    """Share of this source in the mixture, relative to the others; > 0."""

    def __post_init__(self):
        require(
            (self.kind == "stdlib") == (not self.path),
            f"data.sources: kind={self.kind!r} with path={self.path!r}; stdlib takes no path, the others need one.",
        )
        require_ranges("data.sources", self, weight="> 0")
        refuse_unused(
            "data.sources",
            self,
            "field",
            "prompt_field",
            unless=self.kind in ("jsonl", "parquet"),
            why=f"kind={self.kind!r} has no records with fields",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Documents, tokens, rows and batches."""

    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    """The mixture."""
    tokenizer: str = "bytes"
    """`bytes` (256 tokens), or the path of a tokenizer.json."""
    seq_len: int = 512
    """Tokens of one row (L)."""
    batch_size: int = 16
    """Rows of one optimizer step, over all processes and microbatches (B)."""
    shuffle_seed: int = 0
    """Seed of the documents' order, anew in each epoch."""
    shuffle_block: int = 1
    """Documents of a source that stay together when they are shuffled, e.g. the answers to one prompt; the held-out ones are chosen so too."""
    pack_rows: int = 8
    """Rows that first-fit packing keeps open at a time."""
    heldout_percent: int = 5
    """Share of documents kept for evaluation, chosen by a hash of their name; 1 to 50."""
    share_prefixes: bool = False
    """Documents of a row that begin alike become a tree: what they share is computed once. Loss and gradients stay (docs/prefixes.md)."""
    min_shared: int = 64
    """Shared prefixes: tokens that documents must have in common, counted anew at each branching."""
    row_segments: int = 32
    """Shared prefixes: branches, stems and whole documents of a row, its padding counted as one; some work of every layer grows with it."""
    windows: bool = False
    """Train a document longer than seq_len in windows, in one row of consecutive batches, which start from what the window before left
    (train.carry_keys); otherwise its pieces know nothing of each other. Held-out documents are cut into pieces either way."""

    def __post_init__(self):
        require(bool(self.sources), "data.sources is empty; give at least one source.")
        require_ranges("data", self, seq_len=">= 2", batch_size=">= 1", pack_rows=">= 1", shuffle_block=">= 1")
        require_ranges("data", self, min_shared=">= 2", row_segments=">= 3")
        refuse_unused("data", self, "min_shared", "row_segments", unless=self.share_prefixes, why="data.share_prefixes is off")
        require(
            not self.share_prefixes or self.min_shared < self.seq_len,
            f"data.min_shared={self.min_shared} must be less than data.seq_len={self.seq_len}: documents that share so many tokens do not "
            "fit a row together, and nothing would be shared.",
        )
        require(1 <= self.heldout_percent <= 50, f"data.heldout_percent={self.heldout_percent} must lie between 1 and 50.")
