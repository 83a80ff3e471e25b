"""From a hub's config.json to our switches, for the families that are read."""

from collections.abc import Callable
from typing import Any

from moejax.config.mixers import GDNConfig, GQAConfig, IndexerConfig, KDAConfig, MLAConfig, RopeConfig
from moejax.config.model import ActivationConfig, Dtype, ModelConfig, PrecisionConfig, ResidualConfig
from moejax.config.moe import MoEConfig, RouterConfig


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the file, the field or the keys."""


class Fields:
    """config.json, with errors that name the missing field."""

    def __init__(self, raw: dict[str, Any], source: str):
        self.raw, self.source = raw, source

    def __call__(self, *names: str, default: Any = CheckpointError) -> Any:
        """The first of `names` that is there and not null, else the default."""
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        if default is CheckpointError:
            raise CheckpointError(f"{self.source}: field {' or '.join(names)} is missing.")
        return default

    def inside(self, *names: str) -> "Fields":
        """The fields of nested objects, empty where there are none; of a field in several the last object's counts."""
        return Fields(
            {key: value for name in names for key, value in self(name, default={}).items()}, f"{self.source}: {' or '.join(names)}"
        )

    def expect(self, name: str, *legal: Any) -> None:
        """Refuses a field whose value is none of `legal`; the first is assumed where it is absent."""
        value = self.raw.get(name, legal[0])
        if value not in legal:
            raise CheckpointError(f"{self.source}: {name}={value!r} is not supported; {', '.join(map(repr, legal))} would be.")


def rope_config(fields: Fields, kind: Any) -> RopeConfig:
    """Rotation from rope_parameters (transformers 5) or rope_theta and rope_scaling (hub files)."""
    scaling = fields.inside("rope_scaling", "rope_parameters")
    theta = float(scaling("rope_theta", default=fields("rope_theta", default=10_000.0)))
    form = scaling("rope_type", "type", default="default")
    if form == "default" or (form == "yarn" and float(scaling("factor")) == 1):
        return RopeConfig(kind=kind, theta=theta)
    if form != "yarn":
        raise CheckpointError(f"{fields.source}: rope_type={form!r} is not supported; 'default' and 'yarn' are.")
    return RopeConfig(
        kind=kind,
        theta=theta,
        yarn_factor=float(scaling("factor")),
        yarn_original_length=int(scaling("original_max_position_embeddings", default=0) or fields("max_position_embeddings")),
        yarn_beta_fast=float(scaling("beta_fast", default=32)),
        yarn_beta_slow=float(scaling("beta_slow", default=1)),
        yarn_mscale=float(scaling("mscale", default=1)),
        yarn_mscale_all_dim=float(scaling("mscale_all_dim", default=0)),
    )


def rotary_share(fields: Fields) -> float:
    """partial_rotary_factor, wherever it stands."""
    return float(fields.inside("rope_parameters")("partial_rotary_factor", default=fields("partial_rotary_factor", default=1.0)))


def _base(fields: Fields, dtype: Dtype, **switches: Any) -> ModelConfig:
    fields.expect("attention_bias", False)
    master: Dtype = "float64" if dtype == "float64" else "float32"
    return ModelConfig(
        vocab_size=fields("vocab_size"),
        width=fields("hidden_size"),
        num_layers=fields("num_hidden_layers"),
        norm_eps=fields("rms_norm_eps"),
        tie_embeddings=fields("tie_word_embeddings", default=False),
        precision=PrecisionConfig(params=master, compute=dtype),
        **switches,
    )


