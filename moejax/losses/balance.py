"""Balance losses of the router, L = E sum_e f_e P_e: f_e the share of routed rows that expert e got, P_e its mean score.

Scores are softmax probabilities, or sigmoid scores divided by their sum over experts. f carries no gradient. With balanced
experts L = 1. Padding enters nothing, and a token of a prefix that documents share counts once for each of them: all is as if every
document were written out (in the same row, for the loss per row). Sources: Switch Transformer (2101.03961, eq. 4) with f divided by K as in Megatron-LM
(Hugging Face's load_balancing_loss_func does not divide, and is K times larger); DeepSeek-V3 (2412.19437, eqs. 17-20) for the
loss per sequence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from moejax_kernels.segments import Segments


class BalanceSum(NamedTuple):
    """Divide loss_sum by num, both summed over the whole global batch."""

    loss_sum: jax.Array
    """Sum over rows or documents."""
    num: jax.Array
    """Rows or documents with at least one token that is not padding, float."""


def switch_balance(scores_BLE, ids_BLK, segments: Segments) -> BalanceSum:
    """Balance loss of each row of the batch, documents in it taken together, summed over rows.

    Args:
      scores_BLE: router scores, sum 1 over experts; float32 or float64.
      ids_BLK: integers, the chosen experts; anything, -1 too, for padding.
      segments: tells padding.
    """
    times_BL = segments.multiplicity()
    num_tokens_B = times_BL.sum(1)
    counts_BE = jax.vmap(lambda ids_LK, times_L: _count(ids_LK, times_L, scores_BLE.shape[-1]))(ids_BLK, times_BL)
    score_sum_BE = _times(times_BL[..., None], scores_BLE).sum(1)
    loss_B = (_share(counts_BE, num_tokens_B, ids_BLK.shape[-1], scores_BLE.dtype) * score_sum_BE).sum(-1) / jnp.maximum(num_tokens_B, 1)
    return BalanceSum(loss_B.sum(), (num_tokens_B > 0).sum().astype(scores_BLE.dtype))


def sequence_balance(scores_BLE, ids_BLK, segments: Segments) -> BalanceSum:
    """Balance loss of each document, summed over documents. Arguments as in switch_balance.

    A document's counts are kept at its first token, so the memory is that of the scores whatever the number of documents; in a tree of
    prefixes there are as many as segments, and a document's are the sums over its own.
    """
    if segments.ancestor_BUU is not None:
        return _tree_balance(scores_BLE, ids_BLK, segments)
    ids_BL, starts_BL, ends_BL = jnp.asarray(segments.ids_BL), jnp.asarray(segments.starts_BL), jnp.asarray(segments.ends_BL)
    valid_BL = ids_BL >= 0
    num_experts = scores_BLE.shape[-1]

    def counts_of_own_document(ids_LK, valid_L, starts_L):
        zeros_LE = jnp.zeros((valid_L.size, num_experts), jnp.int32)
        return zeros_LE.at[starts_L[:, None], ids_LK].add(valid_L[:, None].astype(jnp.int32))[starts_L]

    counts_BLE = jax.vmap(counts_of_own_document)(ids_BLK, valid_BL, starts_BL)
    num_tokens_BL = ends_BL - starts_BL
    term_BL = (_share(counts_BLE, num_tokens_BL, ids_BLK.shape[-1], scores_BLE.dtype) * scores_BLE).sum(-1) / jnp.maximum(num_tokens_BL, 1)
    is_first_BL = valid_BL & (starts_BL == jnp.arange(ids_BL.shape[1]))
    return BalanceSum(jnp.where(valid_BL, term_BL, 0).sum(), is_first_BL.sum().astype(scores_BLE.dtype))


def global_balance(scores_BLE, segments: Segments, *, counts_E, num_tokens, num_chosen: int):
    """This part's share of the balance loss of the whole global batch: a sum over tokens, to be divided by num_tokens.

    Args:
      scores_BLE: router scores of this part (microbatch), sum 1 over experts.
      segments: tells padding.
      counts_E: routed rows per expert of the whole global batch, valid tokens alone.
      num_tokens: valid tokens of the whole global batch.
      num_chosen: experts per token (K).
    """
    term_BL = (_share(counts_E, num_tokens, num_chosen, scores_BLE.dtype) * scores_BLE).sum(-1)
    return _times(segments.multiplicity(), term_BL).sum()


def router_z_sum(logits_BLE, segments: Segments):
    """Sum over valid tokens of logsumexp(logits)**2, float32 (float64 if the logits are). Source: ST-MoE (2202.08906, eq. 5)."""
    logits_BLE = logits_BLE.astype(jnp.promote_types(logits_BLE.dtype, jnp.float32))
    return _times(segments.multiplicity(), jax.nn.logsumexp(logits_BLE, axis=-1) ** 2).sum()


def _tree_balance(scores_BLE, ids_BLK, segments: Segments) -> BalanceSum:
    """The loss of each way from a root to a leaf."""
    number_BL, ancestor_BUU = jnp.asarray(segments.index_BL), jnp.asarray(segments.ancestor_BUU)
    valid_BL, row_B1, dtype = jnp.asarray(segments.ids_BL) >= 0, jnp.arange(number_BL.shape[0])[:, None], scores_BLE.dtype
    zeros_BUE = jnp.zeros((*ancestor_BUU.shape[:2], scores_BLE.shape[-1]), dtype)
    own_BU = zeros_BUE[..., 0].at[row_B1, number_BL].add(valid_BL.astype(dtype))
    chosen_BUE = zeros_BUE.at[row_B1[..., None], number_BL[..., None], ids_BLK].add(valid_BL[..., None].astype(dtype))
    read_BUE = zeros_BUE.at[row_B1, number_BL].add(_times(valid_BL[..., None], scores_BLE))
    along = lambda sums_BUE: jnp.einsum("buv,bve->bue", ancestor_BUU.astype(dtype), sums_BUE, precision="highest")
    counts_BUE, scores_BUE, tokens_BU = along(chosen_BUE), along(read_BUE), along(own_BU[..., None])[..., 0]
    is_leaf_BU = (own_BU > 0) & (ancestor_BUU.sum(1) == 1)
    loss_BU = (_share(counts_BUE, tokens_BU, ids_BLK.shape[-1], scores_BLE.dtype) * scores_BUE).sum(-1) / jnp.maximum(tokens_BU, 1)
    return BalanceSum(jnp.where(is_leaf_BU, loss_BU, 0).sum(), is_leaf_BU.sum().astype(scores_BLE.dtype))


def _count(ids_LK, times_L, num_experts: int):
    return jnp.zeros(num_experts, jnp.int32).at[ids_LK].add(times_L[:, None].astype(jnp.int32))


def _times(times, values):
    """times * values, and 0 where there is none, whatever the value."""
    return jnp.where(times > 0, times.astype(values.dtype) * values, 0)


def _share(counts_E, num_tokens, num_chosen: int, dtype):
    """E times the share of each expert, without gradient; 0 where there is no token. Leading dims of both agree.

    Float from the start: E * counts and K * tokens of a large batch pass 2**31.
    """
    rows = jnp.maximum(jnp.asarray(num_tokens, dtype)[..., None] * num_chosen, 1)
    return jax.lax.stop_gradient(counts_E.astype(dtype) * counts_E.shape[-1] / rows)
