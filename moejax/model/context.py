"""What every layer of one forward pass shares."""

import dataclasses
from typing import Any, Literal

from moejax_kernels.segments import Segments

from moejax.memory.policy import Saved


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switches:
    """What a forward pass computes besides activations; static."""

    saved: Saved | None = None
    """What each layer keeps for its backward pass; None: all that autodiff asks for."""
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
