"""Trains `config.py` once for each switch of the MoE layer, one run after the other, and prints a table of what each one brings.

    python experiments/moe_switches/run.py [variant ...] [--out runs/moe_switches]

A variant whose metrics.jsonl is complete is not trained again; one that was interrupted begins anew or at its checkpoint.
"""

import argparse
import pathlib
import shutil
import statistics
import subprocess
import sys

from moejax.config.load import load_config
from moejax.config.model import ModelConfig
from moejax.observe.metrics import FILE_NAME, read

CONFIG = pathlib.Path(__file__).resolve().parent / "config.py"
LAST = 50
"""Steps at the end over which metrics are averaged."""
ROUTER, ADAPTIVE, COPIES = "--model.moe.router.", "--model.moe.adaptive.", "--model.moe.copies."
BIAS = [f"{ROUTER}correction_bias"]
TIGHT = ["--model.moe.capacity_factor", "1.0"]
VARIANTS = {
    "none": [],
    "aux_switch": ["--losses.balance", "switch"],
    "aux_global": ["--losses.balance", "global"],
    "bias_sign": [*BIAS, "--losses.bias_update", "sign"],
    "bias_quantile": [*BIAS, "--losses.bias_update", "quantile"],
    "soft_constraint": [f"{ROUTER}overload_strength", "1.0"],
    "capacity": TIGHT,
    "similar": [*TIGHT, "--model.moe.overflow", "similar"],
    "adaptive": [*TIGHT, f"{ADAPTIVE}highest", "4.0"],
    "copies": [f"{COPIES}gain", "0.05"],
    "copies_move": [f"{COPIES}gain", "0.05", f"{COPIES}move"],
    "none_seed_1": ["--train.seed", "1"],
}
"""Name of a run -> what it changes."""
COLUMNS = {
    "switch": "---",
    "expert load": "--:",
    "device load": "--:",
    "rows dropped %": "--:",
    "weight dropped %": "--:",
    "of it taken over %": "--:",
    "weight damped %": "--:",
    "capacity factor": "--:",
    "held-out nats": "--:",
    "against none": "--:",
}


def is_complete(folder: pathlib.Path) -> bool:
    """Whether a run got to its held-out loss."""
    return (folder / FILE_NAME).exists() and any("markov_nats" in line for line in read(folder))


def train(name: str, out: pathlib.Path) -> None:
    """One run; it may end with 1, since 300 steps do not suffice for every variant to beat the Markov model."""
    options = ["--out_dir", str(out), "--name", name, *VARIANTS[name]]
    done = subprocess.run([sys.executable, "-m", "moejax.cli", "train", str(CONFIG), *options], capture_output=True, text=True)
    if not is_complete(out / name):
        raise RuntimeError(f"{' '.join(done.args)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    shutil.rmtree(out / name / "checkpoints")


def figures(folder: pathlib.Path, model: ModelConfig) -> dict[str, float]:
    """Means over the last steps; shares of routed rows and of the weight that tokens give out."""
    lines = read(folder)
    steps = [line for line in lines if "step_s" in line][-LAST:]
    mean = lambda metric: statistics.fmean(line[metric] for line in steps if metric in line)
    share = lambda metric, whole: mean(metric) / whole if metric in steps[-1] else 0.0
    layers_tokens = model.num_layers * mean("tokens")
    lost = share("dropped_weight", layers_tokens)
    return {
        "expert": mean("expert_load_max_over_mean"),
        "device": mean("device_load_before"),
        "rows": share("dropped_rows", layers_tokens * model.moe.experts_per_token),
        "lost": lost,
        "given": share("dropped_weight_given", layers_tokens) / lost if lost else 0.0,
        "damped": share("overloaded_weight", layers_tokens),
        "capacity": share("capacity_factor_mean", 1),
        "heldout": lines[-1]["heldout_nats"],
    }


def row(name: str, found: dict[str, float], base: dict[str, float]) -> str:
    """A line of the table; empty where a switch has nothing to say."""
    percent = lambda value: f"{100 * value:.1f}" if value else ""
    fixed = "1.00" if TIGHT[0] in VARIANTS[name] else ""
    cells = [
        name,
        f"{found['expert']:.2f}",
        f"{found['device']:.2f}",
        *(percent(found[key]) for key in ("rows", "lost", "given", "damped")),
        f"{found['capacity']:.2f}" if found["capacity"] else fixed,
        f"{found['heldout']:.4f}",
        f"{found['heldout'] - base['heldout']:+.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=list(VARIANTS), help=f"of {', '.join(VARIANTS)}; none: all")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/moe_switches"), help="folder of the runs")
    options = parser.parse_args()
    if unknown := set(options.variants) - set(VARIANTS):
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; known are {', '.join(VARIANTS)}.")
    model, failed = load_config(CONFIG).model, {}
    for name in dict.fromkeys(["none", *options.variants]):
        if not is_complete(options.out / name):
            print(f"training {name}", file=sys.stderr, flush=True)
            try:
                train(name, options.out)
            except RuntimeError as error:
                failed[name] = error
    print(f"| {' | '.join(COLUMNS)} |\n| {' | '.join(COLUMNS.values())} |")
    base = figures(options.out / "none", model)
    for name in VARIANTS:
        if is_complete(options.out / name):
            print(row(name, figures(options.out / name, model), base))
    if failed:
        raise SystemExit("\n".join(str(error) for error in failed.values()))


if __name__ == "__main__":
    main()
