"""The index's loss over blocks of queries."""

import jax.numpy as jnp

from moejax_kernels.attention.blocks import num_queries, over_queries
from moejax_kernels.attention.visibility import chosen, visible
from moejax_kernels.index_kl.reference import divergence


def index_kl(q_BLHC, k_BLGC, index_q_BLJC, index_k_BLC, index_w_BLJ, ids_BLK, *, scale, segments=None):
    num_rows, length, num_heads, _ = q_BLHC.shape

    def block(query_Q, q_BQHC, index_q_BQJC, index_w_BQJ, ids_BQK):
        allowed_BQL = visible(segments, query_Q, jnp.arange(length, dtype=jnp.int32))
        if ids_BLK is not None:
            allowed_BQL = allowed_BQL & chosen(ids_BQK, length)
        return divergence(q_BQHC, k_BLGC, index_q_BQJC, index_k_BLC, index_w_BQJ, allowed_BQL, scale=scale)

    nothing_BL0 = jnp.zeros((*q_BLHC.shape[:2], 0), jnp.int32)
    return over_queries(
        block,
        q_BLHC,
        index_q_BLJC,
        index_w_BLJ,
        nothing_BL0 if ids_BLK is None else ids_BLK,
        block=num_queries(length, num_rows * num_heads * length),
    )
