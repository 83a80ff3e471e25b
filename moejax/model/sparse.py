"""DeepSeek Sparse Attention: an indexer chooses keys, MLA or GQA attends to them. Source: DeepSeek-V3.2 paper, section 2.1; GLM-5.3 for pooling."""

import jax
import jax.numpy as jnp
from flax import nnx
from moejax_kernels import index_kl, index_topk, sparse_attention
from moejax_kernels.implementation import UnsupportedError

from moejax.config.model import ModelConfig
from moejax.memory.names import named
from moejax.model import past
from moejax.model.attention import GroupedQueryAttention, LatentAttention
from moejax.model.context import Context
from moejax.model.norms import layer_norm
from moejax.model.rope import rotate
from moejax.model.weights import Maker
from moejax.parallel.islands import per_rows
from moejax.parallel.projection import float_inside, project


class Indexer(nnx.Module):
    """Scores keys per query; its inputs are detached, so the language-model loss never reaches it, nor its loss the model."""

    def __init__(self, config: ModelConfig, *, latent_width: int, rngs: nnx.Rngs):
        self.config = index = config.indexer
        make, width = Maker(config, rngs), config.width
        self.q_RJC = make.linear((None, "heads", None), latent_width, index.num_heads, index.head_dim, fan_in=latent_width)
        self.k_DC = make.linear(("embed", None), width, index.head_dim, fan_in=width)
        self.k_norm_scale_C = make.constant(1.0, (None,), index.head_dim)
        self.k_norm_bias_C = make.constant(0.0, (None,), index.head_dim)
        self.weight_DJ = make.linear(("embed", None), width, index.num_heads, fan_in=width)
        if index.pool > 1:
            self.pool_gate_DC = make.constant(0.0, ("embed", None), width, index.head_dim)
            self.pool_bias_PC = make.constant(0.0, (None, None), index.pool, index.head_dim)

    def inputs(self, x_BLD, latent_BLR, context: Context):
        """Index queries, keys and head weights; weights carry both scales, (J C)^-1/2, since relu commutes with a positive factor."""
        index = self.config
        x_BLD, latent_BLR = jax.lax.stop_gradient((x_BLD, latent_BLR))
        turn = lambda heads: rotate(heads, context.positions_BL, index.rope, dim=index.rotary_dim)
        q_BLJC = project("blr,rjc->bljc", latent_BLR, self.q_RJC[...])
        k_BLC = project("bld,dc->blc", x_BLD, self.k_DC[...])
        w_BLJ = project("bld,dj->blj", float_inside(x_BLD), self.weight_DJ[...])
        if context.switches.index != "none":  # else nothing goes backward through them
            q_BLJC, k_BLC, w_BLJ = named((q_BLJC, k_BLC, w_BLJ), "index_inputs")
        k_BLC = layer_norm(k_BLC, self.k_norm_scale_C[...], self.k_norm_bias_C[...], eps=1e-6)
        return turn(q_BLJC), turn(k_BLC[:, :, None])[:, :, 0], w_BLJ * (index.num_heads * index.head_dim) ** -0.5

    def choose(self, q_BLJC, k_BLC, w_BLJ, x_BLD, context: Context):
        """Positions of the chosen keys, int32 [B, L, K], -1 where there are fewer; behind a past all arrays but x are as long as keys."""
        index = self.config
        if index.pool == 1:
            run = lambda q, k, w, segments: index_topk(q, k, w, topk=index.topk, segments=segments)
            return per_rows(run, q_BLJC, k_BLC, w_BLJ, context.key_segments)
        if context.switches.past_keys is not None:
            raise UnsupportedError("indexer.pool > 1 does not count pools across a past; use pool=1, or no windows and no shared prefixes.")
        if context.segments.ancestor_BUU is not None:
            raise UnsupportedError("indexer.pool > 1 does not pool across the branches of a segment tree; use pool=1 or plain documents.")
        gate_BLC = project("bld,dc->blc", jax.lax.stop_gradient(x_BLD), self.pool_gate_DC[...])
        run = lambda *arrays: pooled_topk(*arrays, topk=index.topk, pool=index.pool)
        return per_rows(run, q_BLJC, k_BLC, w_BLJ, gate_BLC, context.segments, whole=(self.pool_bias_PC[...],))


