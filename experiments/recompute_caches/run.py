"""FLOPs and temporaries of prompts shared between microbatches, and of frozen lower layers, read from the compiled gradients.

JAX_PLATFORMS=cpu python experiments/recompute_caches/run.py       # prints the tables of the README
"""

import functools

import jax
import numpy as np

from moejax.config.mixers import GQAConfig
from moejax.config.model import ModelConfig
from moejax.config.training import LossConfig
from moejax.data.batch import Batch
from moejax.model import language_model
from moejax.model.objective import switches_for
from moejax.model.transformer import Below
from moejax.parallel.mesh import mesh_from
from moejax.train.prefix import prefix_gradients
from moejax.train.step import gradients

ROWS, PROMPT, ANSWER, ANSWERS, LAYERS = 2, 192, 16, 4, 4
MODEL = ModelConfig(
    vocab_size=512,
    width=256,
    num_layers=LAYERS,
    mixers=("gqa",),
    feed_forwards=("dense",),
    dense_hidden=768,
    gqa=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=64),
    scan_layers=False,
)
"""No loop that runs more than once: a program's FLOPs count each loop's body once. Rows are short enough for one tile of attention."""
LOSSES = LossConfig()


def batch(length: int, *, start: int = 0, leading: tuple[int, ...] = ()):
    """Random tokens, one document a row."""
    rng = np.random.default_rng(0)
    one = Batch.build(rng.integers(0, 512, (ROWS, length)), np.zeros((ROWS, length), int), start_B=np.full(ROWS, start))
    return jax.tree.map(lambda array: np.broadcast_to(array, (*leading, *array.shape)), one)


def cost(run, *args) -> tuple[float, float]:
    """FLOPs and bytes of temporaries of a compiled function; LLVM's optimisations change neither."""
    compiled = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0}).lower(*args).compile()
    memory = compiled.memory_analysis()
    return compiled.cost_analysis()["flops"], memory.temp_size_in_bytes


def shared(way: str | None, lowest: int, params) -> tuple[float, float]:
    """Of the gradients of all answers; way None: each answer behind its own copy of the prompt."""
    if way is None:
        whole = batch(PROMPT + ANSWER)
        one = lambda params: gradients(MODEL, LOSSES, params, jax.tree.map(lambda array: array[None], whole), switches_for(LOSSES))[:2]
        flops, temporaries = cost(one, params)
        return ANSWERS * flops, temporaries  # one microbatch after the other
    run = functools.partial(
        prefix_gradients,
        MODEL,
        LOSSES,
        switches=switches_for(LOSSES, past_keys=PROMPT),
        way=way,
        shared=lambda _, place: int(place) >= lowest,
        unroll=ANSWERS,
    )
    # arguments, not constants: equal microbatches would be computed once
    prompt, answers = batch(PROMPT), batch(ANSWER, start=PROMPT, leading=(ANSWERS,))
    return cost(lambda params, prompt, answers: run(params, prefix=prompt, batches=answers)[:2], params, prompt, answers)


def frozen(num_frozen: int, use_cache: bool, params) -> tuple[float, float]:
    """Of the gradients of the layers that learn, and the output projection."""
    learns = lambda names: names[0] in ("final_norm", "unembed") or (names[0] == "head" and int(names[1]) >= num_frozen)
    rows = batch(PROMPT + ANSWER)

    def run(params, value):
        below = Below(value, num_frozen) if use_cache else None
        grads = gradients(MODEL, LOSSES, params, jax.tree.map(lambda array: array[None], rows), switches_for(LOSSES), below=below)[1]
        return [grad for path, grad in jax.tree_util.tree_leaves_with_path(grads) if learns([step.key for step in path])]

    value = jax.eval_shape(lambda params: language_model.lower(MODEL, params, rows, num_stages=num_frozen), params)
    return cost(run, params, value)


def main() -> None:
    params = language_model.shapes(MODEL)
    with jax.set_mesh(mesh_from()):
        print("| way | layers that share | GFLOP | of written out | temporaries, MB |\n|---|---|---|---|---|")
        plain, temporaries = shared(None, 0, params)
        print(f"| written out | | {plain / 1e9:.2f} | 1.000 | {temporaries / 1e6:.1f} |", flush=True)
        for way, lowest in (("once", 0), ("once", 2), ("each", 0), ("rebuild", 0)):
            flops, temporaries = shared(way, lowest, params)
            print(f"| {way} | {LAYERS - lowest} of {LAYERS} | {flops / 1e9:.2f} | {flops / plain:.3f} | {temporaries / 1e6:.1f} |")
        print("\n| frozen layers | GFLOP | with the cache | ratio |\n|---|---|---|---|")
        for num_frozen in range(1, LAYERS):
            without, with_cache = (frozen(num_frozen, use_cache, params)[0] for use_cache in (False, True))
            print(f"| {num_frozen} of {LAYERS} | {without / 1e9:.2f} | {with_cache / 1e9:.2f} | {with_cache / without:.3f} |")


if __name__ == "__main__":
    main()
