"""Who sees whom, for queries at some row positions: `Segments.visible`, with a window, and for keys that differ per query."""

import jax.numpy as jnp


def visible(segments, query_Q, key_K, *, window=None):
    """Bool [B, Q, K] ([1, Q, K] without segments): may the token at query_Q see the one at key_K?

    window=w: itself and the w-1 tokens before it in its document.
    """
    seen_BQK = (key_K[None, :] <= query_Q[:, None])[None] if segments is None else segments.visible(query_Q, key_K)
    if window is None:
        return seen_BQK
    if segments is None or segments.ancestor_BUU is None:  # inside a document, row positions differ as document positions do
        return seen_BQK & (query_Q[:, None] - key_K[None, :] < window)
    positions_BL = tree_positions(segments)
    distance_BQK = jnp.take(positions_BL, query_Q, axis=1)[:, :, None] - jnp.take(positions_BL, key_K, axis=1)[:, None, :]
    return seen_BQK & (distance_BQK < window)


def visible_at(segments, query_Q, key_BQK):
    """Bool [B, Q, K]: may the token at query_Q see the one at key_BQK? Negative keys are nobody. Key's Q may be 1: the same for all."""
    seen_BQK = (key_BQK >= 0) & (key_BQK <= query_Q[None, :, None])
    if segments is None:
        return seen_BQK
    key_BQK = jnp.clip(key_BQK, 0, segments.ids_BL.shape[1] - 1)
    row_B11 = jnp.arange(key_BQK.shape[0])[:, None, None]

    def own_and_other(array_BL):
        array_BL = jnp.asarray(array_BL)
        return jnp.take(array_BL, query_Q, axis=1)[:, :, None], array_BL[row_B11, key_BQK]

    own_BQ1, other_BQK = own_and_other(segments.ids_BL)
    seen_BQK &= (own_BQ1 >= 0) & (other_BQK >= 0)
    if segments.ancestor_BUU is None:
        return seen_BQK & (own_BQ1 == other_BQK)
    return seen_BQK & jnp.asarray(segments.ancestor_BUU)[row_B11, *own_and_other(segments.index_BL)]


def chosen(ids_BQK, num_keys: int):
    """Bool [B, Q, num_keys]: is the key among the query's ids? -1 is nothing."""
    num_rows, num_queries, _ = ids_BQK.shape
    row_B11, query_1Q1 = jnp.arange(num_rows)[:, None, None], jnp.arange(num_queries)[None, :, None]
    at_BQK = jnp.where(ids_BQK < 0, num_keys, ids_BQK)
    return jnp.zeros((num_rows, num_queries, num_keys), bool).at[row_B11, query_1Q1, at_BQK].set(True, mode="drop")


def tree_positions(segments):
    """Position of each token in its document, int32 [B, L], for segments with parents, inside a program."""
    index_BL, ancestor_BUU = jnp.asarray(segments.index_BL), jnp.asarray(segments.ancestor_BUU)
    number_U = jnp.arange(ancestor_BUU.shape[1])
    above_BUU = ancestor_BUU & (number_U[:, None] != number_U)
    base_BU = jnp.sum(jnp.where(above_BUU, segments.sizes()[:, None, :], 0), axis=2, dtype=jnp.int32)
    return jnp.arange(index_BL.shape[1], dtype=jnp.int32) - jnp.asarray(segments.starts_BL) + jnp.take_along_axis(base_BU, index_BL, axis=1)
