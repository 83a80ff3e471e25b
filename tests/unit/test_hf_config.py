"""config.json of the hub becomes the right switches, and what is not supported is refused by name."""

import json
import math

import numpy as np
import pytest

from moejax.config.mixers import RopeConfig
from moejax.config.model import ModelConfig
from moejax.hf.families import FAMILIES, CheckpointError, Fields, rope_config
from moejax.hf.load import read_config
from moejax.model.rope import attention_scale, frequencies

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK_V3 = {  # as deepseek-ai/DeepSeek-V3 has it
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": YARN,
}
KIMI_LINEAR = {  # as moonshotai/Kimi-Linear-48B-A3B has it
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
KIMI_K3 = {
    "model_type": "kimi_k3",
    "text_config": {  # as moonshotai/Kimi-K3 has it
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 3072,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [i for i in range(1, 93) if i % 4],
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    },
}
QWEN3_NEXT = {  # as Qwen/Qwen3-Next-80B-A3B has it
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def parse(raw: dict, **changes):
    """Our switches."""
    return FAMILIES[raw["model_type"]](Fields({**raw, **changes}, "config.json"), "float32")


def test_deepseek_v3_as_on_the_hub():
    model = parse(DEEPSEEK_V3)
    assert model.mixers == ("mla",) and model.width == 7168 and model.precision.compute == "float32"
    assert [kind.feed_forward for kind in model.layers()] == ["dense"] * 3 + ["moe"] * 58 and model.dense_hidden == 18432
    router, moe = model.moe.router, model.moe
    assert (moe.num_experts, moe.experts_per_token, moe.hidden, moe.shared_hidden) == (256, 8, 2048, 2048)
    assert (router.score, router.correction_bias, router.num_groups, router.groups_kept, router.scale) == ("sigmoid", True, 8, 4, 2.5)
    assert model.mla.rope == RopeConfig(
        kind="interleaved", theta=10000.0, yarn_factor=40.0, yarn_original_length=4096, yarn_mscale_all_dim=1.0
    )


def test_layers_of_kimi_linear_count_from_one_on_the_hub():
    model = parse(KIMI_LINEAR)
    assert [i for i, kind in enumerate(model.layers(), 1) if kind.mixer == "mla"] == [4, 8, 12, 16, 20, 24, 27]
    assert model.kda.decay == "softplus" and not model.kda.full_rank_gate and (model.kda.num_heads, model.kda.key_dim) == (32, 128)
    assert model.mla.rope.kind == "none" and model.mla.q_lora_rank == 0
    assert (model.mla.latent_norm_eps, model.norm_eps) == (1e-6, 1e-5)
    assert model.moe.router.scale == 2.446 and [kind.feed_forward for kind in model.layers()] == ["dense"] + ["moe"] * 26


def test_kimi_k3_lies_in_the_text_part_of_its_config():
    model = parse(KIMI_K3)
    mixers = [kind.mixer for kind in model.layers()]
    assert (mixers.count("kda"), mixers.count("mla"), mixers[-2:]) == (69, 24, ["mla", "mla"])
    assert model.kda.decay == "bounded" and model.kda.lower_bound == -5 and model.kda.full_rank_gate
    assert model.mla.output_gate and model.mla.rope.kind == "none" and model.mla.latent_norm_eps == 1e-5
    assert (model.moe.latent_width, model.moe.shared_hidden) == (3584, 6144)
    assert (model.residual.kind, model.residual.block_size, model.activation.kind) == ("block_attnres", 12, "situ")


def test_layers_and_rotation_of_qwen3_next_come_from_the_hub_fields():
    model = parse(QWEN3_NEXT)
    assert model.mixers[:4] == ("gdn", "gdn", "gdn", "gqa") and len(model.mixers) == 48
    assert model.gqa.rotary_dim == 64 and model.gqa.rope.theta == 1e7 and model.gqa.output_gate and model.gqa.qk_norm
    assert model.zero_centred_norm and model.moe.shared_gate and not model.moe.router.correction_bias


def test_qwen_layers_without_experts_are_dense():
    model = parse(QWEN3_NEXT, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [kind.feed_forward for kind in model.layers()] == ["dense", "moe", "dense", "dense"]
    assert model.dense_hidden == QWEN3_NEXT["intermediate_size"]
    assert parse(QWEN3_NEXT).dense_hidden == ModelConfig().dense_hidden  # no layer is dense


def test_rotation_reads_the_old_and_the_new_fields():
    old, new = (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    )
    assert rope_config(Fields(old, "a"), "half") == rope_config(Fields(new, "a"), "half") == RopeConfig(kind="half", theta=5e5)
    assert rope_config(Fields({}, "a"), "half") == RopeConfig(kind="half")
    unscaled = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 1, "original_max_position_embeddings": 64}}
    assert rope_config(Fields(unscaled, "a"), "half") == RopeConfig(kind="half", theta=5e5)


def test_yarn_frequencies_equal_the_formula():
    dim, base, factor, length, fast, slow = 64, 10000.0, 40.0, 4096, 32, 1
    ours = frequencies(rope_config(Fields(DEEPSEEK_V3, "a"), "interleaved"), dim)
    # arXiv 2309.00071, section 3.2, as DeepSeek-V3's inference code has it: correction range, linear ramp, blend
    correction = lambda rotations: dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))
    low, high = max(math.floor(correction(fast)), 0), min(math.ceil(correction(slow)), dim - 1)
    for pair in range(dim // 2):
        plain = base ** (-2 * pair / dim)
        keep = 1 - min(max((pair - low) / (high - low), 0), 1)
        assert ours[pair] == pytest.approx(plain / factor * (1 - keep) + plain * keep, rel=1e-6)
    assert np.all(ours[: low + 1] == frequencies(RopeConfig(kind="interleaved"), dim)[: low + 1]) and (low, high) == (10, 23)


def test_yarn_scales_the_logits_of_attention():
    rope = rope_config(Fields(DEEPSEEK_V3, "a"), "interleaved")
    assert attention_scale(rope, 192) == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert attention_scale(RopeConfig(), 192) == pytest.approx(192**-0.5)


def without(raw: dict, name: str) -> dict:
    return {key: value for key, value in raw.items() if key != name}


REFUSED = [
    (without(DEEPSEEK_V3, "kv_lora_rank"), "config.json: field kv_lora_rank is missing"),
    (without(DEEPSEEK_V3, "n_routed_experts"), "field n_routed_experts or num_local_experts or num_experts is missing"),
    (DEEPSEEK_V3 | {"rope_scaling": {"type": "yarn"}}, "config.json: rope_scaling or rope_parameters: field factor is missing"),
    (DEEPSEEK_V3 | {"rope_scaling": {"type": "longrope"}}, "rope_type='longrope' is not supported; 'default' and 'yarn' are"),
    (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; 'sigmoid' would be"),
    (DEEPSEEK_V3 | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; 'silu' would be"),
    (DEEPSEEK_V3 | {"attention_bias": True}, "attention_bias=True is not supported; False would be"),
    (KIMI_LINEAR | {"mla_use_nope": False}, "mla_use_nope=False is not supported"),
    (KIMI_LINEAR | {"linear_attn_config": {"num_heads": 2}}, "config.json: linear_attn_config: field full_attn_layers is missing"),
    (QWEN3_NEXT | {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim=3 is not supported; 4 would be"),
    (
        QWEN3_NEXT | {"layer_types": ["full_attention", "mamba"]},
        "layer_types has ['mamba']; ['full_attention', 'linear_attention'] are supported",
    ),
]


@pytest.mark.parametrize(("raw", "message"), REFUSED, ids=[message[-40:] for _, message in REFUSED])
def test_what_is_not_supported_is_refused_by_name(raw, message):
    with pytest.raises(CheckpointError) as refused:
        parse(raw)
    assert message in str(refused.value)


def test_an_unknown_family_is_refused_with_those_that_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"model_type='llama' is not supported; deepseek_v3, deepseek_v32, .*qwen3_next are"):
        read_config(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json there"):
        read_config(tmp_path)
