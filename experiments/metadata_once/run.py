"""One train step with the documents' borders built once, on the host, and with every layer building them anew.

    JAX_PLATFORMS=cpu python experiments/metadata_once/run.py [--rounds 5]     # runs both on this CPU
    python experiments/metadata_once/run.py --target h200x1                      # compiles both for a GPU; needs none

Both steps must give the same loss, bit for bit. XLA counts the body of the loop over layers once.
"""

import argparse
import dataclasses
import sys
import time
from typing import Any

import jax
import numpy as np
from moejax_kernels.segments import Segments

from moejax.config.data import DataConfig
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import GQAConfig, KDAConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.run import RunConfig
from moejax.config.training import OptimConfig, TrainConfig
from moejax.data.batch import Batch
from moejax.parallel.mesh import mesh_from
from moejax.plan.compiled import launches
from moejax.plan.targets import parse
from moejax.plan.train_step import plan_step
from moejax.train.placement import place_batch
from moejax.train.program import make_program
from moejax.train.state import init_state

ROWS, LENGTH, UNITS = 2, 2048, 4
MODEL = ModelConfig(
    width=128,
    num_layers=2 * UNITS,
    mixers=("kda", "gqa"),
    feed_forwards=("dense",),
    dense_hidden=256,
    kda=KDAConfig(num_heads=2, key_dim=64, value_dim=64),
    gqa=GQAConfig(num_heads=2, num_kv_heads=1, head_dim=64),
    precision=PrecisionConfig(compute="float32"),
)
WAYS = {"once per batch": False, "in every layer": True}


def documents() -> Batch:
    """Rows of random bytes in documents of 1 to 400."""
    rng = np.random.default_rng(0)
    ids_BL = np.stack([np.repeat(np.arange(LENGTH), rng.integers(1, 401, LENGTH))[:LENGTH] for _ in range(ROWS)])
    return Batch.build(rng.integers(0, 256, ids_BL.shape), ids_BL)


@dataclasses.dataclass
class Way:
    """A step, and what was measured of it."""

    step: Any
    state: Any
    wall_s: float = float("inf")
    losses: list[float] = dataclasses.field(default_factory=list)


def compiled_ways(mesh, batches) -> dict[str, Way]:
    found = {}
    for name, rebuild in WAYS.items():
        program = make_program(MODEL, RunConfig(name=name).losses, OptimConfig(warmup_steps=0), TrainConfig(rebuild_metadata=rebuild))
        state = init_state(MODEL, program.optimizer, mesh, 0)
        found[name] = Way(program.lower(state, batches).compile(), state)
    return found


def measure(ways: dict[str, Way], batches, rounds: int) -> None:
    for _ in range(rounds):
        for way in ways.values():
            began_s = time.perf_counter()
            way.state, out = way.step(way.state, batches)
            jax.block_until_ready(way.state)
            way.wall_s = min(way.wall_s, time.perf_counter() - began_s)
            way.losses.append(float(out.scalars["loss_nats"]))


def alone(segments: Segments, rounds: int) -> str:
    """What building the borders of one batch takes as a program of its own."""
    build = jax.jit(Segments.rebuilt).lower(segments).compile()
    wall_s = float("inf")
    for _ in range(10 * rounds):
        began_s = time.perf_counter()
        jax.block_until_ready(build(segments))
        wall_s = min(wall_s, time.perf_counter() - began_s)
    cost: Any = build.cost_analysis()
    return f"alone     {cost['flops'] / 1e6:.2f} MFLOP, {cost['bytes accessed'] / 1e6:.2f} MB accessed, {1e3 * wall_s:.2f} ms"


def on_this_machine(rounds: int) -> int:
    mesh = mesh_from()
    with jax.set_mesh(mesh):
        batches = place_batch(documents(), mesh, accumulation=1)
        ways = compiled_ways(mesh, batches)
        measure(ways, batches, rounds)
        print(alone(jax.device_put(documents().segments), rounds))
    print("| borders | instructions | MFLOP | MB accessed | temporaries MB | step ms |\n|---|---|---|---|---|---|")
    for name, way in ways.items():
        cost, text = way.step.cost_analysis(), way.step.as_text()
        counts = f"{text.count(' = ')} | {cost['flops'] / 1e6:.2f} | {cost['bytes accessed'] / 1e6:.2f}"
        print(f"| {name} | {counts} | {way.step.memory_analysis().temp_size_in_bytes / 1e6:.2f} | {1e3 * way.wall_s:.1f} |")
    one, other = (way.losses for way in ways.values())
    print(f"losses of {rounds} steps are {'the same' if one == other else f'NOT the same: {one} {other}'}")
    return int(one != other)


def for_a_gpu(target: str) -> int:
    """Counts of the program that the GPU would run, in bfloat16."""
    kind, count = parse(target)
    print("| borders | launches (loop bodies once) | instructions | temporaries MB |\n|---|---|---|---|")
    for name, rebuild in WAYS.items():
        config = RunConfig(
            name=name,
            mesh=MeshConfig(),
            model=dataclasses.replace(MODEL, precision=PrecisionConfig()),
            data=DataConfig(seq_len=LENGTH, batch_size=ROWS),
            train=TrainConfig(rebuild_metadata=rebuild),
        )
        compiled: Any = plan_step(config, kind, count).compiled
        spelled = ", ".join(f"{number} {what}" for what, number in sorted(launches(compiled).items()))
        print(
            f"| {name} | {spelled} | {compiled.as_text().count(' = ')} | {compiled.memory_analysis().temp_size_in_bytes / 1e6:.2f} |",
            flush=True,
        )
    return 0


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", default="", help="GPUs, e.g. h200x1; without it both steps run here")
    options = parser.parse_args(arguments)
    return for_a_gpu(options.target) if options.target else on_this_machine(options.rounds)


if __name__ == "__main__":
    sys.exit(main())
