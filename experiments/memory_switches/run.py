"""Every memory switch on and off: bytes of Kimi-Linear 48B compiled for 8 H200s, and speed and loss of a small model on this machine.

    python experiments/memory_switches/run.py [switch ...] [--part plan | train] [--out runs/memory_switches]

`plan` compiles the train step of configs/kimi_linear_48b_h200.py with each switch (the `plan` extra; minutes each); `train` trains
`config.py` for 200 steps of real text with each. What is in --out already is not done again. Ends with 1 if a loss curve leaves the others.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
LARGE = FOLDER.parents[1] / "configs" / "kimi_linear_48b_h200.py"
TARGET = "h200x8"
WHOLE_LOSS = ["--losses.chunk_tokens", "1000000", "--losses.chunk_vocab", "1000000"]
LEAN, TIERS = ["--memory.preset", "lean"], "--tiers.optimizer"
SWITCHES: dict[str, tuple[list[str], list[str]]] = {
    "base": (LEAN, []),
    "loss_whole": (LEAN + WHOLE_LOSS, WHOLE_LOSS),
    "loss_recompute": ([*LEAN, "--losses.gradients", "recompute"], ["--losses.gradients", "recompute"]),
    "keep_all": (["--memory.preset", "fast"], []),
    "balanced": (["--memory.preset", "balanced"],) * 2,
    "lean": (LEAN, LEAN),
    "auto": (["--memory.preset", "auto", "--memory.budget_gb", "10"], ["--memory.preset", "auto", "--memory.budget_gb", "0.02"]),
    "offload_inputs": ([*LEAN, "--memory.offload", "layer_input"],) * 2,
    "optimizer_host": ([*LEAN, TIERS, "host"], [TIERS, "host"]),
    "weights_host": ([*LEAN, TIERS, "host", "--tiers.master_weights"], [TIERS, "host"]),
    "optimizer_files": ([], [TIERS, "files"]),
    "rebuild_metadata": ([*LEAN, "--train.rebuild_metadata"], ["--train.rebuild_metadata"]),
}
"""Switch -> what it changes in the large model and in the small one. The large model's base is `lean`, the small one's keeps all."""
SAME, CLOSE = 1e-3, 0.06
"""Nats: between two losses of the first ten steps, and between two means of ten steps later on. Steps are the same up to rounding, which this
model and learning rate let grow: with `lean`, whose sums differ in order alone, from 0 in the first three steps to 0.03 by step 50."""


def plan(name: str, out: pathlib.Path) -> dict[str, float]:
    """Bytes on each device of the large model's step with a switch."""
    file = out / "plan" / f"{name}.json"
    if not file.exists():
        from moejax.config.load import load_config
        from moejax.observe.memory import compiled_bytes
        from moejax.plan.targets import parse
        from moejax.plan.train_step import plan_step

        print(f"compiling {name}", file=sys.stderr, flush=True)
        planned = plan_step(load_config(LARGE, SWITCHES[name][0]), *parse(TARGET))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(compiled_bytes(planned.compiled)))
    return json.loads(file.read_text())


def train(name: str, out: pathlib.Path) -> list[dict[str, Any]]:
    """Metrics of the small model's run with a switch."""
    file = out / "train" / name / "metrics.jsonl"
    read = lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not any("heldout_nats" in line for line in read()):
        print(f"training {name}", file=sys.stderr, flush=True)
        shutil.rmtree(file.parent, ignore_errors=True)
        options = ["--out_dir", str(out / "train"), "--name", name, *SWITCHES[name][1]]
        command = [sys.executable, "-m", "moejax.cli", "train", str(FOLDER / "config.py"), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if not any("heldout_nats" in line for line in read()):  # 200 steps may not beat the Markov model: then a run ends with 1
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
        shutil.rmtree(file.parent / "checkpoints", ignore_errors=True)
    return read()


def losses(lines: list[dict[str, Any]]) -> list[float]:
    """Loss of each step."""
    return [line["loss_nats"] for line in lines if "step_s" in line]


def curve(lines: list[dict[str, Any]]) -> list[float]:
    """Mean loss of each ten steps."""
    return [statistics.fmean(losses(lines)[first : first + 10]) for first in range(0, len(losses(lines)), 10)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("switches", nargs="*", default=list(SWITCHES), help=f"of {', '.join(SWITCHES)}; none: all")
    parser.add_argument("--part", choices=["plan", "train"], help="one part alone")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/memory_switches"), help="folder of what was found")
    options = parser.parse_args()
    if unknown := set(options.switches) - set(SWITCHES):
        parser.error(f"unknown switches {', '.join(sorted(unknown))}; known are {', '.join(SWITCHES)}.")
    names, apart = list(dict.fromkeys(["base", *options.switches])), False
    if options.part != "train":
        print("| switch | temporaries GB | arguments GB | host temporaries GB | a device in all GB |\n| --- | --: | --: | --: | --: |")
        for name in names:
            if SWITCHES[name][0]:
                found = plan(name, options.out)
                cells = [found[f"{part}_bytes"] / 1e9 for part in ("temporaries", "arguments", "host", "total")]
                print(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |", flush=True)
    if options.part != "plan":
        print(
            "| switch | tokens/s | of base | loss apart, steps 1 to 10 | means of ten steps | held-out nats |\n| --- | --: | --: | --: | --: | --: |"
        )
        base, base_losses, base_speed = [], [], 0.0
        for name in names:
            if name != "base" and not SWITCHES[name][1]:
                continue
            lines = train(name, options.out)
            speed = statistics.median(line["tokens_per_s"] for line in lines if "step_s" in line)
            base, base_losses, base_speed = base or curve(lines), base_losses or losses(lines)[:10], base_speed or speed
            first = max(abs(ours - theirs) for ours, theirs in zip(losses(lines)[:10], base_losses, strict=True))
            difference = max(abs(ours - theirs) for ours, theirs in zip(curve(lines), base, strict=True))
            heldout = next(line["heldout_nats"] for line in reversed(lines) if "heldout_nats" in line)
            apart |= first > SAME or difference > CLOSE
            print(f"| {name} | {speed:.0f} | {speed / base_speed:.2f} | {first:.6f} | {difference:.4f} | {heldout:.4f} |", flush=True)
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
