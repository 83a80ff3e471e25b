"""What one step of training or evaluation reads."""

import dataclasses

import jax
import numpy as np
from moejax_kernels.segments import Array, Segments

NOTHING = int(np.iinfo(np.int32).min)
"""In place of a token: there is none. Other negative numbers are complements of tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """B packed rows of L tokens; numpy on the host, jax.Array inside a program. Every leaf's first dim is B."""

    tokens_BL: Array
    """int32; 0 on padding."""
    targets_BL: Array
    """int32: the token after this one in its document, if it is in this row or opens the next window; else 0."""
    weights_BL: Array
    """float32: 1 where there is a target that is to be learned, else 0; of a prefix that documents share: their number."""
    positions_BL: Array
    """int32: place in the document (a piece of a cut document starts anew, a window goes on); 0 on padding."""
    segments: Segments
    """Borders of the packed documents."""

    @classmethod
    def build(cls, tokens_BL, segment_ids_BL, parent=None, *, num_segments: int | None = None, start_B=None, next_B=None) -> "Batch":
        """Reads targets, weights, positions and borders off the ids, with numpy.

        Args:
          tokens_BL: integers [B, L]; a token that is read but not learned (of a prompt) stands as its complement, ~token.
          segment_ids_BL: integers [B, L], as `Segments.build` takes them: >= 0, not decreasing along a row, -1 for padding.
          parent: None, or one dict per row: segment id -> id of the earlier segment that it continues. A token has one target, so all
            segments that continue one must begin with the same token: the last one that their documents share.
          num_segments: see `Segments.build`.
          start_B: windows alone: place in its document of each row's first token.
          next_B: windows alone: the token that comes after each row's last one in its document (not learned: its complement); NOTHING: none does.

        Raises:
          ValueError: shapes differ, tokens are no integers, the ids are not what `Segments.build` takes, or segments that continue the
            same one begin with different tokens.
        """
        tokens_BL, ids_BL = np.asarray(tokens_BL), np.asarray(segment_ids_BL)
        if tokens_BL.shape != ids_BL.shape or not np.issubdtype(tokens_BL.dtype, np.integer):
            raise ValueError(
                f"a batch needs integer tokens [B, L] and ids of the same shape, got tokens {tokens_BL.dtype} "
                f"{tokens_BL.shape} and ids {ids_BL.shape}."
            )
        segments = Segments.build(ids_BL, parent, num_segments=num_segments)
        ids_BL = segments.ids_BL
        tokens_BL = np.where(ids_BL >= 0, tokens_BL, 0).astype(np.int32)
        targets_BL, followed_BL = _followers(tokens_BL, segments)
        if next_B is not None:
            next_B = np.asarray(next_B)
            goes_on_B = (next_B != NOTHING) & (ids_BL[:, -1] >= 0)
            targets_BL[:, -1], followed_BL[:, -1] = np.where(goes_on_B, next_B, 0), goes_on_B
        weights_BL = np.where(followed_BL & (targets_BL >= 0), segments.multiplicity(), 0).astype(np.float32)
        tokens_BL, targets_BL = (np.where(each_BL < 0, ~each_BL, each_BL) for each_BL in (tokens_BL, targets_BL))
        positions_BL = segments.positions()
        if start_B is not None:
            positions_BL = positions_BL + np.where(segments.starts_BL == 0, np.asarray(start_B)[:, None], 0)
        positions_BL = np.where(ids_BL >= 0, positions_BL, 0).astype(np.int32)
        return cls(tokens_BL, targets_BL, weights_BL, positions_BL, segments)


def _followers(tokens_BL, segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """The token that comes next in each token's document, and whether there is one."""
    row_N, at_N = np.nonzero(segments.previous_BL >= 0)
    before_N, tokens_N = segments.previous_BL[row_N, at_N], tokens_BL[row_N, at_N]
    targets_BL, followed_BL = np.zeros_like(tokens_BL), np.zeros(tokens_BL.shape, bool)
    targets_BL[row_N, before_N], followed_BL[row_N, before_N] = tokens_N, True
    wrong_N = np.flatnonzero(targets_BL[row_N, before_N] != tokens_N)
    if wrong_N.size:
        row, at, before = row_N[wrong_N[0]], at_N[wrong_N[0]], before_N[wrong_N[0]]
        raise ValueError(
            f"row {row}: segments that continue segment {segments.ids_BL[row, before]} begin with tokens {tokens_BL[row, at]} and "
            f"{targets_BL[row, before]}, and its last token can have one target. End it one token earlier and begin each with that token."
        )
    return targets_BL, followed_BL
