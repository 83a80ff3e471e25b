"""What every layer of one forward pass shares."""

import dataclasses
from typing import Any, Literal

from moejax_kernels.segments import Segments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switches:
    """What a forward pass computes besides activations; static."""

    remat: bool = False
    """Recompute each layer's inside in the backward pass."""
    index: Literal["none", "dense", "sparse"] = "none"
    """Indexer loss; `dense` also makes sparse attention dense."""
    balance: Literal["none", "switch", "sequence", "global"] = "none"
    """Balance loss whose sums are wanted."""
    router_z: bool = False
    """Sum of squared logsumexp of the router logits."""
    histogram: bool = False
    """Margins for Quantile Balancing."""
    training: bool = False
    """What acts in training alone acts: the router's soft constraint and its topology bias."""
    debug: bool = False
    """Whether each sublayer's output is finite."""
    past_keys: int | None = None
    """Keys and values, beside states, that the rows leave for a later batch (moejax.model.past); None: nothing is left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Before:
    """How the rows of a batch hang together with a past."""

    goes_on_B: Any
    """bool: the row's first token comes next in the past's document."""
    held_B: Any
    """int32: tokens before the row that the past knows of; 0 in a row that begins anew."""
    segments: Segments
    """Of the past's keys and the rows' tokens: positions [B, N + L]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Built once per forward pass, constant through the scan over layers."""

    segments: Segments
    positions_BL: Any
    switches: Switches
    control: Any = None
    """What a layer is told besides its batch, a dict (whole forward pass: a tree of them by section and place, or None for nothing):
    `global_load_E`, routed rows per expert over the whole global batch, where this batch is a part of it; `capacity_factor` and `tables`
    for `expert_parallel`; `topology_factor`, a factor on the router's topology bias."""
    before: Before | None = None
    """None: rows begin anew."""
    past: Any = None
    """Arrays that this layer starts from, a dict (whole forward pass: a tree of them by section and place); None where rows begin anew."""

    @property
    def key_segments(self) -> Segments:
        """Borders of the keys that the rows' queries may see, the past's among them."""
        return self.segments if self.before is None else self.before.segments
