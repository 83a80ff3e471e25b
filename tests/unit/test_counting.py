"""Counted parameters equal the trees of weights; counted FLOPs equal hand counts; public models have their published sizes."""

import dataclasses
import math
import pathlib
import runpy

import jax
import pytest

from moejax.config.mixers import GDNConfig, GQAConfig, IndexerConfig, KDAConfig, MLAConfig
from moejax.config.model import ActivationConfig, ModelConfig, ResidualConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.hf.load import read_config
from moejax.model import counting, language_model

ROOT = pathlib.Path(__file__).parents[2]
FAMILIES = sorted(folder.name for folder in (ROOT / "tests" / "golden" / "models").iterdir() if folder.is_dir())
LENGTH = 128
KEYS = 64.5  # mean over the row of visible keys, 1 to 128
CHOSEN = (8 * 9 / 2 + 120 * 8) / 128  # mean of the keys that a sparse layer chooses: 1 to 8, then 8

# Multiply-adds per token of one layer, by hand from the sizes in config.json: width 32, 4 heads of 8 channels.
ATTENTION = 4 * (8 + 8) * KEYS  # logits and values
GQA = 32 * 32 + 2 * 32 * 16 + 32 * 32 + ATTENTION  # q, k and v of two heads, output
LATENT_ATTENTION = 4 * (12 + 8)  # per key; 12 = 8 channels and 4 rotary ones
LATENT_Q, LATENT_KV, LATENT_OUT = 32 * 24 + 24 * 4 * 12, 32 * (16 + 4) + 16 * 4 * (8 + 8), 4 * 8 * 32
MLA = LATENT_Q + LATENT_KV + LATENT_OUT + LATENT_ATTENTION * KEYS
MLA_DIRECT_Q = 32 * 4 * 12 + LATENT_KV + LATENT_OUT + LATENT_ATTENTION * KEYS
INDEXER = 24 * 4 * 8 + 32 * 8 + 32 * 4 + 4 * 8 * KEYS  # queries from the latent, one key, weights, and scores of all keys
DSA = LATENT_Q + LATENT_KV + LATENT_OUT + LATENT_ATTENTION * CHOSEN + INDEXER
DSA_POOLED = (
    32 * 24
    + 24 * 4 * 8
    + 32 * 16
    + 16 * 4 * 16
    + LATENT_OUT
    + 4 * (8 + 8) * CHOSEN  # no rotary channels
    + 24 * 4 * 8
    + 32 * 8
    + 32 * 4
    + 32 * 8
    + 4 * 8 * KEYS / 4
)  # pooling gate; a fourth of the keys
# chunked delta rule, per head and token, chunks of 64: A, Aqk; T times [K V]; Aqk times V; three products with the state
DELTA = 2 * 64 * 8 + 64 * (8 + 8) + 64 * 8 + 3 * 8 * 8
KDA = 3 * 32 * 32 + (32 * 8 + 8 * 32) + 32 * 4 + (32 * 8 + 8 * 32) + 32 * 32 + 4 * 96 + 4 * DELTA  # qkv, decay, beta, gate, out, conv
KDA_FULL_GATE = 3 * 32 * 24 + (32 * 8 + 8 * 24) + 32 * 3 + 32 * 24 + 24 * 32 + 4 * 72 + 3 * DELTA  # three heads
GDN = 32 * (2 * 16 + 2 * 32) + 32 * 8 + 32 * 32 + 4 * (2 * 16 + 32) + 4 * DELTA  # two key heads: q k v z, b a, out, conv
GATED_GQA = GQA + 32 * 32  # q's projection is twice as wide
EXPERT = 3 * 32 * 16
MOE = 32 * 8 + 2 * EXPERT  # router over 8, two experts
SHARED_MOE = MOE + EXPERT
LATENT_MOE = 32 * 8 + 2 * 32 * 16 + 2 * 3 * 16 * 12 + 3 * 32 * 24  # router, latent in and out, experts of 12, shared of 24
DENSE = 3 * 32 * 48
HYPER = 8 * 64 + 2 * 32 * (2 + 2)  # 8 mixing weights from 2 streams; collapse, write and mix them
BLOCKS = 2 * 32 * 4  # scores and mix over 3 blocks and the running sum
OUTPUT = 32 * 96
MULTIPLY_ADDS = {
    "mixtral": 2 * (GQA + 32 * 4 + 2 * 3 * 32 * 48) + OUTPUT,
    "qwen3_moe": 2 * (GQA + MOE) + OUTPUT,
    "qwen3_next": 3 * GDN + GATED_GQA + 4 * (SHARED_MOE + 32) + OUTPUT,
    "deepseek_v3": 3 * MLA + DENSE + 2 * SHARED_MOE + OUTPUT,
    "deepseek_v32": 3 * DSA + DENSE + 2 * SHARED_MOE + OUTPUT,
    "kimi_linear": 4 * KDA + MLA_DIRECT_Q + DENSE + 4 * SHARED_MOE + OUTPUT,
    "kimi_k3": 4 * KDA_FULL_GATE + 2 * (MLA + LATENT_OUT) + 3 * 32 * 40 + 5 * LATENT_MOE + 13 * BLOCKS + OUTPUT,
    "glm5_next_text": 4 * KDA + DSA_POOLED + DENSE + 4 * SHARED_MOE + 10 * HYPER + OUTPUT,
}

