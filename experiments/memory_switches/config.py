"""A small byte-level hybrid for one question: what does each memory switch cost and change? Two KDA layers and an attention layer with experts.

    python experiments/memory_switches/run.py

Learns Python from the standard library's source on one CPU device; `run.py` trains it once for each switch.
"""

from moejax.config.data import DataConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import GQAConfig, KDAConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.config.run import RunConfig
from moejax.config.training import ObserveConfig, OptimConfig, TrainConfig


def config() -> RunConfig:
    return RunConfig(
        name="memory_switches",
        mesh=MeshConfig(simulate_devices=1),
        model=ModelConfig(
            vocab_size=256,
            width=96,
            num_layers=6,
            mixers=("kda", "kda", "gqa"),
            gqa=GQAConfig(num_heads=3, num_kv_heads=3, head_dim=32),
            kda=KDAConfig(num_heads=3, key_dim=32, value_dim=32),
            moe=MoEConfig(num_experts=16, experts_per_token=2, hidden=64, shared_hidden=64, router=RouterConfig(score="sigmoid")),
            precision=PrecisionConfig(compute="float32"),
        ),
        data=DataConfig(seq_len=256, batch_size=8),
        optim=OptimConfig(kind="adamw", learning_rate=3e-3, warmup_steps=10),
        train=TrainConfig(steps=200, eval_batches=8),
        observe=ObserveConfig(tensorboard=False, sample_tokens=0),
    )
