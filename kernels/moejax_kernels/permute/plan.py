"""Where each token's rows lie."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowPlan:
    """A routing as gathers in both directions; each side follows from the other, and is kept so that no pass has to scatter."""

    source_R: jax.Array
    """int32: token whose copy fills routed row r; -1: the row is empty."""
    slot_TK: jax.Array
    """int32: routed row where token t's k-th choice lies; -1: nowhere (dropped, or the token is padding). No row occurs twice."""
