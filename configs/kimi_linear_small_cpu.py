"""Kimi-Linear's layers at 13M parameters: three KDA layers and one MLA layer without rotation, 32 experts top-4 and a shared one.

    moejax train configs/kimi_linear_small_cpu.py --train.steps 8

The shape at which one training step (forward, backward, AdamW; 4 rows of 1,024 tokens, float32, one CPU device) is compared with
transformers' model of the same sizes in PyTorch. It is for measuring: eight steps teach it nothing.
"""

from moejax.config.data import DataConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import KDAConfig, MLAConfig, RopeConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.config.run import RunConfig
from moejax.config.training import ObserveConfig, OptimConfig, TrainConfig


def config() -> RunConfig:
    return RunConfig(
        name="kimi_linear_small_cpu",
        mesh=MeshConfig(simulate_devices=1),
        model=ModelConfig(
            vocab_size=4096,
            width=256,
            num_layers=4,
            scan_layers=False,
            mixers=("kda", "kda", "kda", "mla"),
            feed_forwards=("dense", "moe", "moe", "moe"),
            dense_hidden=512,
            kda=KDAConfig(num_heads=4, key_dim=64, value_dim=64, decay="softplus"),
            mla=MLAConfig(
                num_heads=4, q_lora_rank=0, kv_lora_rank=64, nope_dim=32, rope_dim=32, value_dim=64, rope=RopeConfig(kind="none")
            ),
            moe=MoEConfig(
                num_experts=32,
                experts_per_token=4,
                hidden=128,
                shared_hidden=128,
                router=RouterConfig(score="sigmoid", correction_bias=True, scale=2.446),
            ),
            precision=PrecisionConfig(compute="float32"),
        ),
        data=DataConfig(seq_len=1024, batch_size=4),
        optim=OptimConfig(kind="adamw", learning_rate=1e-4, warmup_steps=0),
        train=TrainConfig(steps=8, eval_batches=1),
        observe=ObserveConfig(sample_tokens=0),
    )
