"""Softmax attention mixers: GQA and MLA. Formulas: DeepSeek-V2 (arXiv 2405.04434) for MLA, Qwen3-Next for the output gate."""

import jax
import jax.numpy as jnp
from flax import nnx
from moejax_kernels import attention

from moejax.config.model import ModelConfig
from moejax.memory.names import named
from moejax.model import past
from moejax.model.context import Context
from moejax.model.norms import RMSNorm
from moejax.model.rope import attention_scale, rotate
from moejax.model.weights import Maker
from moejax.parallel.islands import per_rows
from moejax.parallel.projection import float_inside, project


def attend(q_BLHC, k_BSGC, v_BSGM, context: Context, *, scale: float, window: int | None = None, sinks_H=None):
    """Causal softmax attention inside documents; keys may begin before the queries, with those of a past."""
    sinks = () if sinks_H is None else (sinks_H,)
    run = lambda q, k, v, segments, *sinks: attention(
        q, k, v, scale=scale, segments=segments, window=window, sinks_H=sinks[0] if sinks else None
    )
    return per_rows(run, q_BLHC, k_BSGC, v_BSGM, context.key_segments, whole=sinks)


class GroupedQueryAttention(nnx.Module):
    """Grouped-query attention with optional q/k norm, output gate, partial rotation, window and sinks."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = gqa = config.gqa
        make, width, channels = Maker(config, rngs), config.width, gqa.head_dim
        gated = 2 * channels if gqa.output_gate else channels
        self.q_DHX = make.linear(("embed", "heads", None), width, gqa.num_heads, gated, fan_in=width)
        self.k_DGC = make.linear(("embed", "heads", None), width, gqa.num_kv_heads, channels, fan_in=width)
        self.v_DGC = make.linear(("embed", "heads", None), width, gqa.num_kv_heads, channels, fan_in=width)
        self.out_HCD = make.linear(("heads", None, "embed"), gqa.num_heads, channels, width, fan_in=gqa.num_heads * channels)
        if gqa.qk_norm:
            self.q_norm = RMSNorm(config, channels, rngs=rngs)
            self.k_norm = RMSNorm(config, channels, rngs=rngs)
        if gqa.sinks:
            self.sinks_H = make.constant(0.0, ("heads",), gqa.num_heads)

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return attention_scale(self.config.rope, self.config.head_dim)

    def inputs(self, x_BLD, context: Context):
        """q, k and v (a past's among them), the latent that an indexer reads (here x itself), the output gate or None, what is left."""
        gqa = self.config
        q_BLHX = named(project("bld,dhx->blhx", x_BLD, self.q_DHX[...]), "query")
        k_BLGC, v_BLGC = named([project("bld,dgc->blgc", x_BLD, weight[...]) for weight in (self.k_DGC, self.v_DGC)], "key_value")
        q_BLHC, gate_BLHC = jnp.split(q_BLHX, 2, -1) if gqa.output_gate else (q_BLHX, None)
        if gqa.qk_norm:
            q_BLHC, k_BLGC = self.q_norm(q_BLHC), self.k_norm(k_BLGC)
        turn = lambda heads: rotate(heads, context.positions_BL, gqa.rope, dim=gqa.rotary_dim or gqa.head_dim)
        keys, kept = past.extend(context, k_BSGC=turn(k_BLGC), v_BSGC=v_BLGC)
        return turn(q_BLHC), keys["k_BSGC"], keys["v_BSGC"], x_BLD, gate_BLHC, kept

    def output(self, o_BLHC, gate_BLHC):
        """Gates and projects what attention read."""
        return project("blhc,hcd->bld", gated(o_BLHC, gate_BLHC), self.out_HCD[...])

    def dense(self, q_BLHC, k_BSGC, v_BSGC, context: Context):
        """Attention over all visible keys."""
        gqa = self.config
        sinks_H = self.sinks_H[...] if gqa.sinks else None
        return attend(q_BLHC, k_BSGC, v_BSGC, context, scale=self.scale, window=gqa.window or None, sinks_H=sinks_H)

    def __call__(self, x_BLD, context: Context, ids_BLK):
        q_BLHC, k_BSGC, v_BSGC, _, gate_BLHC, kept = self.inputs(x_BLD, context)
        return self.output(self.dense(q_BLHC, k_BSGC, v_BSGC, context), gate_BLHC), ids_BLK, past.report(kept)


class LatentAttention(nnx.Module):
    """Multi-head latent attention, with or without rotation and output gate."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = mla = config.mla
        make, width, heads = Maker(config, rngs), config.width, mla.num_heads
        channels = mla.nope_dim + mla.rope_dim
        norm = lambda rank: RMSNorm(config, rank, rngs=rngs, eps=mla.latent_norm_eps)
        if mla.q_lora_rank:
            self.q_down_DR = make.linear(("embed", None), width, mla.q_lora_rank, fan_in=width)
            self.q_norm = norm(mla.q_lora_rank)
            self.q_up_RHC = make.linear((None, "heads", None), mla.q_lora_rank, heads, channels, fan_in=mla.q_lora_rank)
        else:
            self.q_DHC = make.linear(("embed", "heads", None), width, heads, channels, fan_in=width)
        self.kv_down_DR = make.linear(("embed", None), width, mla.kv_lora_rank + mla.rope_dim, fan_in=width)
        self.kv_norm = norm(mla.kv_lora_rank)
        self.kv_up_RHX = make.linear((None, "heads", None), mla.kv_lora_rank, heads, mla.nope_dim + mla.value_dim, fan_in=mla.kv_lora_rank)
        self.out_HMD = make.linear(("heads", None, "embed"), heads, mla.value_dim, width, fan_in=heads * mla.value_dim)
        if mla.output_gate:
            self.gate_DHM = make.linear(("embed", "heads", None), width, heads, mla.value_dim, fan_in=width)

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return attention_scale(self.config.rope, self.config.nope_dim + self.config.rope_dim)

    def inputs(self, x_BLD, context: Context):
        """q, k and v (of a past's latents too), the query latent (or x), the output gate or None, what is left."""
        mla = self.config
        latent = x_BLD
        if mla.q_lora_rank:
            latent = self.q_norm(named(project("bld,dr->blr", x_BLD, self.q_down_DR[...]), "latent"))
            q_BLHC = project("blr,rhc->blhc", latent, self.q_up_RHC[...])
        else:
            q_BLHC = project("bld,dhc->blhc", x_BLD, self.q_DHC[...])
        q_BLHC = named(q_BLHC, "query")
        turn = lambda heads: rotate(heads, context.positions_BL, mla.rope, dim=mla.rope_dim)
        down_BLR = named(project("bld,dr->blr", x_BLD, self.kv_down_DR[...]), "latent")
        normed_BLR, rotary_BL1C = self.kv_norm(down_BLR[..., : mla.kv_lora_rank]), turn(down_BLR[:, :, None, mla.kv_lora_rank :])
        latents, kept = past.extend(context, latent_BSR=normed_BLR, rotary_BS1C=rotary_BL1C)
        kv_BSHX = named(project("blr,rhx->blhx", latents["latent_BSR"], self.kv_up_RHX[...]), "key_value")
        q_BLHC = jnp.concatenate([q_BLHC[..., : mla.nope_dim], turn(q_BLHC[..., mla.nope_dim :])], -1)
        shared_BSHC = jnp.broadcast_to(latents["rotary_BS1C"], (*kv_BSHX.shape[:3], mla.rope_dim))
        k_BSHC = jnp.concatenate([kv_BSHX[..., : mla.nope_dim], shared_BSHC], -1)
        gate = named(project("bld,dhm->blhm", x_BLD, self.gate_DHM[...]), "output_gate") if mla.output_gate else None
        return q_BLHC, k_BSHC, kv_BSHX[..., mla.nope_dim :], latent, gate, kept

    def output(self, o_BLHM, gate_BLHM):
        """Gates and projects what attention read."""
        return project("blhm,hmd->bld", gated(o_BLHM, gate_BLHM), self.out_HMD[...])

    def dense(self, q_BLHC, k_BSHC, v_BSHM, context: Context):
        """Attention over all visible keys."""
        return attend(q_BLHC, k_BSHC, v_BSHM, context, scale=self.scale)

    def __call__(self, x_BLD, context: Context, ids_BLK):
        q_BLHC, k_BSHC, v_BSHM, _, gate_BLHM, kept = self.inputs(x_BLD, context)
        return self.output(self.dense(q_BLHC, k_BSHC, v_BSHM, context), gate_BLHM), ids_BLK, past.report(kept)


def gated(o, gate):
    """o * sigmoid(gate), the product in float32; o itself if there is no gate."""
    if gate is None:
        return o
    return (float_inside(o) * jax.nn.sigmoid(float_inside(gate))).astype(o.dtype)
