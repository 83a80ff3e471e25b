"""Parameters and FLOPs by part, by formula from the config alone. FLOPs are 2 per multiply-add.

A matrix costs 2 FLOPs per weight and token forward and twice that backward. Mixing along the sequence depends on the row's length;
document borders are not taken into account. Sources: costs of chunked delta rules and of sparse attention as in the papers of the mixers.
"""

import dataclasses

from moejax.config.model import ModelConfig

CHUNK = 64
"""Tokens per chunk in the count of the chunked delta rule."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One kind of sublayer, summed over its layers."""

    name: str
    layers: int
    """How many layers have it."""
    params: int
    """Weights."""
    active: int
    """Weights that one token uses."""
    flops: float
    """Forward FLOPs per token."""


def _mla(config: ModelConfig) -> tuple[int, int]:
    """Vectors and matrices of one latent attention."""
    mla, width = config.mla, config.width
    heads, channels = mla.num_heads, mla.nope_dim + mla.rope_dim
    q = width * mla.q_lora_rank + mla.q_lora_rank * heads * channels if mla.q_lora_rank else width * heads * channels
    matrices = q + width * (mla.kv_lora_rank + mla.rope_dim) + mla.kv_lora_rank * heads * (mla.nope_dim + mla.value_dim)
    matrices += heads * mla.value_dim * width * (2 if mla.output_gate else 1)
    return mla.q_lora_rank + mla.kv_lora_rank, matrices


def _gqa(config: ModelConfig) -> tuple[int, int]:
    gqa, width = config.gqa, config.width
    q, kv = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
    vectors = (2 * gqa.head_dim if gqa.qk_norm else 0) + (gqa.num_heads if gqa.sinks else 0)
    return vectors, width * (q * (2 if gqa.output_gate else 1) + 2 * kv) + q * width


def attention_flops(config: ModelConfig, base: str, keys: float) -> float:
    """Logits and weighted values over `keys` keys."""
    if base == "mla":
        heads, channels, values = config.mla.num_heads, config.mla.nope_dim + config.mla.rope_dim, config.mla.value_dim
    else:
        heads, channels, values = config.gqa.num_heads, config.gqa.head_dim, config.gqa.head_dim
    return 2 * heads * (channels + values) * keys


def _mixer(config: ModelConfig, kind: str, length: int) -> tuple[int, int, float]:
    """Vectors, matrices, and FLOPs along the sequence of one mixer."""
    if kind in ("gqa", "mla"):
        vectors, matrices = _mla(config) if kind == "mla" else _gqa(config)
        window = config.gqa.window if kind == "gqa" else 0
        return vectors, matrices, attention_flops(config, kind, mean_keys(window or length, length))
    if kind in ("dsa", "dsa_shared"):
        index = config.indexer
        vectors, matrices = _mla(config) if index.base == "mla" else _gqa(config)
        flops = attention_flops(config, index.base, mean_keys(index.topk, length))
        if kind == "dsa":
            latent = config.mla.q_lora_rank if index.base == "mla" else config.width
            matrices += latent * index.num_heads * index.head_dim + config.width * (index.head_dim + index.num_heads)
            vectors += 2 * index.head_dim
            if index.pool > 1:
                matrices, vectors = matrices + config.width * index.head_dim, vectors + index.pool * index.head_dim
            flops += 2 * index.num_heads * index.head_dim * mean_keys(length, length) / index.pool
        return vectors, matrices, flops
    return _delta(config, kind)


def mean_keys(limit: int, length: int) -> float:
    """Keys per query of causal attention to at most `limit` keys: the mean of min(t, limit) over t = 1 .. length."""
    full = min(limit, length)
    return (full * (full + 1) / 2 + (length - full) * limit) / length


