"""What every layer of one forward pass shares."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
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
    rebuild: bool = False
    """Every layer builds its documents' borders and positions anew (to measure what building them once saves)."""
    past_keys: int | None = None
    """Keys and values, beside states, that the rows leave for a later batch (moejax.model.past); None: nothing is left."""


@jax.tree_util.register_dataclass
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


def rebuilt(context: Context, state: dict) -> tuple[Context, dict]:
    """The context with borders and positions made anew from the ids, and the layer's residual state.

    The barrier ties the ids to the state, which changes from layer to layer: else XLA would do this once, before the first.
    """
    ids_BL, state = jax.lax.optimization_barrier((context.segments.ids_BL, state))
    segments = dataclasses.replace(context.segments, ids_BL=ids_BL).rebuilt()
    at_L = jnp.arange(ids_BL.shape[1], dtype=jnp.int32)
    positions_BL = jnp.where(ids_BL >= 0, at_L - segments.starts_BL, 0)
    return dataclasses.replace(context, segments=segments, positions_BL=positions_BL), state
