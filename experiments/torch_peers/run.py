"""moejax against transformers' models of the same sizes in PyTorch on the CPU: tokens a second, in pairs that follow each other.

    python experiments/torch_peers/run.py --torch-python PYTHON [family ...] [--pairs 5] [--steps 14] [--torch-steps 7]

PYTHON is an interpreter with torch and transformers. Each side is a process of its own and has the machine's cores for itself; what other
programs do meanwhile hits both sides of a pair about alike. The first step of a process, which compiles or fetches memory, does not count.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from typing import NoReturn

FOLDER = pathlib.Path(__file__).resolve().parent
CONFIGS = FOLDER.parents[1] / "configs"
FAMILIES = ("qwen3_moe", "kimi_linear")


def speed(tokens: int, step_s: list[float]) -> float:
    """Tokens a second at the median step, the first left out."""
    return tokens / statistics.median(step_s[1:])


def ours(family: str, steps: int) -> tuple[int, float]:
    """Parameters and tokens a second of `moejax train`."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--train.steps", str(steps), "--out_dir", folder, "--observe.no-tensorboard"]
        done = _run([sys.executable, "-m", "moejax.cli", "train", str(CONFIGS / f"{family}_small_cpu.py"), *options])
        text = "".join(path.read_text() for path in pathlib.Path(folder).glob("*/metrics.jsonl"))
    lines = [line for line in map(json.loads, text.splitlines()) if "step_s" in line]
    if len(lines) < steps:  # a run that has all its steps fails too, having learnt less than the baseline: these are for measuring
        _give_up(done)
    (parameters,) = re.findall(r"^weights +([\d,]+) parameters", done.stdout, re.MULTILINE)
    return int(parameters.replace(",", "")), speed(int(lines[-1]["tokens"]), [line["step_s"] for line in lines])


def theirs(python: str, family: str, steps: int) -> tuple[int, float]:
    """Parameters and tokens a second of transformers, in PyTorch's own environment: glibc's huge pages are moejax's setting."""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = _run([python, str(FOLDER / "peer.py"), family, "--steps", str(steps)], env=environment)
    if done.returncode:
        _give_up(done)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["parameters"], speed(found["tokens"], found["step_s"])


def _run(command: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, **options)


def _give_up(done: subprocess.CompletedProcess) -> NoReturn:
    raise SystemExit(f"{' '.join(done.args)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES, help=f"of {', '.join(FAMILIES)}; none: all")
    parser.add_argument("--torch-python", required=True, help="an interpreter with torch and transformers")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=14, help="of moejax")
    parser.add_argument("--torch-steps", type=int, default=7, help="of transformers, whose steps take longer")
    options = parser.parse_args()
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"unknown families {', '.join(sorted(unknown))}; known are {', '.join(FAMILIES)}.")
    if min(options.steps, options.torch_steps) < 2:
        parser.error("the first step does not count: give --steps and --torch-steps at least 2.")
    for family in options.families:
        ratios = []
        for pair in range(options.pairs):
            (our_size, our_speed), (their_size, their_speed) = (
                ours(family, options.steps),
                theirs(options.torch_python, family, options.torch_steps),
            )
            if pair == 0:
                print(f"{family}: {our_size:,} parameters here, {their_size:,} there", flush=True)
            ratios.append(our_speed / their_speed)
            print(f"{family}: {our_speed:,.0f} against {their_speed:,.0f} tokens/s, {ratios[-1]:.2f} x", flush=True)
        print(f"{family}: median of {len(ratios)} pairs {statistics.median(ratios):.2f} x", flush=True)


if __name__ == "__main__":
    main()
