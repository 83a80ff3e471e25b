"""One train step on 8 answers of 64 tokens to a prompt of 1,024, with the prompt computed once and with every answer's own.

    JAX_PLATFORMS=cpu python experiments/shared_prefixes/run.py [--rounds 5]

Both batches come from the loader: the same jsonl file of prompts (Python's standard library) and answers, `data.share_prefixes` off and on.
Loss and gradients of a first step are compared, then the steps run in turn, and each keeps its best round. Before that the loader alone makes
batches of 16 rows of 8,192 tokens, both ways. Ends with 1 when a bar is missed.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from moejax.config.data import DataConfig, SourceConfig
from moejax.config.mixers import GQAConfig, KDAConfig, MLAConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.config.training import LossConfig, OptimConfig, TrainConfig
from moejax.data.batch import Batch
from moejax.data.loader import Loader
from moejax.data.sources import stdlib
from moejax.parallel.mesh import mesh_from
from moejax.train.placement import place_batch
from moejax.train.program import make_program
from moejax.train.state import init_state

PROMPT, ANSWER, ANSWERS, PROMPTS = 1024, 64, 8, 40
MOST_TOKENS, LEAST_SPEED = 0.25, 2.5
"""Bars: computed tokens relative to the batch written out, and how many times as fast the step must be."""
LOADED_PROMPTS = 400
"""Of the file from which loading is timed: more than a few batches hold, or the same documents would meet again."""
TOLERANCE = 2e-4
"""Of the loss, and of each moment's peak: float32 sums of thousands of terms in another order; in float64 tests/unit/test_shared_prefixes.py sees 1e-9."""
MODEL = ModelConfig(
    width=128,
    num_layers=4,
    mixers=("kda", "kda", "gqa", "mla"),
    kda=KDAConfig(num_heads=4, key_dim=32, value_dim=32),
    gqa=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=32),
    mla=MLAConfig(num_heads=4, kv_lora_rank=32, nope_dim=32, rope_dim=16, value_dim=32),
    moe=MoEConfig(
        num_experts=16, experts_per_token=4, hidden=64, shared_hidden=64, router=RouterConfig(score="sigmoid", correction_bias=True)
    ),
    precision=PrecisionConfig(params="float32", compute="float32"),
)
LOSSES = LossConfig(balance="sequence", balance_coef=1e-2, router_z_coef=1e-3, bias_update="sign")


@dataclasses.dataclass
class Way:
    """A batch and its step."""

    batch: Batch
    step: Any = None
    state: Any = None
    placed: Any = None
    wall_s: float = float("inf")

    def computed_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.batch.segments.ids_BL >= 0).sum())


def write_prompts(path: pathlib.Path, num_prompts: int) -> None:
    """A record for each answer; the answers to one prompt stand together. Bytes, all of them ASCII."""
    files = stdlib()
    texts = (files[number].text for number in range(len(files)))
    long = [text for text in texts if len(text) >= PROMPT + ANSWERS * ANSWER and text.isascii()][:num_prompts]
    with path.open("w") as file:
        for text in long:
            rest = text[PROMPT:]
            for number in range(ANSWERS):
                file.write(json.dumps({"text": text[:PROMPT] + rest[number * ANSWER :][:ANSWER]}) + "\n")


def first_batch(path: pathlib.Path, *, share: bool) -> Batch:
    """All answers to one prompt: a row each, or one row that has just the room."""
    written = DataConfig(
        sources=(SourceConfig(kind="jsonl", path=str(path)),),
        seq_len=PROMPT + ANSWER,
        batch_size=ANSWERS,
        shuffle_block=ANSWERS,
    )
    # the stem has the prompt less its last token, with which every answer begins; one segment each, and one for padding
    shared = dataclasses.replace(
        written, share_prefixes=True, seq_len=PROMPT - 1 + ANSWERS * (ANSWER + 1), batch_size=1, row_segments=ANSWERS + 2
    )
    with contextlib.closing(Loader(shared if share else written, split="train")) as loader:
        return next(loader)


