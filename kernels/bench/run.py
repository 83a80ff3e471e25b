"""Ops against other ways to the same result, forward and backward, on this machine's CPU: one table and one json.

    python kernels/bench/run.py [op ...] [--rounds 5] [--seconds 20] [--all] [--json FILE]

Times are the best of interleaved rounds: on a shared machine look at ratios within one run, never at times of two runs. CPU time adds up
all threads. Temporaries are XLA's own count for the compiled program. Where a bar is set, it is the time on the clock (`speed_wall`) and
the temporaries that are judged; a missed bar is marked and makes the command exit with 1.
"""

import argparse
import dataclasses
import importlib
import json
import platform
import sys

import jax
from measure import Row, compare
from ways import WAYS

SHOWN = {
    "kda": "l2048",
    "gated_delta": "l2048",
    "sparse_attention": "long",
    "grouped_matmul": "skewed",
    "grouped_mlp": "skewed_64",
    "causal_conv": "d1024",
}
"""Start of the names of the cases that run without `--all`."""
RESULTS = "its own results"
"""Against which the temporaries of a case with hundreds of groups are measured."""
BARS = {
    ("kda", "l2048"): [("scan", "speed_wall", 5.0), ("scan", "temporaries", 8.0)],
    ("gated_delta", "l2048"): [("scan", "speed_wall", 5.0), ("scan", "temporaries", 8.0)],
    ("sparse_attention", "long"): [("masked dense attention", "speed_wall", 1.0), ("masked dense attention", "temporaries", 10.0)],
    ("grouped_matmul", "skewed_64"): [("ragged_dot", "speed_wall", 20.0), ("dense matmul", "speed_wall", 0.25)],
    ("grouped_matmul", "skewed_896"): [(RESULTS, "temporaries", 1 / 3)],
    ("causal_conv", "d1024"): [("conv_general_dilated", "speed_wall", 1.0)],
}
"""Op and start of the case's name -> against what, in what, ours must be better by at least which factor."""


def bars(op: str, case: str, against: str) -> dict[str, float]:
    return {
        kind: factor
        for (of, start), some in BARS.items()
        for way, kind, factor in some
        if of == op and case.startswith(start) and way == against
    }


def ratios(rows: list[Row]) -> list[dict]:
    """Ours against each other way: how many times as fast (by CPU time and by the clock), and with how many times less memory."""
    found = []
    for mine in (row for row in rows if row.way.startswith("ours")):
        head = {"op": mine.op, "case": mine.case, "ours": mine.way}
        held = max(mine.temporary_bytes, 1)
        for row in rows:
            if (row.op, row.case) == (mine.op, mine.case) and not row.way.startswith("ours"):
                speeds = {"speed_cpu": row.cpu_s / mine.cpu_s, "speed_wall": row.wall_s / mine.wall_s}
                found.append({**head, "against": row.way, **speeds, "temporaries": row.temporary_bytes / held})
        if bars(mine.op, mine.case, RESULTS):
            found.append({**head, "against": RESULTS, "temporaries": mine.output_bytes / held})
    for one in found:
        one["bars"] = bars(one["op"], one["case"], one["against"])
        one["missed"] = [kind for kind, factor in one["bars"].items() if one[kind] < factor]
    return found


def table(rows: list[Row], found: list[dict]) -> str:
    lines = [f"{'op':18}{'case':14}{'way':24}{'cpu ms':>10}{'wall ms':>10}{'temp MB':>10}{'out MB':>8}"]
    for row in rows:
        figures = f"{1e3 * row.cpu_s:10.1f}{1e3 * row.wall_s:10.1f}{row.temporary_bytes / 1e6:10.1f}{row.output_bytes / 1e6:8.1f}"
        lines.append(f"{row.op:18}{row.case:14}{row.way:24}{figures}")
    lines.append("")
    for one in found:
        speeds = f"{one['speed_cpu']:.2f} x by CPU time, {one['speed_wall']:.2f} x by the clock, " if "speed_wall" in one else ""
        asked = "".join(f"  ({'MISSED' if kind in one['missed'] else 'met'}: {kind} {factor:.3g})" for kind, factor in one["bars"].items())
        lines.append(
            f"{one['op']} {one['case']}: {one['ours']} against {one['against']}: {speeds}temporaries {one['temporaries']:.1f} x less{asked}"
        )
    return "\n".join(lines)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help=f"of {', '.join(WAYS)}; none: all")
    parser.add_argument("--rounds", type=int, default=5, help="at least, of each case")
    parser.add_argument("--seconds", type=float, default=20.0, help="at least, for each case")
    parser.add_argument("--all", action="store_true", help="every measured case")
    parser.add_argument("--json", help="file to write rows and ratios to; default: standard output after the table")
    options = parser.parse_args(arguments)
    if unknown := set(options.ops) - set(WAYS):
        parser.error(f"unknown ops {', '.join(sorted(unknown))}; known are {', '.join(WAYS)}.")
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for op in options.ops or WAYS:
        for case in importlib.import_module(f"moejax_kernels.{op}.cases").MEASURED:
            if options.all or case.name.startswith(SHOWN[op]):
                rows += compare(op, case.name, WAYS[op](case), rounds=options.rounds, seconds=options.seconds)
    found = ratios(rows)
    report = {
        "jax": jax.__version__,
        "machine": platform.processor() or platform.machine(),
        "rows": [*map(dataclasses.asdict, rows)],
        "ratios": found,
    }
    print(table(rows, found))
    if options.json is None:
        print(json.dumps(report))
    else:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return int(any(one["missed"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
