"""A small byte-level model for one question: what does each switch of the MoE layer bring? Two attention layers, 32 experts top-4, dropless.

    python experiments/moe_switches/run.py

Learns Python from the standard library's source on 8 pretended CPU devices that hold 4 experts each. As it stands nothing balances its
softmax router; `run.py` trains it once for each switch. No decision about copies ever brings `copies.gain` here, so none is carried out:
copies are on only for their count of what devices carry. About 90 s of processor time, 2.10 nats a byte on held-out files.
"""

from moejax.config.data import DataConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import GQAConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import CopiesConfig, MoEConfig
from moejax.config.run import RunConfig
from moejax.config.training import ObserveConfig, OptimConfig, TrainConfig


def config() -> RunConfig:
    return RunConfig(
        name="moe_switches",
        mesh=MeshConfig(expert=8, simulate_devices=8),
        model=ModelConfig(
            vocab_size=256,
            width=64,
            num_layers=2,
            gqa=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=16),
            moe=MoEConfig(num_experts=32, experts_per_token=4, hidden=32, copies=CopiesConfig(every=10, gain=1e9)),
            precision=PrecisionConfig(compute="float32"),
        ),
        data=DataConfig(seq_len=128, batch_size=16),
        optim=OptimConfig(kind="muon", learning_rate=1e-2, warmup_steps=5, schedule="wsd", decay_fraction=0.4, final_fraction=0.05),
        train=TrainConfig(steps=300, eval_batches=16),
        observe=ObserveConfig(tensorboard=False, sample_tokens=0),
    )
