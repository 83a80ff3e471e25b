"""Every op at the shapes of real models on this machine's GPU, beside other libraries where they are installed: one table and one json.

    python kernels/bench/gpu.py [op ...] [--json FILE] [--rounds 5] [--dry-run]

Correctness first: each way's outputs and gradients are set against the same op by XLA in float32, and a way that is off prints no speed.
Rates count the work that the result needs (`calls.py`), not what a kernel does; shares are of the ceiling that this run measured: a
bfloat16 matmul of 8192^3, or a copy of 1 GiB. `--dry-run` needs no GPU: awkward small shapes, checks alone, no speeds.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from calls import CALLS, Call
from moejax_kernels.gated_activation.cases import ActivationCase
from peers import PEERS, from_torch, to_torch

LIMITS = {
    "bfloat16": {"output": 0.005, "gradient": 0.008, "gradient of a decay": 0.02},
    "float32": {"output": 1e-5, "gradient": 1e-4, "gradient of a decay": 1e-4},
}
"""RMS of the error over RMS of the value, by dtype of the activations: rounding of the result, and of what lies between."""
DIFFERENT_IDS = 0.01
"""Share of chosen keys that may differ: sums in another order swap keys whose scores are almost equal."""
MOST = 20e-3
"""Seconds of work that one timing queues up, about."""


@dataclasses.dataclass
class Row:
    """One way at one shape."""

    op: str
    case: str
    way: str
    error: str
    """What is wrong or why it did not run; empty where all is right."""
    ms: dict[str, float] = dataclasses.field(default_factory=dict)
    """"forward" and, where there are gradients, "both" -> milliseconds of a call, median of the rounds."""
    rate: dict[str, float] = dataclasses.field(default_factory=dict)
    """Work per second: FLOP/s or bytes/s."""
    share: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of the ceiling measured in this run."""
    unit: str = ""


def rms_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2)) / max(np.sqrt(np.mean(want**2)), 1e-30))


def different_ids(got, want) -> float:
    """Share of the keys in `want` that `got` has not, query by query; -1 is no key."""
    got, want = (np.asarray(ids).reshape(-1, ids.shape[-1]) for ids in (got, want))
    missing = sum(len(set(theirs) - set(ours) - {-1}) for ours, theirs in zip(got.tolist(), want.tolist(), strict=True))
    return missing / max(int((want >= 0).sum()), 1)


def faults(outputs, grads: dict, truth, dtype: str, *, exact: bool = False) -> str:
    """What is further from the truth than it may be; empty if nothing is. `exact`: integers are no sets of keys, and none may differ."""
    limits, found = LIMITS[dtype], []
    want_outputs, want_grads = truth
    for number, (got, want) in enumerate(zip(outputs, want_outputs, strict=False)):  # a peer may return the first output alone
        if exact and jnp.issubdtype(want.dtype, jnp.integer):
            error, limit = float(np.mean(got != want)), 0.0
        elif jnp.issubdtype(want.dtype, jnp.integer):
            error, limit = different_ids(got, want), DIFFERENT_IDS
        else:
            error, limit = rms_error(got, want), limits["output"]
        if not error <= limit:
            found.append(f"output {number} is off by {error:.2g}, limit {limit:g}")
    for name, got in grads.items():
        limit = limits["gradient of a decay" if name.split("_")[0] in ("g", "beta") else "gradient"]
        if not (error := rms_error(got, want_grads[name])) <= limit:
            found.append(f"gradient of {name} is off by {error:.2g}, limit {limit:g}")
    return "; ".join(found)


def truth_of(call: Call, implementation: str):
    """Outputs and gradients in float32, on the host."""
    wide = lambda array: array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array
    inputs = jax.tree.map(wide, call.inputs)
    return jax.device_get(dataclasses.replace(call, inputs=inputs).program(implementation, backward=bool(call.cotangents))(inputs))


def seconds(run: Callable, wait: Callable, rounds: int) -> float:
    """Median over rounds of the time of one of many queued calls."""
    wait(run())
    began = time.perf_counter()
    wait(run())
    calls = max(1, int(MOST / max(time.perf_counter() - began, 1e-6)))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            out = run()
        wait(out)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


@functools.cache
def ceiling(unit: str) -> float:
    """FLOP/s of a large bfloat16 matmul, or bytes/s of a large copy (read and written)."""
    if unit == "FLOP":
        square, run = jnp.ones((8192, 8192), jnp.bfloat16), jax.jit(lambda x: x @ x)
        work = 2.0 * 8192**3
    else:
        square, run = jnp.ones(2**28, jnp.float32), jax.jit(lambda x: x + 1)
        work = 2.0 * square.nbytes
    return work / seconds(lambda: run(square), jax.block_until_ready, rounds=5)


def ours(call: Call, implementation: str | None):
    """Compiled forward and, where there are gradients, forward and backward, as functions of nothing; outputs and gradients."""
    programs = {"forward": call.program(implementation, backward=False)}
    if call.cotangents:
        programs["both"] = call.program(implementation, backward=True)
    runs = {name: functools.partial(program, call.inputs) for name, program in programs.items()}
    outputs, grads = jax.device_get(runs["both" if call.cotangents else "forward"]())
    return runs, jax.block_until_ready, outputs, grads


def theirs(call: Call, run: Callable):
    """The same of a JAX peer."""
    return ours(dataclasses.replace(call, run=lambda implementation, **inputs: run(**inputs)), None)


