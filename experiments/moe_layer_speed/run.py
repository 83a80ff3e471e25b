"""One mixture-of-experts layer, forward and backward, on 8 pretended devices: moejax against one-hot einsums and `jax.lax.ragged_dot`.

    python experiments/moe_layer_speed/run.py [--length 1024] [--width 256] [--hidden 128] [--rounds 10]

First the values and all gradients of every way are compared; then all run in turn, and each keeps its best round. Buffers have the room
that these inputs need, so nothing is dropped: a bucket is as large as the fullest one, an expert's places in the one-hot tensors as many
as the busiest expert fills. "moejax, dropless" has buckets for any routing. Ends with 1 when a bar is missed.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from layers import moejax_layer, one_hot, peer_layer, ragged_dot
from moejax_kernels.segments import Segments

from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import MoEConfig
from moejax.model.feed_forward import EXPERT_AXES
from moejax.parallel.axes import ROWS
from moejax.parallel.axes import spec as spec_of
from moejax.parallel.mesh import mesh_from

EXPERTS, CHOSEN, DEVICES = 64, 8, 8
AXES = {"router_DE": ("embed", None)} | EXPERT_AXES
BARS = {"one-hot einsums": 5.0, "ragged_dot": 3.0}
"""How many times as fast ours must be."""
TOLERANCE = 1e-4
"""Of each tensor's peak: float32 sums of thousands of terms in another order."""


@dataclasses.dataclass
class Way:
    """A layer and what was measured of it."""

    layer: Callable
    product_flops: float
    """Of all devices' matmuls, forward and backward, by formula: XLA's count takes a loop's body once."""
    program: Any = None
    wall_s: float = float("inf")
    cpu_s: float = float("inf")

    def temporary_bytes(self) -> int:
        """Of one device, XLA's count."""
        return self.program.memory_analysis().temp_size_in_bytes


def inputs(length: int, width: int, hidden: int) -> tuple[dict, np.ndarray, np.ndarray]:
    """Weights of variance 1 / fan_in, normal rows, and a cotangent."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape, scale=shape[-2] ** -0.5).astype(np.float32)
    weights = {
        "router_DE": draw(width, EXPERTS),
        "gate_EDF": draw(EXPERTS, width, hidden),
        "up_EDF": draw(EXPERTS, width, hidden),
        "down_EFD": draw(EXPERTS, hidden, width),
    }
    x_BLD, dy_BLD = rng.normal(size=(2, DEVICES, length, width)).astype(np.float32)
    return weights, x_BLD, dy_BLD


def room(weights: dict, x_BLD) -> tuple[int, int]:
    """Rows of the fullest bucket between two devices, and of the expert that one device's tokens choose most."""
    ids_BLK = np.argsort(x_BLD @ weights["router_DE"], -1)[..., -CHOSEN:]
    counts_SE = np.stack([np.bincount(ids.reshape(-1), minlength=EXPERTS) for ids in ids_BLK])
    return int(counts_SE.reshape(DEVICES, DEVICES, -1).sum(-1).max()), int(counts_SE.max())


