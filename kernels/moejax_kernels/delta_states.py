"""Where a chunk's incoming state comes from and where its outgoing one goes.

Along a row of packed documents there is one state, and it goes from chunk to chunk: source and target are None. In a tree of shared
prefixes each segment has a slot of its own: a chunk reads the slot source_B of each row and writes the slot target_B.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax_kernels.segments import Segments

CHAIN = (None, None)
"""The route of packed documents."""


def read(states, source_B):
    """The state that enters: [B, H, C, M]."""
    return states if source_B is None else states[source_B, np.arange(source_B.size)]


def write(states, target_B, leaving_BHCM):
    """The states once a chunk has left its own behind."""
    return leaving_BHCM if target_B is None else states.at[target_B, np.arange(target_B.size)].set(leaving_BHCM)


def unwrite(dstates, target_B):
    """Gradient of what was written, and of the states before that."""
    if target_B is None:
        return dstates, None
    at = target_B, np.arange(target_B.size)
    return dstates[at], dstates.at[at].set(0)


def unread(dstates, source_B, dentering_BHCM):
    """Gradient of the states before a chunk read its own."""
    return dentering_BHCM if source_B is None else dstates.at[source_B, np.arange(source_B.size)].add(dentering_BHCM)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A row of segments with parents, laid out anew so that each segment starts at a chunk and fills whole ones.

    Two more slots than segments: one of zeros, where a document starts, and the initial state's.
    """

    place_BL: Any
    """Position of each token in the new row."""
    route: tuple[Any, Any]
    """Source and target slot of each chunk, int32 [N, B] each."""
    final_B: Any
    """Slot that holds the state after the row's last token."""
    num_segments: int
    num_chunks: int

    @classmethod
    def build(cls, segments: Segments, chunk: int) -> "Tree":
        index_BL, ids_BL = jnp.asarray(segments.index_BL), jnp.asarray(segments.ids_BL)
        (B, L), num_segments = index_BL.shape, jnp.asarray(segments.ancestor_BUU).shape[1]
        row_B1, start_BU, chunks_BU = np.arange(B)[:, None], jnp.asarray(segments.first_BU), -(-segments.sizes() // chunk)
        chunk_end_BU = jnp.cumsum(chunks_BU, 1, dtype=jnp.int32)
        chunk_start_BU = chunk_end_BU - chunks_BU
        place_BL = (chunk * chunk_start_BU - start_BU)[row_B1, index_BL] + jnp.arange(L, dtype=jnp.int32)

        previous_BU = jnp.asarray(segments.previous_BL)[row_B1, jnp.minimum(start_BU, L - 1)]
        zeros, initial = num_segments, num_segments + 1
        parent_BU = jnp.where(previous_BU < 0, zeros, index_BL[row_B1, jnp.maximum(previous_BU, 0)])
        parent_BU = parent_BU.at[:, 0].set(initial)  # the initial state belongs to the row's first token
        num_chunks = (L + (chunk - 1) * num_segments) // chunk
        chunk_BN1 = jnp.broadcast_to(jnp.arange(num_chunks)[:, None], (B, num_chunks, 1))
        own_BN = jnp.minimum((chunk_BN1 >= chunk_end_BU[:, None]).sum(-1), num_segments - 1)  # a chunk of nobody changes nothing
        source_BN = jnp.where(chunk_BN1[..., 0] == chunk_start_BU[row_B1, own_BN], parent_BU[row_B1, own_BN], own_BN)
        last_B = jnp.where(ids_BL >= 0, index_BL, -1).max(1)
        return cls(place_BL, (source_BN.T, own_BN.T), jnp.where(last_B < 0, initial, last_B), num_segments, num_chunks)

    def lay_out(self, x_BLa, num_places: int, fill=0):
        """Tokens at their places, `fill` at places of none."""
        B = x_BLa.shape[0]
        places = jnp.full((B, num_places, *x_BLa.shape[2:]), fill, x_BLa.dtype)
        return places.at[np.arange(B)[:, None], self.place_BL].set(x_BLa, unique_indices=True)

    def collect(self, x_BPa):
        """Tokens from their places."""
        return x_BPa[np.arange(x_BPa.shape[0])[:, None], self.place_BL]

    def slots(self, state_BHCM):
        """The states before the first chunk."""
        return jnp.zeros((self.num_segments + 2, *state_BHCM.shape), state_BHCM.dtype).at[-1].set(state_BHCM)

    def final(self, states_UBHCM):
        """The state after the row's last token."""
        return read(states_UBHCM, self.final_B)
