"""Kimi-Linear 48B (A3B) on one node of 8 H200: 27 layers, three KDA to one MLA without rotation, 256 experts top-8 and a shared one.

    moejax plan configs/kimi_linear_48b_h200.py --target h200x8

The shape of moonshotai/Kimi-Linear-48B-A3B-Base. Each GPU holds 32 of a layer's experts and trains a row of 8,192 tokens a step. It is
the model by which the memory switches are compared (experiments/memory_switches); no H200 was at hand to train it.
"""

from moejax.config.data import DataConfig
from moejax.config.memory import MemoryConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import KDAConfig, MLAConfig, RopeConfig
from moejax.config.model import ModelConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.config.run import RunConfig
from moejax.config.training import LossConfig, OptimConfig, TrainConfig

MIXERS = ("kda", "kda", "kda", "mla") * 6 + ("kda", "kda", "mla")


def config() -> RunConfig:
    return RunConfig(
        name="kimi_linear_48b_h200",
        mesh=MeshConfig(fsdp=1, expert=8),
        model=ModelConfig(
            vocab_size=163_840,
            width=2304,
            num_layers=27,
            mixers=MIXERS,
            num_dense_layers=1,
            dense_hidden=9216,
            norm_eps=1e-5,
            kda=KDAConfig(num_heads=32, key_dim=128, value_dim=128, decay="softplus"),
            mla=MLAConfig(
                num_heads=32, q_lora_rank=0, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128, rope=RopeConfig(kind="none")
            ),
            moe=MoEConfig(
                num_experts=256,
                experts_per_token=8,
                hidden=1024,
                shared_hidden=1024,
                capacity_factor=1.25,
                router=RouterConfig(score="sigmoid", correction_bias=True, scale=2.446),
            ),
        ),
        data=DataConfig(seq_len=8192, batch_size=8),
        losses=LossConfig(bias_update="sign"),
        optim=OptimConfig(kind="adamw", learning_rate=1e-4),
        train=TrainConfig(steps=1000),
        memory=MemoryConfig(preset="lean"),
    )