def pooled_topk(q_BLJC, k_BLC, w_BLJ, gate_BLC, segments, bias_PC, *, topk: int, pool: int):
    """Chooses topk / pool complete pools per query, and appends the tokens of the pool that is not complete yet.

    A pool is `pool` consecutive tokens of a document, counted from its start; its key is the mean of its tokens' keys, weighted per
    channel by a softmax over the pool. It becomes visible with its last token.

    Returns:
      int32 [B, L, topk + pool - 1], positions in the row, -1 where there is none.
    """
    length = k_BLC.shape[1]
    at_L = jnp.arange(length, dtype=jnp.int32)
    place_BL = (at_L - segments.starts_BL) % pool
    complete_BL = (place_BL == pool - 1) & (segments.ids_BL >= 0)
    num_pools = max(length // pool, 1)
    ends_BS = jnp.sort(jnp.where(complete_BL, at_L, length), axis=1)[:, :num_pools]
    member_P = jnp.arange(pool, dtype=jnp.int32) - (pool - 1)
    tokens_BSP = jnp.clip(ends_BS[:, :, None] + member_P, 0, length - 1)
    take = jax.vmap(lambda array_LC, at_SP: array_LC[at_SP])
    logits_BSPC = float_inside(take(gate_BLC, tokens_BSP)) + float_inside(bias_PC)
    keys_BSPC = take(k_BLC, tokens_BSP)
    pooled_BSC = jnp.sum(jax.nn.softmax(logits_BSPC, 2).astype(keys_BSPC.dtype) * keys_BSPC, 2)
    key_end_BS = jnp.where(ends_BS < length, ends_BS, -1)
    pools_BLK = index_topk(q_BLJC, pooled_BSC, w_BLJ, topk=topk // pool, segments=segments, key_end_BS=key_end_BS)
    chosen_BLK = jax.vmap(lambda end_S, at_LK: end_S[at_LK])(ends_BS, jnp.maximum(pools_BLK, 0))
    expanded_BLKP = jnp.where(pools_BLK[..., None] >= 0, chosen_BLK[..., None] + member_P, -1)
    tail_T = jnp.arange(pool - 1, dtype=jnp.int32)
    num_tail_BL1 = ((place_BL + 1) % pool)[..., None]
    tail_BLT = jnp.where((tail_T < num_tail_BL1) & (segments.ids_BL >= 0)[..., None], at_L[:, None] - num_tail_BL1 + 1 + tail_T, -1)
    return jnp.concatenate([expanded_BLKP.reshape(*pools_BLK.shape[:2], -1), tail_BLT], -1).astype(jnp.int32)


class SparseAttention(nnx.Module):
    """Attention over chosen keys; `shared` layers use the choice of the last layer that has an indexer."""

    def __init__(self, config: ModelConfig, *, shared: bool, rngs: nnx.Rngs):
        self.shared = shared
        latent = config.indexer.base == "mla"
        self.base = (LatentAttention if latent else GroupedQueryAttention)(config, rngs=rngs)
        if not shared:
            self.indexer = Indexer(config, latent_width=config.mla.q_lora_rank if latent else config.width, rngs=rngs)

    def __call__(self, x_BLD, context: Context, ids_BLK):
        q, k, v, latent, gate, kept = self.base.inputs(x_BLD, context)
        whole = lambda array: _behind(k.shape[1] - q.shape[1], array)  # these ops take as many queries as keys
        own = lambda array: array[:, k.shape[1] - q.shape[1] :]
        stage, aux = context.switches.index, {}
        scale = self.base.scale
        index = None
        if not self.shared:
            index_q, index_k, index_w = self.indexer.inputs(x_BLD, latent, context)
            index_keys, index_kept = past.extend(context, index_k_BSC=index_k)
            index, kept = (whole(index_q), index_keys["index_k_BSC"], whole(index_w)), kept | index_kept
        if stage != "dense":
            ids_BLK = named(ids_BLK if index is None else own(self.indexer.choose(*index, x_BLD, context)), "index_ids")
        if index is not None and stage != "none":
            run = lambda q, k, iq, ik, iw, segments, *ids: index_kl(
                q, k, iq, ik, iw, ids[0] if ids else None, scale=scale, segments=segments
            )
            chosen = () if stage == "dense" else (whole(ids_BLK),)
            kl_BS = per_rows(run, *jax.lax.stop_gradient((whole(q), k)), *index, context.key_segments, *chosen)
            aux["index_kl"] = jnp.sum(own(kl_BS) * context.segments.multiplicity())
        if stage == "dense":
            o = self.base.dense(q, k, v, context)
        else:
            run = lambda q, k, v, ids, segments: sparse_attention(q, k, v, ids, scale=scale, segments=segments)
            o = own(per_rows(run, whole(q), k, v, whole(ids_BLK), context.key_segments))
        return self.base.output(o, gate), ids_BLK, aux | past.report(kept)


def _behind(num_keys: int, array_BLX):
    """The queries' numbers behind those of as many positions that ask for nothing: 0, or no key."""
    if num_keys == 0:
        return array_BLX
    filler = -1 if jnp.issubdtype(array_BLX.dtype, jnp.integer) else 0
    return jnp.pad(array_BLX, ((0, 0), (num_keys, 0), *((0, 0),) * (array_BLX.ndim - 2)), constant_values=filler)
