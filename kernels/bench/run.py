"""Ops against other ways to the same result, forward and backward, on this machine's CPU: one table and one json.

    python kernels/bench/run.py [op ...] [--rounds 5] [--all] [--json FILE]

Times are the best of interleaved rounds: on a shared machine look at ratios within one run, never at times of two runs. CPU time adds up
all threads. Temporaries are XLA's own count for the compiled program.
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

BARRED = {
    "kda": "l2048",
    "gated_delta": "l2048",
    "sparse_attention": "long",
    "grouped_matmul": "skewed",
    "causal_conv": "d1024",
}
"""Start of the names of the cases that have a bar."""
BARS = {
    "kda": [("scan", "speed", 5.0), ("scan", "temporaries", 8.0)],
    "gated_delta": [("scan", "speed", 5.0), ("scan", "temporaries", 8.0)],
    "sparse_attention": [("masked dense attention", "speed", 1.0), ("masked dense attention", "temporaries", 10.0)],
    "grouped_matmul": [("ragged_dot", "speed", 20.0), ("dense matmul", "speed", 0.25)],
    "causal_conv": [("conv_general_dilated", "speed", 1.0)],
}
"""Against which way, in what, ours must be better by which factor."""


def ratios(rows: list[Row]) -> list[dict]:
    """Ours against each other way: how many times as fast (by CPU time and by the clock), and with how many times less memory."""
    ours = [row for row in rows if row.way.startswith("ours")]
    return [
        {
            "op": row.op,
            "case": row.case,
            "ours": mine.way,
            "against": row.way,
            "speed_cpu": row.cpu_s / mine.cpu_s,
            "speed_wall": row.wall_s / mine.wall_s,
            "temporaries": row.temporary_bytes / max(mine.temporary_bytes, 1),
            "bars": {kind: factor for way, kind, factor in BARS[row.op] if way == row.way and row.case.startswith(BARRED[row.op])},
        }
        for row in rows
        for mine in ours
        if row not in ours and (row.op, row.case) == (mine.op, mine.case)
    ]


def table(rows: list[Row], found: list[dict]) -> str:
    lines = [f"{'op':18}{'case':14}{'way':24}{'cpu ms':>10}{'wall ms':>10}{'temp MB':>10}{'out MB':>8}"]
    for row in rows:
        figures = f"{1e3 * row.cpu_s:10.1f}{1e3 * row.wall_s:10.1f}{row.temporary_bytes / 1e6:10.1f}{row.output_bytes / 1e6:8.1f}"
        lines.append(f"{row.op:18}{row.case:14}{row.way:24}{figures}")
    lines.append("")
    for one in found:
        bars = "".join(f"  (asked: {kind} {factor:g})" for kind, factor in one["bars"].items())
        lines.append(
            f"{one['op']} {one['case']}: {one['ours']} against {one['against']}: {one['speed_cpu']:.2f} x by CPU time, "
            f"{one['speed_wall']:.2f} x by the clock, temporaries {one['temporaries']:.1f} x less{bars}"
        )
    return "\n".join(lines)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help=f"of {', '.join(WAYS)}; none: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--all", action="store_true", help="every measured case, not only those with a bar")
    parser.add_argument("--json", help="file to write rows and ratios to; default: standard output after the table")
    options = parser.parse_args(arguments)
    if unknown := set(options.ops) - set(WAYS):
        parser.error(f"unknown ops {', '.join(sorted(unknown))}; known are {', '.join(WAYS)}.")
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for op in options.ops or WAYS:
        for case in importlib.import_module(f"moejax_kernels.{op}.cases").MEASURED:
            if options.all or case.name.startswith(BARRED[op]):
                rows += compare(op, case.name, WAYS[op](case), rounds=options.rounds)
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
