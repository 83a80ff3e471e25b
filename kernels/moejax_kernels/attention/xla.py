"""Attention over blocks of queries."""

import jax
import jax.numpy as jnp

from moejax_kernels.attention.blocks import over_queries
from moejax_kernels.attention.reference import attend
from moejax_kernels.attention.visibility import visible


def attention(q_BLHC, k_BLGC, v_BLGM, *, scale, segments=None, window=None, sinks_H=None):
    length = q_BLHC.shape[1]
    is_tree = segments is not None and segments.ancestor_BUU is not None

    def block(query_Q, q_BQHC):
        # Q queries see Q + window - 1 neighbouring keys at most, but in a tree the parent may lie far to the left
        num_keys = length if window is None or is_tree else min(length, query_Q.size + window - 1)
        start = jnp.clip(query_Q[-1] + 1 - num_keys, 0, length - num_keys)
        key_K = start + jnp.arange(num_keys, dtype=jnp.int32)
        k_BKGC, v_BKGM = (jax.lax.dynamic_slice_in_dim(array, start, num_keys, axis=1) for array in (k_BLGC, v_BLGM))
        allowed_BQK = visible(segments, query_Q, key_K, window=window)
        return attend(q_BQHC, k_BKGC, v_BKGM, allowed_BQK, scale=scale, sinks_H=sinks_H)

    return over_queries(block, q_BLHC)