def _feed_forwards(fields: Fields) -> dict[str, Any]:
    """Which layers are sparse, from mlp_layer_types, first_k_dense_replace, or Qwen's two fields."""
    count = fields("num_hidden_layers")
    kinds = fields("mlp_layer_types", default=None)
    if kinds is None:
        step, dense = fields("decoder_sparse_step", "moe_layer_freq", default=1), set(fields("mlp_only_layers", default=[]))
        first = fields("first_k_dense_replace", default=0)
        qwen = "decoder_sparse_step" in fields.raw
        sparse = [(i + 1) % step == 0 if qwen else i % step == 0 for i in range(count)]
        kinds = ["sparse" if sparse[i] and i >= first and i not in dense else "dense" for i in range(count)]
    feed_forwards = tuple("moe" if kind == "sparse" else "dense" for kind in kinds)
    return {"feed_forwards": feed_forwards} | ({"dense_hidden": fields("intermediate_size")} if "dense" in feed_forwards else {})


def _sigmoid_router(fields: Fields) -> RouterConfig:
    fields.expect("scoring_func", "sigmoid")
    fields.expect("moe_router_activation_func", "sigmoid")
    return RouterConfig(
        score="sigmoid",
        correction_bias=True,
        num_groups=fields("n_group", "num_expert_group", default=1),
        groups_kept=fields("topk_group", default=1),
        renormalise=fields("norm_topk_prob", "moe_renormalize", default=True),
        scale=fields("routed_scaling_factor", default=1.0),
    )


def _moe(fields: Fields, router: RouterConfig, **more: Any) -> MoEConfig:
    hidden = fields("moe_intermediate_size", "intermediate_size")
    more.setdefault("shared_hidden", hidden * fields("n_shared_experts", "num_shared_experts", default=0))
    return MoEConfig(
        num_experts=fields("n_routed_experts", "num_local_experts", "num_experts"),
        experts_per_token=fields("num_experts_per_tok", "num_experts_per_token"),
        hidden=hidden,
        router=router,
        **more,
    )


def _mla(fields: Fields, rope: RopeConfig, *, eps: float = 1e-6, output_gate: bool = False) -> MLAConfig:
    return MLAConfig(
        num_heads=fields("num_attention_heads"),
        q_lora_rank=fields("q_lora_rank", default=0),
        kv_lora_rank=fields("kv_lora_rank"),
        nope_dim=fields("qk_nope_head_dim"),
        rope_dim=fields("qk_rope_head_dim"),
        value_dim=fields("v_head_dim"),
        latent_norm_eps=eps,
        output_gate=output_gate,
        rope=rope,
    )


