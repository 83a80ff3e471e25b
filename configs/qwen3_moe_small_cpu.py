"""Qwen3-MoE's layers at 16M parameters: attention with q/k norm and rotation, 32 experts top-4 behind a softmax router.

    moejax train configs/qwen3_moe_small_cpu.py --train.steps 8

The shape at which one training step (forward, backward, AdamW; 4 rows of 1,024 tokens, float32, one CPU device) is compared with
transformers' model of the same sizes in PyTorch. It is for measuring: eight steps teach it nothing.
"""

from moejax.config.data import DataConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import GQAConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.config.run import RunConfig
from moejax.config.training import ObserveConfig, OptimConfig, TrainConfig


def config() -> RunConfig:
    return RunConfig(
        name="qwen3_moe_small_cpu",
        mesh=MeshConfig(simulate_devices=1),
        model=ModelConfig(
            vocab_size=4096,
            width=256,
            num_layers=4,
            scan_layers=False,
            mixers=("gqa",),
            gqa=GQAConfig(num_heads=4, num_kv_heads=4, head_dim=64, qk_norm=True),
            moe=MoEConfig(num_experts=32, experts_per_token=4, hidden=128, router=RouterConfig(score="softmax")),
            precision=PrecisionConfig(compute="float32"),
        ),
        data=DataConfig(seq_len=1024, batch_size=4),
        optim=OptimConfig(kind="adamw", learning_rate=1e-4, warmup_steps=0),
        train=TrainConfig(steps=8, eval_batches=1),
        observe=ObserveConfig(sample_tokens=0),
    )
