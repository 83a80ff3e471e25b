"""What one step of training or evaluation reads."""

import dataclasses

import jax
import numpy as np
from moejax_kernels.segments import Array, Segments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """B packed rows of L tokens; numpy on the host, jax.Array inside a program. Every leaf's first dim is B."""

    tokens_BL: Array
    """int32; 0 on padding."""
    targets_BL: Array
    """int32: the token after this one in its document, if it is in this row or opens the next window; else 0."""
    weights_BL: Array
    """float32: 1 where there is a target, else 0."""
    positions_BL: Array
    """int32: place in the document (a piece of a cut document starts anew, a window goes on); 0 on padding."""
    segments: Segments
    """Borders of the packed documents."""

    @classmethod
    def build(cls, tokens_BL, segment_ids_BL, parent=None, *, start_B=None, next_B=None) -> "Batch":
        """Reads targets, weights, positions and borders off the ids, with numpy.

        Args:
          tokens_BL: integers [B, L].
          segment_ids_BL: integers [B, L], as `Segments.build` takes them: >= 0, not decreasing along a row, -1 for padding.
          parent: None, or one dict per row: segment id -> id of the earlier segment that it continues.
          start_B: windows alone: place in its document of each row's first token.
          next_B: windows alone: the token that comes after each row's last one in its document; -1: none does.

        Raises:
          ValueError: shapes differ, tokens are no integers, or the ids are not what `Segments.build` takes.
        """
        tokens_BL, ids_BL = np.asarray(tokens_BL), np.asarray(segment_ids_BL)
        if tokens_BL.shape != ids_BL.shape or not np.issubdtype(tokens_BL.dtype, np.integer):
            raise ValueError(
                f"a batch needs integer tokens [B, L] and ids of the same shape, got tokens {tokens_BL.dtype} "
                f"{tokens_BL.shape} and ids {ids_BL.shape}."
            )
        segments = Segments.build(ids_BL, parent)
        ids_BL = segments.ids_BL
        tokens_BL = np.where(ids_BL >= 0, tokens_BL, 0).astype(np.int32)
        followed_BL = np.zeros(ids_BL.shape, bool)
        followed_BL[:, :-1] = (ids_BL[:, :-1] == ids_BL[:, 1:]) & (ids_BL[:, :-1] >= 0)
        after_BL = np.roll(tokens_BL, -1, axis=1)
        if next_B is not None:
            after_BL[:, -1], followed_BL[:, -1] = next_B, (np.asarray(next_B) >= 0) & (ids_BL[:, -1] >= 0)
        targets_BL = np.where(followed_BL, after_BL, 0).astype(np.int32)
        positions_BL = segments.positions()
        if start_B is not None:
            positions_BL = positions_BL + np.where(segments.starts_BL == 0, np.asarray(start_B)[:, None], 0)
        positions_BL = np.where(ids_BL >= 0, positions_BL, 0).astype(np.int32)
        return cls(tokens_BL, targets_BL, followed_BL.astype(np.float32), positions_BL, segments)