def theirs_in_torch(call: Call, run: Callable):
    """The same of a PyTorch peer."""
    import torch

    inputs = {}
    for name, array in call.inputs.items():
        if isinstance(array, jax.Array):
            inputs[name] = to_torch(array, gradient=name in call.floats)
        else:
            inputs[name] = {field.name: to_torch(getattr(array, field.name)) for field in dataclasses.fields(array)}
    wanted = [inputs[name] for name in call.floats]
    first = to_torch(call.cotangents[0]) if call.cotangents else None

    def both():
        outputs = run(**inputs)
        return outputs, torch.autograd.grad(outputs[0], wanted, first.to(outputs[0].dtype))

    def forward():
        with torch.no_grad():
            return run(**inputs)

    def wait(out):
        torch.cuda.synchronize()

    outputs, grads = both()
    named = dict(zip(call.floats, map(from_torch, grads), strict=True))
    return {"forward": forward, "both": both}, wait, [from_torch(outputs[0])], named


def only_first_output(call: Call) -> Call:
    """For peers, whose other outputs differ in form: the truth of the gradients counts the first output alone."""
    if len(call.cotangents) < 2:
        return call
    zeros = tuple(jnp.zeros_like(cotangent) for cotangent in call.cotangents[1:])
    return dataclasses.replace(call, cotangents=(*call.cotangents[:1], *zeros))


def measure(op: str, case, dtype: str, *, implementation, truth_by: str, rounds: int, dry: bool) -> list[Row]:
    """Ours, and each peer of this op."""
    call = CALLS[op](case, jnp.dtype(dtype))
    truth = truth_of(call, truth_by)
    finish = functools.partial(_finish, dtype=dtype, rounds=rounds, dry=dry)
    rows = [finish(Row(op, str(case), "ours", "", unit=call.unit), call, ours(call, implementation), truth)]
    if dry:
        return rows
    alone = only_first_output(call)
    truth = truth if alone is call else truth_of(alone, truth_by)
    for peer in PEERS.get(op, []):
        row = Row(op, str(case), peer.library, f"not run: {peer.missing}" if peer.missing else "", unit=call.unit)
        if row.error:
            rows.append(row)
            continue
        try:
            run = peer.build(case)
            started = run and (theirs_in_torch if peer.torch else theirs)(alone, run)
        except Exception as error:  # any library may raise anything: the row says what, and the other rows stay
            row.error = f"not run: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            rows.append(row)
            continue
        if started:
            rows.append(finish(row, alone, started, truth))
    return rows


def _finish(row: Row, call: Call, started, truth, *, dtype: str, rounds: int, dry: bool) -> Row:
    """Checks what a way computed, and times it if that is right."""
    runs, wait, outputs, grads = started
    row.error = faults(outputs, grads, truth, dtype, exact=call.exact)
    if row.error or dry:
        return row
    for name, run in runs.items():
        took = seconds(run, wait, rounds)
        row.ms[name] = 1e3 * took
        row.rate[name] = (call.forward + (call.backward if name == "both" else 0)) / took
        row.share[name] = row.rate[name] / ceiling(call.unit)
    return row


def table(rows: list[Row], *, dry: bool) -> str:
    lines = [f"{'op':18}{'case':28}{'way':16}{'forward ms':>12}{'both ms':>10}{'forward':>14}{'both':>14}{'share':>14}"]
    for row in rows:
        head = f"{row.op:18}{row.case:28}{row.way:16}"
        if row.error or dry:
            lines.append(head + (row.error or "right; no speeds in a dry run"))
            continue
        name, size = ("TFLOP/s", 1e12) if row.unit == "FLOP" else ("GB/s", 1e9)
        ms = [f"{row.ms[part]:.3f}" if part in row.ms else "-" for part in ("forward", "both")]
        rates = [f"{row.rate[part] / size:.0f} {name}" if part in row.rate else "-" for part in ("forward", "both")]
        share = " / ".join(f"{share:.0%}" for share in row.share.values())
        lines.append(head + f"{ms[0]:>12}{ms[1]:>10}{rates[0]:>14}{rates[1]:>14}{share:>14}")
    return "\n".join(lines)


def cases_of(op: str, *, dry: bool) -> list:
    folder = {"unpermute": "permute", "logit_sums": "logits", "logit_gradients": "logits"}.get(op, op)
    module = importlib.import_module(f"moejax_kernels.{folder}.cases")
    if dry and op == "gated_activation":  # its small cases are kinds alone
        return [
            ActivationCase(f"{options['kind']} {number}", 24, 40, tuple(options.items())) for number, options in enumerate(module.SMALL)
        ]
    return list(module.SMALL[-2:] if dry else module.REAL)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help=f"of {', '.join(CALLS)}; none: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file to write the rows to; default: standard output after the table")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU: small shapes, checks and no speeds")
    options = parser.parse_args(arguments)
    if unknown := set(options.ops) - set(CALLS):
        parser.error(f"unknown ops {', '.join(sorted(unknown))}; known are {', '.join(CALLS)}.")
    dry = options.dry_run
    if dry:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        parser.error(f"JAX runs on {jax.default_backend()} here, and speeds need a GPU; --dry-run checks everything without one.")
    settings = {"implementation": "xla", "truth_by": "reference"} if dry else {"implementation": None, "truth_by": "xla"}
    rows = []
    for op in options.ops or CALLS:
        for case in cases_of(op, dry=dry):
            rows += measure(op, case, "float32" if dry else "bfloat16", rounds=options.rounds, dry=dry, **settings)
    report = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "ceilings": {} if dry else {unit: ceiling(unit) for unit in ("FLOP", "B")},
        "rows": [*map(dataclasses.asdict, rows)],
    }
    print(table(rows, dry=dry))
    if options.json is None:
        print(json.dumps(report))
    else:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return int(any(row.error and not row.error.startswith("not run") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
