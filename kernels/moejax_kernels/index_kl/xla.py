"""The index's loss over blocks of queries: gathers the chosen keys, or masks all of them where most are chosen anyway."""

import jax
import jax.numpy as jnp

from moejax_kernels.attention.reference import attention_probs
from moejax_kernels.index_kl.reference import divergence
from moejax_kernels.index_topk.reference import index_scores
from moejax_kernels.query_blocks import num_queries, over_queries
from moejax_kernels.sparse_attention import xla as sparse
from moejax_kernels.visibility import chosen, visible, visible_at


def index_kl(q_BLHC, k_BLGC, index_q_BLJC, index_k_BLC, index_w_BLJ, ids_BLK, *, scale, segments=None):
    num_rows, length, num_heads, _ = q_BLHC.shape
    q_BLHC, k_BLGC = jax.lax.stop_gradient((q_BLHC, k_BLGC))
    keys = k_BLGC, index_k_BLC
    if ids_BLK is None:

        def block(query_Q, *queries):
            allowed_BQL = visible(segments, query_Q, jnp.arange(length, dtype=jnp.int32))
            return _over_all(keys, *queries, allowed_BQL=allowed_BQL, scale=scale)

        return over_queries(block, q_BLHC, index_q_BLJC, index_w_BLJ, block=num_queries(length, num_rows * num_heads * length))
    gathers = sparse.gathers(ids_BLK)

    def block_of_chosen(query_Q, q_BQHC, index_q_BQJC, index_w_BQJ, ids_BQK):
        queries = q_BQHC, index_q_BQJC, index_w_BQJ
        if gathers:
            return _over_each(sparse.take(keys, ids_BQK), *queries, allowed_BQK=visible_at(segments, query_Q, ids_BQK), scale=scale)
        allowed_BQL = visible(segments, query_Q, jnp.arange(length, dtype=jnp.int32)) & chosen(ids_BQK, length)
        return _over_all(keys, *queries, allowed_BQL=allowed_BQL, scale=scale)

    numbers = ids_BLK.shape[2] * k_BLGC.shape[2] * k_BLGC.shape[3] if gathers else num_heads * length
    return over_queries(block_of_chosen, q_BLHC, index_q_BLJC, index_w_BLJ, ids_BLK, block=num_queries(length, num_rows * numbers))


def _over_all(keys, q_BQHC, index_q_BQJC, index_w_BQJ, *, allowed_BQL, scale):
    k_BLGC, index_k_BLC = keys
    probs_BGQNL = attention_probs(q_BQHC, k_BLGC, allowed_BQL, scale=scale)
    return divergence(probs_BGQNL.mean((1, 3)), index_scores(index_q_BQJC, index_k_BLC, index_w_BQJ), allowed_BQL)


def _over_each(keys, q_BQHC, index_q_BQJC, index_w_BQJ, *, allowed_BQK, scale):
    k_BQKGC, index_k_BQKC = keys
    inside = jnp.promote_types(index_q_BQJC.dtype, jnp.float32)
    probs_BQGNK = sparse.probs_of_each(q_BQHC, k_BQKGC, allowed_BQK, scale)
    dots_BQJK = jnp.einsum("BQJC,BQKC->BQJK", index_q_BQJC.astype(inside), index_k_BQKC.astype(inside))
    scores_BQK = jnp.einsum("BQJ,BQJK->BQK", index_w_BQJ.astype(inside), jax.nn.relu(dots_BQJK))
    return divergence(probs_BQGNK.mean((2, 3)), scores_BQK, allowed_BQK)
