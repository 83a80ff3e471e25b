"""kernels/bench: what is compared gives the same values and gradients, and the report says who is how much faster."""

import dataclasses

import jax
import numpy as np
import pytest
from moejax_kernels.causal_conv.cases import ConvCase
from moejax_kernels.delta_cases import DeltaCase
from moejax_kernels.grouped_matmul.cases import GroupedCase
from moejax_kernels.grouped_mlp.cases import MLPCase
from scripts import scripts


@pytest.fixture
def bench():
    with scripts("kernels/bench", "measure", "ways", "run") as modules:
        yield modules


SAME = {
    "kda": (DeltaCase("tiny", 1, None, 2, 2, 4, 4, length=64), {"ours", "ours, g >= -5", "plain chunks", "scan"}),
    "gated_delta": (DeltaCase("tiny", 1, None, 2, 2, 4, 4, length=64), {"ours", "plain chunks", "scan"}),
    "grouped_matmul": (GroupedCase("tiny", 40, 5, 7, (0, 13, 0, 0, 27, 0)), {"ours", "ragged_dot"}),
    "grouped_mlp": (MLPCase("tiny", 40, 5, 7, (0, 13, 0, 0, 27, 0)), {"ours", "separate ops"}),
    "causal_conv": (ConvCase("tiny", 2, None, 3, length=9), {"ours", "conv_general_dilated"}),
}


@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.slow if op == "gated_delta" else ()) for op in SAME])
def test_all_ways_give_the_same(bench, op):
    case, names = SAME[op]
    ways = bench[1].WAYS[op](case)
    assert names <= set(ways)
    want = None
    for name in sorted(names):
        compiled, arguments = ways[name]
        got = jax.tree.map(np.asarray, compiled(*arguments))
        want = got if want is None else want
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * max(np.abs(theirs).max(), 1e-3))  # float32, sums of some hundreds


def test_the_report_sets_ours_against_the_others_of_its_case(bench):
    measure, _, run = bench
    row = lambda case, way, seconds, temporaries: measure.Row("kda", case, way, temporaries, 10, seconds, 2 * seconds)
    rows = [dataclasses.replace(row("l2048", "ours", 9.0, 9), op="gated_delta")]  # another op's: in no ratio of these
    rows += [row("l2048", "ours", 1.0, 100), row("l2048", "scan", 6.0, 1600), row("other", "ours", 3.0, 7), row("other", "scan", 3.0, 7)]
    first, second = found = run.ratios(rows)
    assert (first["case"], first["speed_cpu"], first["speed_wall"], first["temporaries"]) == ("l2048", 6.0, 6.0, 16.0)
    assert first["bars"] == {"speed_wall": 5.0, "temporaries": 8.0}
    assert (second["case"], second["speed_cpu"], second["bars"]) == ("other", 1.0, {})
    assert "ours against scan: 6.00 x by CPU time" in run.table(rows, found)


@pytest.mark.parametrize(("wall_s", "missed"), [(6.0, 0), (4.9, 1)])
def test_a_bar_that_is_missed_on_the_clock_is_named_and_fails(bench, monkeypatch, tmp_path, capsys, wall_s, missed):
    measure, _, run = bench
    rows = [measure.Row("kda", "l2048", "ours", 100, 10, 1.0, 1.0), measure.Row("kda", "l2048", "scan", 1600, 10, 9.0, wall_s)]
    monkeypatch.setattr(run, "compare", lambda *args, **options: rows)
    monkeypatch.setitem(run.WAYS, "kda", lambda case: {})
    assert run.main(["kda", "--json", str(tmp_path / "rows.json")]) == missed
    printed = capsys.readouterr().out
    assert ("(MISSED: speed_wall 5)" in printed) == bool(missed) and "(met: temporaries 8)" in printed


def test_temporaries_of_many_groups_are_judged_by_the_results(bench):
    measure, _, run = bench
    row = lambda temporaries: measure.Row("grouped_matmul", "skewed_896", "ours", temporaries, 100, 1.0, 1.0)
    assert [run.ratios([row(temporaries)])[0]["missed"] for temporaries in (300, 301)] == [[], ["temporaries"]]


def test_rounds_are_interleaved_and_the_best_counts(bench):
    measure, _, _ = bench
    calls = []

    class Compiled:
        def __init__(self, name):
            self.name = name

        def memory_analysis(self):
            return type("Memory", (), {"temp_size_in_bytes": 3, "output_size_in_bytes": 4})

        def __call__(self):
            calls.append(self.name)
            return np.zeros(1)

    ways = {name: (Compiled(name), ()) for name in "ab"}
    rows = measure.compare("op", "case", ways, rounds=2)
    assert calls == ["a", "a", "b", "b"] * 2
    assert all(np.isfinite([row.cpu_s, row.wall_s]).all() and row.temporary_bytes == 3 for row in rows)
    calls.clear()
    measure.compare("op", "case", ways, rounds=1, seconds=0.1)
    assert len(calls) > 4 and calls == ["a", "a", "b", "b"] * (len(calls) // 4)
