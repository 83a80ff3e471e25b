"""Whose mean the next-token loss is: of all targets, or of all documents. Weights and their totals."""

import jax
import jax.numpy as jnp

from moejax.losses.cross_entropy import IGNORED


def counted(targets, weights):
    """Weights, 0 where the target is IGNORED."""
    return jnp.where(targets == IGNORED, 0, weights)


def sequence_weights(weights_BL, starts_BL):
    """Each document's weights divided by their sum, so that all documents with a target weigh 1.

    Args:
      weights_BL: counted weights, >= 0.
      starts_BL: first position of each token's document.
    """

    def of_row(weights_L, starts_L):
        sums_L = jax.ops.segment_sum(weights_L, starts_L, num_segments=weights_L.shape[0])[starts_L]
        return weights_L / jnp.where(sums_L > 0, sums_L, 1)

    return jax.vmap(of_row)(weights_BL, starts_BL)


def num_sequences(weights, starts):
    """Documents with a target, an integer; arrays [..., L] as above.

    Sums and maxima along the row, and no scatter: rows may lie on many devices.
    """
    has_target = (weights > 0).astype(jnp.int32)
    sofar = jnp.cumsum(has_target, -1)
    is_first_token = starts == jnp.arange(starts.shape[-1])
    before = jax.lax.cummax(jnp.where(is_first_token, sofar - has_target, 0), axis=starts.ndim - 1)  # of the document's first token
    return jnp.sum(has_target * (sofar - before == 1))