def _delta(config: ModelConfig, kind: str) -> tuple[int, int, float]:
    width = config.width
    if kind == "kda":
        kda = config.kda
        heads, groups, key, value = kda.num_heads, kda.num_key_heads or kda.num_heads, kda.key_dim, kda.value_dim
        gate = width * heads * value if kda.full_rank_gate else width * value + value * heads * value
        conv = 4 * (2 * groups * key + heads * value)
        matrices = (
            width * (2 * groups * key + heads * value) + width * key + key * heads * key + width * heads + gate + heads * value * width
        )
        vectors = conv + heads + heads * key + value
    else:
        gdn = config.gdn
        heads, groups, key, value = gdn.num_heads, gdn.num_key_heads, gdn.key_dim, gdn.value_dim
        conv = 4 * (2 * groups * key + heads * value)
        matrices = width * (2 * groups * key + 2 * heads * value) + width * 2 * heads + heads * value * width
        vectors = conv + 2 * heads + value
    return vectors, matrices, delta_rule_flops(heads, key, value) + 2 * conv


def delta_rule_flops(heads: int, key: int, value: int) -> float:
    """Per token: rows of A and Aqk, T times K and V, reads and update of the state (formulas of the chunked form)."""
    return 2 * heads * (2 * CHUNK * key + CHUNK * (key + value) + CHUNK * value + 3 * key * value)


def _moe(config: ModelConfig) -> tuple[int, int, int]:
    """All weights, weights that one token uses, and vectors of one sparse layer."""
    moe, width = config.moe, config.width
    latent = moe.latent_width or width
    expert = 3 * latent * moe.hidden
    around = width * moe.num_experts + 3 * width * moe.shared_hidden + (width if moe.shared_gate and moe.shared_hidden else 0)
    vectors = moe.num_experts * (moe.router.correction_bias + moe.router.logit_bias)
    if moe.latent_width:
        around, vectors = around + 2 * width * latent, vectors + (latent if moe.latent_norm else 0)
    return moe.num_experts * expert + around, moe.experts_per_token * expert + around, vectors


def _residual(config: ModelConfig) -> tuple[int, float]:
    """Weights and FLOPs of one sublayer's residual; an AttnRes mix is counted over all blocks."""
    kind, width = config.residual.kind, config.width
    if kind == "mhc":
        streams = config.residual.num_streams
        outputs = (2 + streams) * streams
        return outputs * streams * width + outputs + 3, 2 * outputs * streams * width + 2 * width * streams * (2 + streams)
    if kind == "block_attnres":
        entries = -(-config.num_layers // config.residual.block_size) + 1
        return 2 * width, 4 * width * entries
    return 0, 0.0


def count(config: ModelConfig, length: int) -> list[Part]:
    """Parts of the model, in order.

    Args:
      length: tokens of one row, taken as one document.
    """
    kinds, width, vocab = config.layers(), config.width, config.vocab_size
    parts = [Part(name="embedding", layers=1, params=vocab * width, active=0, flops=0.0)]
    for kind in dict.fromkeys(layer.mixer for layer in kinds):
        num = sum(layer.mixer == kind for layer in kinds)
        vectors, matrices, flops = _mixer(config, kind, length)
        parts.append(
            Part(
                name=kind,
                layers=num,
                params=num * (vectors + matrices),
                active=num * (vectors + matrices),
                flops=num * (2 * matrices + flops),
            )
        )
    for kind in dict.fromkeys(layer.feed_forward for layer in kinds):
        num = sum(layer.feed_forward == kind for layer in kinds)
        dense = 3 * width * config.dense_hidden
        every, used, vectors = _moe(config) if kind == "moe" else (dense, dense, 0)
        parts.append(Part(name=kind, layers=num, params=num * (every + vectors), active=num * (used + vectors), flops=2.0 * num * used))
    weights, flops = _residual(config)
    mixes = 2 * len(kinds) + (config.residual.kind == "block_attnres")
    norms = (2 * len(kinds) + 1) * width
    parts.append(
        Part(
            name="norms and residuals",
            layers=len(kinds),
            params=norms + mixes * weights,
            active=norms + mixes * weights,
            flops=mixes * flops,
        )
    )
    tied = config.tie_embeddings
    parts.append(
        Part(name="output projection", layers=1, params=0 if tied else vocab * width, active=vocab * width, flops=2.0 * vocab * width)
    )
    return parts


def train_flops_per_token(config: ModelConfig, length: int, *, remat: bool = False) -> float:
    """Forward plus backward (twice forward); recomputation is not counted, as MFU wants it, unless `remat` asks for the work done."""
    forward = sum(part.flops for part in count(config, length))
    return forward * (4 if remat else 3)
