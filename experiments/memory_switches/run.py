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
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).resolve().parent
LARGE = FOLDER.parents[1] / "configs" / "kimi_linear_48b_h200.py"
TARGET = "h200x8"
WHOLE_LOSS = ["--losses.chunk_tokens", "1000000", "--losses.chunk_vocab", "1000000"]
LEAN, TIERS = ["--memory.preset", "lean"], "--tiers.optimizer"
BFLOAT16 = ["--model.precision.compute", "bfloat16"]
WINDOWS = ["--data.windows", "--train.carry_keys", "1024"]


class Switch(NamedTuple):
    """What it changes, and where."""

    large: list[str]
    """Options of the large model, whose base is `lean`; empty: not asked."""
    small: list[str]
    """Of the small one, whose base keeps all; empty, but for `base`: not asked."""
    beside: str = "base"
    """The switch whose losses this one's must be; itself: nothing to compare with."""


SWITCHES = {
    "base": Switch(LEAN, []),
    "loss_whole": Switch(LEAN + WHOLE_LOSS, WHOLE_LOSS),
    "loss_recompute": Switch([*LEAN, "--losses.gradients", "recompute"], ["--losses.gradients", "recompute"]),
    "keep_all": Switch(["--memory.preset", "fast"], []),
    "balanced": Switch(*[["--memory.preset", "balanced"]] * 2),
    "lean": Switch([], LEAN),
    "auto": Switch(["--memory.preset", "auto", "--memory.budget_gb", "10"], ["--memory.preset", "auto", "--memory.budget_gb", "0.02"]),
    "offload_inputs": Switch(*[[*LEAN, "--memory.offload", "layer_input"]] * 2),
    "optimizer_host": Switch([*LEAN, TIERS, "host"], [TIERS, "host"]),
    "optimizer_files": Switch([], [TIERS, "files"]),
    "bfloat16": Switch([], BFLOAT16, "bfloat16"),
    "weights_host": Switch(
        [*LEAN, TIERS, "host", "--tiers.master_weights"], [*BFLOAT16, TIERS, "host", "--tiers.master_weights"], "bfloat16"
    ),
    "rebuild_metadata": Switch([*LEAN, "--train.rebuild_metadata"], ["--train.rebuild_metadata"]),
    "windows": Switch(LEAN + WINDOWS, ["--data.windows", "--train.carry_keys", "256"], "windows"),
}
"""`bfloat16` is what weights on the host need; `windows` trains on batches of its own."""
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
        planned = plan_step(load_config(LARGE, SWITCHES[name].large), *parse(TARGET))
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
        options = ["--out_dir", str(out / "train"), "--name", name, *SWITCHES[name].small]
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


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(our - their) for our, their in zip(ours, theirs, strict=True))


def speed_of(lines: list[dict[str, Any]]) -> float:
    """Median tokens/s of the steps."""
    return statistics.median(line["tokens_per_s"] for line in lines if "step_s" in line)


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
            if SWITCHES[name].large:
                found = plan(name, options.out)
                cells = [found[f"{part}_bytes"] / 1e9 for part in ("temporaries", "arguments", "host", "total")]
                print(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |", flush=True)
    if options.part != "plan":
        print("| switch | tokens/s | of base | beside | loss apart, steps 1 to 10 | means of ten steps | held-out nats |")
        print("| --- | --: | --: | --- | --: | --: | --: |")
        base_speed = speed_of(train("base", options.out))
        for name in names:
            if name != "base" and not SWITCHES[name].small:
                continue
            lines, beside = train(name, options.out), train(SWITCHES[name].beside, options.out)
            first = largest_difference(losses(lines)[:10], losses(beside)[:10])
            means = largest_difference(curve(lines), curve(beside))
            heldout = next(line["heldout_nats"] for line in reversed(lines) if "heldout_nats" in line)
            apart |= first > SAME or means > CLOSE
            speed = speed_of(lines)
            cells = f"{speed:.0f} | {speed / base_speed:.2f} | {SWITCHES[name].beside} | {first:.6f} | {means:.4f} | {heldout:.4f}"
            print(f"| {name} | {cells} |", flush=True)
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
