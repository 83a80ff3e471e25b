"""Balance losses of the router, L = E sum_e f_e P_e: f_e the share of routed rows that expert e got, P_e its mean score.

Scores are softmax probabilities, or sigmoid scores divided by their sum over experts. f carries no gradient. With balanced
experts L = 1. Padding enters nothing. Sources: Switch Transformer (2101.03961, eq. 4) with f divided by K as in Megatron-LM
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
    valid_BL = segments.ids_BL >= 0
    num_tokens_B = valid_BL.sum(1)
    counts_BE = jax.vmap(lambda ids_LK, valid_L: _count(ids_LK, valid_L, scores_BLE.shape[-1]))(ids_BLK, valid_BL)
    score_sum_BE = jnp.where(valid_BL[..., None], scores_BLE, 0).sum(1)
    loss_B = (_share(counts_BE, num_tokens_B, ids_BLK.shape[-1], scores_BLE.dtype) * score_sum_BE).sum(-1) / jnp.maximum(num_tokens_B, 1)
    return BalanceSum(loss_B.sum(), (num_tokens_B > 0).sum().astype(scores_BLE.dtype))


def sequence_balance(scores_BLE, ids_BLK, segments: Segments) -> BalanceSum:
    """Balance loss of each document (of a tree of prefixes: each segment), summed over documents. Arguments as in switch_balance.

    A document's counts are kept at its first token, so the memory is that of the scores whatever the number of documents.
    """
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
    return jnp.where(segments.ids_BL >= 0, term_BL, 0).sum()


def router_z_sum(logits_BLE, segments: Segments):
    """Sum over valid tokens of logsumexp(logits)**2, float32 (float64 if the logits are). Source: ST-MoE (2202.08906, eq. 5)."""
    logits_BLE = logits_BLE.astype(jnp.promote_types(logits_BLE.dtype, jnp.float32))
    return jnp.where(segments.ids_BL >= 0, jax.nn.logsumexp(logits_BLE, axis=-1) ** 2, 0).sum()


def _count(ids_LK, valid_L, num_experts: int):
    return jnp.zeros(num_experts, jnp.int32).at[ids_LK].add(valid_L[:, None].astype(jnp.int32))


def _share(counts_E, num_tokens, num_chosen: int, dtype):
    """E times the share of each expert, without gradient; 0 where there is no token. Leading dims of both agree.

    Float from the start: E * counts and K * tokens of a large batch pass 2**31.
    """
    rows = jnp.maximum(jnp.asarray(num_tokens, dtype)[..., None] * num_chosen, 1)
    return jax.lax.stop_gradient(counts_E.astype(dtype) * counts_E.shape[-1] / rows)
