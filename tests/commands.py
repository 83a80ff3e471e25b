"""A very small run, and the command line in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

CACHE = Path(__file__).parent.parent / ".cache" / "jax"
CONFIG = '''"""A run of seconds: two layers of 16 channels on random letters."""

from moejax.config.data import DataConfig, SourceConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import GQAConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.config.run import RunConfig
from moejax.config.training import CheckpointConfig, LossConfig, ObserveConfig, OptimConfig, TrainConfig


def config() -> RunConfig:
    return RunConfig(
        name="smallest", out_dir={out_dir!r}, mesh=MeshConfig(fsdp=-1, expert=4, simulate_devices=8),
        model=ModelConfig(
            width=16, num_layers=2, gqa=GQAConfig(num_heads=2, num_kv_heads=1, head_dim=8), precision=PrecisionConfig(compute="float32"),
            moe=MoEConfig(num_experts=4, experts_per_token=2, hidden=16, router=RouterConfig(score="sigmoid", correction_bias=True))),
        data=DataConfig(sources=(SourceConfig(kind="text", path={text!r}),), seq_len=32, batch_size=8, heldout_percent=20),
        losses=LossConfig(bias_update="sign", balance="sequence"),
        optim=OptimConfig(learning_rate=2e-2, warmup_steps=0, schedule="constant"),
        train=TrainConfig(steps=40, eval_batches=4),
        checkpoint=CheckpointConfig(term_timeout_s=60),
        observe=ObserveConfig(sample_tokens=0))
'''


def write_config(folder: Path, *, text: str = "") -> Path:
    """The config file of a small run in `folder`. Its text, if no pattern of files is given: letters without order, so that counting
    pairs of them does not help."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    (folder / "text").mkdir(exist_ok=True)
    for number in range(30):
        (folder / "text" / f"{number:02}.txt").write_text("".join(rng.choice(letters, rng.integers(300, 700))))
    path = folder / "smallest.py"
    path.write_text(CONFIG.format(out_dir=str(folder / "runs"), text=text or str(folder / "text" / "*.txt")))
    return path


def start(*args, output: Path | None = None, **environment: str) -> subprocess.Popen:
    """`moejax ARGS` in a process of its own; stdout and stderr go to `output` if given, else to pipes."""
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in the other tests
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "moejax.cli", *map(str, args)]
    if output is None:
        return subprocess.Popen(
            command, env=os.environ | variables | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    with output.open("w") as file:
        return subprocess.Popen(command, env=os.environ | variables | environment, stdout=file, stderr=subprocess.STDOUT, text=True)


def moejax(*args, timeout_s: float = 900, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `moejax ARGS`."""
    process = start(*args, **environment)
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err
