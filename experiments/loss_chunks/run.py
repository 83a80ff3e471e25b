"""The chunked loss beside the plain one, forward and backward: time and temporaries here, or bytes and kernels compiled for an H200.

JAX_PLATFORMS=cpu python experiments/loss_chunks/run.py                # 2,048 tokens x 32,768 x 512, float32; a missed bar exits with 1
JAX_PLATFORMS=cpu python experiments/loss_chunks/run.py --target h200  # 8,192 x 163,840 x 7,168, bfloat16 with a float32 head; no GPU needed
"""

import argparse
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from moejax.losses.cross_entropy import chunks, cross_entropy
from moejax.plan.compiled import launches
from moejax.plan.targets import TARGETS, compile_for

HERE = (2048, 32768, 512)
ON_GPU = (8192, 163840, 7168)
TIMED = ("plain", "forward", "recompute", "forward, head frozen")
"""What is run here without --all."""
SLOWER, LESS = 1.25, 10
"""Bars here: at most so many times the plain loss's time, and at least so many times less temporaries."""
TEMPORARY_BYTES = 0.6e9
"""Bar on an H200: temporaries and the hidden states' gradient, beyond the head's gradient."""


def plain(hidden_BLD, unembed_DV, targets_BL, weights_BL):
    """Logits as a whole, under autodiff."""
    logits_BLV = jnp.einsum("bld,dv->blv", hidden_BLD, unembed_DV.astype(hidden_BLD.dtype), preferred_element_type=jnp.float32)
    return jnp.sum(weights_BL * optax.softmax_cross_entropy_with_integer_labels(logits_BLV, targets_BL))


def chunked(**options) -> Callable:
    return lambda *arrays: cross_entropy(*arrays, **options).loss_sum


def ways(num_tokens: int, vocab: int) -> dict[str, Callable]:
    """Name -> value and gradients of a loss."""
    both, hidden = (lambda loss: jax.value_and_grad(loss, (0, 1))), (lambda loss: jax.value_and_grad(loss))
    return {
        "plain": both(plain),
        "forward": both(chunked()),
        "recompute": both(chunked(gradients="recompute")),
        "forward, head frozen": hidden(chunked()),
        "recompute, head frozen": hidden(chunked(gradients="recompute")),
        "forward, 256 tokens x all": both(chunked(chunk_tokens=256, chunk_vocab=vocab)),
        "forward, all x 1024": both(chunked(chunk_tokens=num_tokens, chunk_vocab=1024)),
        "values alone": chunked(),
    }


def shapes(num_tokens: int, vocab: int, width: int, dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
    like = jax.ShapeDtypeStruct
    row = (1, num_tokens)
    return like((*row, width), dtype), like((width, vocab), jnp.float32), like(row, jnp.int32), like(row, jnp.float32)


def draw(like: tuple[jax.ShapeDtypeStruct, ...]):
    keys = jax.random.split(jax.random.key(0), 3)
    width, vocab = like[1].shape
    hidden_BLD, unembed_DV = (jax.random.normal(key, shape.shape, shape.dtype) for key, shape in zip(keys, like[:2], strict=False))
    return hidden_BLD, unembed_DV * width**-0.5, jax.random.randint(keys[2], like[2].shape, 0, vocab), jnp.ones(like[3].shape)


def here(rounds: int, *, every: bool) -> bool:
    """Prints times and temporaries on this machine's CPU; whether a bar was missed."""
    like = shapes(*HERE, jnp.float32)
    arrays = draw(like)
    programs = {name: jax.jit(way).lower(*like).compile() for name, way in ways(*HERE[:2]).items() if every or name in TIMED}
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(rounds):
        for name, program in programs.items():
            jax.block_until_ready(program(*arrays))  # fetches memory that the others gave back
            start = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            best[name] = min(best[name], time.perf_counter() - start)
    temporary = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
    print(f"chosen: {chunks(*like[:2])} (tokens, columns)\n\n| way | ms | of plain | temporaries, MB | times less |\n|---|---|---|---|---|")
    missed = False
    for name in programs:
        slower, less = best[name] / best["plain"], temporary["plain"] / temporary[name]
        print(f"| {name} | {1e3 * best[name]:.0f} | {slower:.2f} | {temporary[name] / 1e6:.1f} | {less:.1f} |")
        if name in ("forward", "recompute") and (slower > SLOWER or less < LESS):
            print(f"MISSED: {name} should take at most {SLOWER} times as long and {LESS} times less temporaries", file=sys.stderr)
            missed = True
    return missed


def compiled(target: str) -> bool:
    """Prints bytes and kernels of programs for one absent GPU; whether a bar was missed."""
    like = shapes(*ON_GPU, jnp.bfloat16)
    hidden_bytes, head_bytes = like[0].size * 2, like[1].size * 4
    print(f"chosen: {chunks(*like[:2])} (tokens, columns)\n")
    print("| way | temporaries, GB | results, GB | beyond the head's gradient, GB | launches, loop bodies once |\n|---|---|---|---|---|")
    missed = False
    for name, way in ways(*ON_GPU[:2]).items():
        _, program = compile_for(TARGETS[target], way, *like)
        memory, gradients = program.memory_analysis(), jax.eval_shape(way, *like)
        of_head = head_bytes if any(leaf.shape == like[1].shape for leaf in jax.tree.leaves(gradients)) else 0
        beyond = memory.temp_size_in_bytes + memory.output_size_in_bytes - of_head
        count = ", ".join(f"{number} {kind}" for kind, number in sorted(launches(program).items()))
        print(
            f"| {name} | {memory.temp_size_in_bytes / 1e9:.3f} | {memory.output_size_in_bytes / 1e9:.3f} | {beyond / 1e9:.3f} | {count} |"
        )
        if name.split(",")[0] in ("forward", "recompute") and "x" not in name and beyond > TEMPORARY_BYTES:
            print(f"MISSED: {name} should hold at most {TEMPORARY_BYTES / 1e9} GB", file=sys.stderr)
            missed = True
    print(
        f"\nthe head's gradient: {head_bytes / 1e9:.3f} GB; the hidden states': {hidden_bytes / 1e9:.3f} GB, and as much again in float32"
    )
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--all", action="store_true", help="run every way here")
    parser.add_argument("--target", choices=sorted(TARGETS), help="compile for this GPU instead of running here")
    options = parser.parse_args()
    return int(compiled(options.target) if options.target else here(options.rounds, every=options.all))


if __name__ == "__main__":
    sys.exit(main())