KIMI_K3 = ModelConfig(
    vocab_size=163840,
    width=7168,
    num_layers=93,
    mixers=("kda", "kda", "kda", "mla") * 23 + ("mla",),
    num_dense_layers=1,
    dense_hidden=33792,
    norm_eps=1e-5,
    kda=KDAConfig(num_heads=96, key_dim=128, value_dim=128, full_rank_gate=True),
    mla=MLAConfig(num_heads=96, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128, output_gate=True),
    moe=MoEConfig(
        num_experts=896,
        experts_per_token=16,
        hidden=3072,
        shared_hidden=6144,
        latent_width=3584,
        router=RouterConfig(score="sigmoid", correction_bias=True),
    ),
    activation=ActivationConfig(kind="situ"),
    residual=ResidualConfig(kind="block_attnres"),
)


def golden(family: str) -> ModelConfig:
    return read_config(ROOT / "tests" / "golden" / "models" / family, "float32")[0]


def total(config: ModelConfig, name: str, length: int = LENGTH) -> float:
    return sum(getattr(part, name) for part in counting.count(config, length))


def size(config: ModelConfig) -> int:
    """Entries of all weights."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(language_model.shapes(config)))


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_parameters_equal_the_tree_of_weights(family):
    assert total(golden(family), "params") == size(golden(family))


def test_counted_parameters_of_the_main_job_equal_its_weights():
    model = runpy.run_path(str(ROOT / "configs" / "tiny_hybrid.py"))["config"]().model
    assert total(model, "params") == size(model)


@pytest.mark.parametrize(
    "switches",
    [
        {"mixers": ("dsa",), "gqa": GQAConfig(qk_norm=True), "indexer": IndexerConfig(base="gqa")},
        {"mixers": ("gqa",), "gqa": GQAConfig(sinks=True, window=16), "tie_embeddings": True},
        {"mixers": ("dsa", "dsa_shared"), "mla": MLAConfig(q_lora_rank=16)},
        {"mixers": ("kda",), "kda": KDAConfig(num_heads=4, num_key_heads=2, value_dim=16)},
        {
            "mixers": ("gdn",),
            "gdn": GDNConfig(value_dim=16),
            "moe": MoEConfig(latent_width=24, latent_norm=False, shared_hidden=8, shared_gate=True),
        },
    ],
    ids=["dsa on gqa", "sinks, tied", "shared index", "grouped kda", "latent without norm"],
)
def test_counted_parameters_of_other_switches_equal_the_tree_of_weights(switches):
    model = ModelConfig(**switches)
    assert total(model, "params") == size(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_of_each_family_equal_the_hand_count(family):
    assert total(golden(family), "flops") == pytest.approx(2 * MULTIPLY_ADDS[family], rel=1e-12)


def test_training_costs_three_forward_passes_and_recomputing_a_fourth():
    model = golden("mixtral")
    assert counting.train_flops_per_token(model, LENGTH) == 3 * total(model, "flops")
    assert counting.train_flops_per_token(model, LENGTH, remat=True) == 4 * total(model, "flops")


def test_a_window_bounds_the_keys():
    model = ModelConfig(gqa=GQAConfig(window=16))
    dense = dataclasses.replace(model, gqa=GQAConfig())
    assert total(model, "flops", 8) == total(dense, "flops", 8)
    for length in (17, 40):
        keys = sum(min(t, 16) for t in range(1, length + 1)) / length
        less = 2 * 4 * 4 * (64 + 64) * ((length + 1) / 2 - keys)  # 4 layers of 4 heads; logits and values of the keys outside
        assert total(model, "flops", length) == pytest.approx(total(dense, "flops", length) - less, rel=1e-12)


def test_kimi_k3_has_its_published_size():
    """2.8T parameters, about 104B active (Kimi K3 technical report, table 1)."""
    assert round(total(KIMI_K3, "params") / 1e12, 1) == 2.8
    assert round(total(KIMI_K3, "active") / 1e9) == 104