def loading(path: pathlib.Path, rounds: int, *, num_batches: int = 8) -> str:
    """Table of the loader's best time per batch, both ways; prefetched batches are made within the time of others."""
    source = SourceConfig(kind="jsonl", path=str(path))
    written = DataConfig(sources=(source,), seq_len=8192, batch_size=16, shuffle_block=ANSWERS)
    shared = dataclasses.replace(written, share_prefixes=True, row_segments=64)
    lines = ["| loader | documents a batch | ms a batch | ms a document |", "|---|---|---|---|"]
    for name, config in (("written out", written), ("shared", shared)):
        best_s, num_documents = float("inf"), 0
        with contextlib.closing(Loader(config, split="train")) as loader:
            next(loader)
            for _ in range(rounds):
                began_s = time.perf_counter()
                batches = [next(loader) for _ in range(num_batches)]
                wall_s = (time.perf_counter() - began_s) / num_batches
                if wall_s < best_s:
                    # a document's first token stands in every document of its tree
                    firsts = sum(int((batch.segments.multiplicity() * (batch.segments.previous_BL < 0)).sum()) for batch in batches)
                    best_s, num_documents = wall_s, firsts / num_batches
        lines.append(f"| {name} | {num_documents:.0f} | {1e3 * best_s:.0f} | {1e3 * best_s / num_documents:.2f} |")
    return "\n".join(lines)


def documents(batch: Batch) -> list[bytes]:
    """Every document written out, sorted."""
    found = []
    before_BL, ids_BL = batch.segments.previous_BL, batch.segments.ids_BL
    for row, before_L in enumerate(before_BL):
        for end in set(np.flatnonzero(ids_BL[row] >= 0)) - set(before_L):
            way = [end]
            while before_L[way[-1]] >= 0:
                way.append(before_L[way[-1]])
            found.append(bytes(batch.tokens_BL[row, way[::-1]].astype(np.uint8)))
    return sorted(found)


def first_step(ways: dict[str, Way]) -> tuple[float, float]:
    """How far the losses lie apart, relative, and after the step Adam's moments, relative to each tensor's peak: gradients and their squares."""
    losses, moments = [], []
    for way in ways.values():
        way.state, out = way.step(way.state, way.placed)
        losses.append(float(out.scalars["objective"]))
        moments.append(jax.device_get(way.state.opt_state))
    peak = lambda got, want: float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))
    return abs(losses[1] / losses[0] - 1), max(jax.tree.leaves(jax.tree.map(peak, moments[1], moments[0])))


def measure(ways: dict[str, Way], rounds: int) -> None:
    for _ in range(rounds):
        for way in ways.values():
            began_s = time.perf_counter()
            way.state, out = way.step(way.state, way.placed)
            jax.block_until_ready((way.state, out.scalars))
            way.wall_s = min(way.wall_s, time.perf_counter() - began_s)


def table(ways: dict[str, Way]) -> str:
    lines = ["| batch | rows x tokens | computed tokens | temporaries MB | step ms |", "|---|---|---|---|---|"]
    for name, way in ways.items():
        rows, length = way.batch.tokens_BL.shape
        temporaries = way.step.memory_analysis().temp_size_in_bytes
        lines.append(f"| {name} | {rows} x {length} | {way.computed_tokens()} | {temporaries / 1e6:.0f} | {1e3 * way.wall_s:.0f} |")
    return "\n".join(lines)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "answers.jsonl"
        write_prompts(path, LOADED_PROMPTS)
        print(loading(path, options.rounds), end="\n\n", flush=True)
        write_prompts(path, PROMPTS)
        ways = {"written out": Way(first_batch(path, share=False)), "shared": Way(first_batch(path, share=True))}
    if documents(ways["shared"].batch) != documents(ways["written out"].batch):
        print("the two batches hold other documents")
        return 1
    mesh = mesh_from()
    program = make_program(MODEL, LOSSES, OptimConfig(warmup_steps=0), TrainConfig())
    with jax.set_mesh(mesh):
        for way in ways.values():
            way.placed = place_batch(way.batch, mesh, accumulation=1)
            way.state = init_state(MODEL, program.optimizer, mesh, 0)
            way.step = program.lower(way.state, way.placed).compile()
        loss, moment = first_step(ways)
        print(f"loss differs by {loss:.1e}, moments by at most {moment:.1e} of the peak", flush=True)
        measure(ways, options.rounds)
    print(table(ways))
    tokens = ways["shared"].computed_tokens() / ways["written out"].computed_tokens()
    speed = ways["written out"].wall_s / ways["shared"].wall_s
    print(f"tokens    {tokens:.3f} of those written out (bar {MOST_TOKENS}): {'met' if tokens <= MOST_TOKENS else 'MISSED'}")
    print(f"speed     {speed:.2f} times as fast (bar {LEAST_SPEED}): {'met' if speed >= LEAST_SPEED else 'MISSED'}")
    return int(tokens > MOST_TOKENS or speed < LEAST_SPEED or max(loss, moment) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
