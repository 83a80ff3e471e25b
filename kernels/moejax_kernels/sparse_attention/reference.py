"""Definition of sparse attention: attention under a mask that holds the chosen keys."""

import jax.numpy as jnp

from moejax_kernels.attention.reference import attend
from moejax_kernels.visibility import chosen, visible


def sparse_attention(q_BLHC, k_BLGC, v_BLGM, ids_BLK, *, scale, value_dim=None, segments=None):
    length = q_BLHC.shape[1]
    at_L = jnp.arange(length)
    v_BLGM = k_BLGC[..., :value_dim] if v_BLGM is None else v_BLGM
    return attend(q_BLHC, k_BLGC, v_BLGM, visible(segments, at_L, at_L) & chosen(ids_BLK, length), scale=scale)