def ways(length: int, width: int, hidden: int, *, bucket: int, capacity: int) -> dict[str, Way]:
    """The ways to measure."""
    segments = Segments.build(np.zeros((DEVICES, length), np.int32))
    moe = MoEConfig(num_experts=EXPERTS, experts_per_token=CHOSEN, hidden=hidden)
    config = ModelConfig(
        width=width, num_layers=1, mixers=("gqa",), moe=moe, precision=PrecisionConfig(params="float32", compute="float32")
    )
    fitted = dataclasses.replace(config, moe=dataclasses.replace(moe, capacity_factor=bucket * DEVICES / (length * CHOSEN)))
    row_flops = 3 * 3 * 2 * width * hidden  # of a row and an expert: three products, each with two gradients
    routed_flops = DEVICES * length * CHOSEN * row_flops
    # dispatch, and its gradient of x; combine, and its gradients of the rows and of the combine tensor
    one_hot_flops = DEVICES * EXPERTS * capacity * (row_flops + 5 * 2 * length * width)
    # XLA's CPU backend multiplies every row, empty ones too, with every expert of the device
    ragged_flops = DEVICES * DEVICES * bucket * (EXPERTS // DEVICES) * row_flops
    return {
        "moejax": Way(moejax_layer(fitted, segments), routed_flops),
        "one-hot einsums": Way(peer_layer(one_hot, k=CHOSEN, capacity=capacity), one_hot_flops),
        "ragged_dot": Way(peer_layer(ragged_dot, k=CHOSEN, bucket_rows=bucket), ragged_flops),
        "moejax, dropless": Way(moejax_layer(config, segments), routed_flops),
    }


def compiled(found: dict[str, Way], weights: dict, x_BLD, dy_BLD) -> tuple:
    """Compiles every way for the mesh that is set, and lays the arrays out on it."""
    mesh = jax.sharding.get_mesh()
    rows = NamedSharding(mesh, ROWS)
    places = {name: NamedSharding(mesh, spec_of(axes)) for name, axes in AXES.items()}, rows, rows
    arrays = jax.device_put((weights, x_BLD, dy_BLD), places)
    for way in found.values():

        def forward_and_backward(weights, x_BLD, dy_BLD, layer=way.layer):
            y_BLD, pull, dropped = jax.vjp(layer, weights, x_BLD, has_aux=True)
            return y_BLD, pull(dy_BLD), dropped

        way.program = jax.jit(forward_and_backward, out_shardings=(rows, places[:2], None)).lower(*arrays).compile()
    return arrays


def worst_difference(found: dict[str, Way], arrays) -> float:
    """Of any value or gradient from moejax's, relative to the tensor's peak.

    Raises:
      ValueError: a way dropped rows, so it did not do the same work.
    """
    worst, want = 0.0, None
    for name, way in found.items():
        *got, dropped = jax.device_get(way.program(*arrays))
        if dropped:
            raise ValueError(f"{name} dropped {dropped} rows.")
        got = jax.tree.leaves(got)
        want = want or got
        worst = max(worst, *(float(np.abs(ours - theirs).max() / np.abs(ours).max()) for ours, theirs in zip(want, got, strict=True)))
    return worst


def measure(found: dict[str, Way], arrays, rounds: int) -> None:
    for _ in range(rounds):
        for way in found.values():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            jax.block_until_ready(way.program(*arrays))
            way.wall_s = min(way.wall_s, time.perf_counter() - wall_s)
            way.cpu_s = min(way.cpu_s, time.process_time() - cpu_s)


def table(found: dict[str, Way]) -> str:
    lines = [
        "| way | wall ms | CPU ms | times ours | bar | temporaries of a device MB | GFLOP of products |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, way in found.items():
        times, bar = way.wall_s / found["moejax"].wall_s, BARS.get(name)
        verdict = "" if bar is None else f"{bar:.0f}, {'met' if times >= bar else 'MISSED'}"
        figures = f"{1e3 * way.wall_s:.0f} | {1e3 * way.cpu_s:.0f} | {times:.2f} | {verdict}"
        lines.append(f"| {name} | {figures} | {way.temporary_bytes() / 1e6:.0f} | {way.product_flops / 1e9:.0f} |")
    return "\n".join(lines)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a device")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=128, help="of one expert")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    shape = options.length, options.width, options.hidden
    weights, x_BLD, dy_BLD = inputs(*shape)
    bucket, capacity = room(weights, x_BLD)
    print(f"{DEVICES} rows of {options.length} tokens, width {options.width}, hidden {options.hidden}, {EXPERTS} experts, top-{CHOSEN}")
    mean = options.length * CHOSEN // DEVICES
    print(f"buckets of {bucket} rows (mean {mean}), {capacity} places of an expert (mean {mean * DEVICES // EXPERTS})", flush=True)
    found = ways(*shape, bucket=bucket, capacity=capacity)
    with jax.set_mesh(mesh_from(expert=DEVICES)):
        arrays = compiled(found, weights, x_BLD, dy_BLD)
        worst = worst_difference(found, arrays)
        print(f"values and gradients differ by at most {worst:.1e} of the peak", flush=True)
        if worst > TOLERANCE:
            return 1
        measure(found, arrays, options.rounds)
    print(table(found))
    return int(any(found[name].wall_s < bar * found["moejax"].wall_s for name, bar in BARS.items()))


if __name__ == "__main__":
    sys.exit(main())