def _gqa(fields: Fields, **more: Any) -> GQAConfig:
    heads = fields("num_attention_heads")
    channels = fields("head_dim", default=fields("hidden_size") // heads)
    window = fields("sliding_window", default=0) if fields("use_sliding_window", default=True) else 0
    return GQAConfig(
        num_heads=heads,
        num_kv_heads=fields("num_key_value_heads", default=heads),
        head_dim=channels,
        window=window,
        rope=rope_config(fields, "half"),
        **more,
    )


def mixtral(fields: Fields, dtype: Dtype) -> ModelConfig:
    """Mixtral: softmax router, always renormalised."""
    fields.expect("hidden_act", "silu")
    return _base(fields, dtype, gqa=_gqa(fields), feed_forwards=("moe",), moe=_moe(fields, RouterConfig(), shared_hidden=0))


def qwen3_moe(fields: Fields, dtype: Dtype) -> ModelConfig:
    """Qwen3-MoE: q/k norm, softmax router."""
    fields.expect("hidden_act", "silu")
    router = RouterConfig(renormalise=fields("norm_topk_prob", default=False))
    return _base(fields, dtype, gqa=_gqa(fields, qk_norm=True), moe=_moe(fields, router, shared_hidden=0), **_feed_forwards(fields))


def qwen3_next(fields: Fields, dtype: Dtype) -> ModelConfig:
    """Qwen3-Next: Gated DeltaNet and gated attention with partial rotation; zero-centred norms."""
    fields.expect("hidden_act", "silu")
    fields.expect("linear_conv_kernel_dim", 4)
    count, interval = fields("num_hidden_layers"), fields("full_attention_interval", default=4)
    kinds = fields("layer_types", default=["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)])
    gqa = _gqa(fields, qk_norm=True, output_gate=True, rotary_dim=int(fields("head_dim") * rotary_share(fields)))
    gdn = GDNConfig(
        num_key_heads=fields("linear_num_key_heads"),
        num_heads=fields("linear_num_value_heads"),
        key_dim=fields("linear_key_head_dim"),
        value_dim=fields("linear_value_head_dim"),
    )
    moe = _moe(
        fields,
        RouterConfig(renormalise=fields("norm_topk_prob", default=True)),
        shared_hidden=fields("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return _base(
        fields,
        dtype,
        mixers=_mixers(kinds, {"linear_attention": "gdn", "full_attention": "gqa"}, fields),
        gqa=gqa,
        gdn=gdn,
        moe=moe,
        zero_centred_norm=True,
        **_feed_forwards(fields),
    )


def deepseek_v3(fields: Fields, dtype: Dtype) -> ModelConfig:
    """DeepSeek-V3: MLA with interleaved rotation, group-limited sigmoid router."""
    fields.expect("hidden_act", "silu")
    rope = rope_config(fields, "interleaved" if fields("rope_interleave", default=True) else "half")
    return _base(
        fields, dtype, mixers=("mla",), mla=_mla(fields, rope), moe=_moe(fields, _sigmoid_router(fields)), **_feed_forwards(fields)
    )


def deepseek_v32(fields: Fields, dtype: Dtype) -> ModelConfig:
    """DeepSeek-V3.2: V3 with the indexer, whose rotation is half-split."""
    fields.expect("hidden_act", "silu")
    indexer = IndexerConfig(
        num_heads=fields("index_n_heads"),
        head_dim=fields("index_head_dim"),
        topk=fields("index_topk"),
        rotary_dim=fields("qk_rope_head_dim"),
        rope=rope_config(fields, "half"),
    )
    return _base(
        fields,
        dtype,
        mixers=("dsa",),
        mla=_mla(fields, rope_config(fields, "interleaved")),
        indexer=indexer,
        moe=_moe(fields, _sigmoid_router(fields)),
        **_feed_forwards(fields),
    )


def kimi_linear(fields: Fields, dtype: Dtype) -> ModelConfig:
    """Kimi Linear: KDA with the softplus gate, MLA without rotation. Its latent norms have epsilon 1e-6 whatever the config says."""
    fields.expect("hidden_act", "silu")
    fields.expect("mla_use_nope", True)
    kinds, kda = _kimi_layers(fields, decay="softplus")
    return _base(
        fields,
        dtype,
        mixers=kinds,
        kda=kda,
        mla=_mla(fields, RopeConfig(kind="none")),
        moe=_moe(fields, _sigmoid_router(fields)),
        **_feed_forwards(fields),
    )


def kimi_k3(fields: Fields, dtype: Dtype) -> ModelConfig:
    """Kimi K3: bounded KDA, gated MLA without rotation, latent experts, SiTU-GLU, Block AttnRes."""
    fields = _text(fields)
    fields.expect("hidden_act", "situ")
    fields.expect("mla_use_nope", True)
    linear = fields.inside("linear_attn_config")
    kinds, kda = _kimi_layers(fields, decay="bounded", lower_bound=linear("gate_lower_bound"), full_rank_gate=linear("use_full_rank_gate"))
    moe = _moe(
        fields,
        _sigmoid_router(fields),
        latent_width=fields("routed_expert_hidden_size"),
        latent_norm=fields("latent_moe_use_norm", default=True),
    )
    activation = ActivationConfig(
        kind="situ", beta=fields("activation_situ_beta"), linear_beta=fields("activation_situ_linear_beta", default=0.0)
    )
    mla = _mla(fields, RopeConfig(kind="none"), eps=fields("rms_norm_eps"), output_gate=fields("mla_use_output_gate"))
    return _base(
        fields,
        dtype,
        mixers=kinds,
        kda=kda,
        mla=mla,
        moe=moe,
        activation=activation,
        residual=ResidualConfig(kind="block_attnres", block_size=fields("attn_res_block_size")),
        **_feed_forwards(fields),
    )


def glm5_next(fields: Fields, dtype: Dtype) -> ModelConfig:
    """GLM-5.3-Flash text: bounded KDA, DSA with pooled keys and no rotation, hyper-connections, clamped SwiGLU."""
    fields = _text(fields)
    fields.expect("hidden_act", "silu")
    fields.expect("linear_conv_kernel_dim", 4)
    fields.expect("index_kpool_always_select_tail", True)
    kda = KDAConfig(
        num_heads=fields("linear_num_heads"),
        key_dim=fields("linear_head_dim"),
        value_dim=fields("linear_head_dim"),
        decay="bounded",
        lower_bound=fields("linear_lower_bound"),
    )
    sharing = fields("indexer_types", default=["full"] * fields("num_hidden_layers"))
    names = {"linear_attention": "kda", "indexed_attention": "dsa"}
    kinds = _mixers(fields("layer_types"), names, fields)
    kinds = tuple("dsa_shared" if kind == "dsa" and share == "shared" else kind for kind, share in zip(kinds, sharing, strict=True))
    indexer = IndexerConfig(
        num_heads=fields("index_n_heads"), head_dim=fields("index_head_dim"), topk=fields("index_topk"), pool=fields("index_kpool")
    )
    rope = rope_config(fields, "interleaved") if fields("qk_rope_head_dim") else RopeConfig(kind="none")
    residual = ResidualConfig(
        kind="mhc", num_streams=fields("hc_mult"), sinkhorn_iters=fields("hc_sinkhorn_iters"), mhc_eps=fields("hc_eps")
    )
    activation = ActivationConfig(kind="swiglu_clamped", limit=fields("swiglu_limit"))
    return _base(
        fields,
        dtype,
        mixers=kinds,
        kda=kda,
        mla=_mla(fields, rope, eps=fields("rms_norm_eps")),
        indexer=indexer,
        residual=residual,
        activation=activation,
        moe=_moe(fields, _sigmoid_router(fields)),
        **_feed_forwards(fields),
    )


def _text(fields: Fields) -> Fields:
    """A multimodal config with the fields of its text part on top."""
    return Fields({**fields.raw, **fields("text_config", default={})}, fields.source)


def _mixers(kinds: list[str], names: dict[str, str], fields: Fields) -> tuple[str, ...]:
    unknown = sorted(set(kinds) - set(names))
    if unknown:
        raise CheckpointError(f"{fields.source}: layer_types has {unknown}; {sorted(names)} are supported.")
    return tuple(names[kind] for kind in kinds)


def _kimi_layers(fields: Fields, **decay: Any) -> tuple[tuple[str, ...], KDAConfig]:
    """Mixers and KDA sizes, from transformers' flat fields or the hub's linear_attn_config, whose lists count from 1."""
    linear = fields.inside("linear_attn_config")
    if linear.raw:
        full = set(linear("full_attn_layers"))
        kinds = ["full_attention" if i + 1 in full else "linear_attention" for i in range(fields("num_hidden_layers"))]
        heads, channels, taps = linear("num_heads"), linear("head_dim"), linear("short_conv_kernel_size")
    else:
        kinds, heads, channels = fields("layer_types"), fields("linear_num_heads"), fields("linear_head_dim")
        taps = fields("linear_conv_kernel_dim")
    if taps != 4:
        raise CheckpointError(f"{fields.source}: short convolutions of {taps} taps are not supported; 4 are.")
    return (
        _mixers(kinds, {"linear_attention": "kda", "full_attention": "mla"}, fields),
        KDAConfig(num_heads=heads, key_dim=channels, value_dim=channels, **decay),
    )


FAMILIES: dict[str, Callable[[Fields, Dtype], ModelConfig]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "kimi_linear": kimi_linear,
    "kimi_k3": kimi_k3,
    "glm5_next": glm5_next,
    "glm5_next_text": glm5_next,
}
