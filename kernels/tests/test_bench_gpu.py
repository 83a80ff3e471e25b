"""kernels/bench/gpu.py without a GPU: its dry run, and that what is wrong gets no speed."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.grouped_matmul.cases import GroupedCase
from moejax_kernels.survey import TABLES
from scripts import scripts

CASE = GroupedCase("tiny", 40, 5, 7, (0, 13, 0, 0, 20, 0))


@pytest.fixture
def bench():
    with scripts("kernels/bench", "gpu", "calls") as modules:
        yield modules


def dry_run(gpu, tmp_path, *ops):
    assert gpu.main(["--dry-run", *ops, "--json", str(tmp_path / "rows.json")]) == 0
    return json.loads((tmp_path / "rows.json").read_text())["rows"]


def test_a_dry_run_checks_and_times_nothing(bench, tmp_path, capsys):
    gpu, _ = bench
    rows = dry_run(gpu, tmp_path, "permute", "unpermute", "gated_activation")
    assert {(row["error"], *row["ms"]) for row in rows} == {("",)} and len(rows) == 8
    assert capsys.readouterr().out.count("right; no speeds in a dry run") == 8


@pytest.mark.aot
def test_a_dry_run_of_every_op(bench, tmp_path):
    gpu, calls = bench
    assert {row["op"] for row in dry_run(gpu, tmp_path)} == set(calls.CALLS) == set(TABLES)


def test_speeds_need_a_gpu(bench, capsys):
    with pytest.raises(SystemExit):
        bench[0].main(["permute"])
    assert "JAX runs on cpu here" in capsys.readouterr().err


def one(bench, monkeypatch, *, spoil=0.0):
    gpu, calls = bench
    monkeypatch.setattr(gpu, "seconds", lambda run, wait, rounds: 1e-3)
    monkeypatch.setattr(gpu, "ceiling", lambda unit: 1e9)
    call = calls.CALLS["grouped_matmul"](CASE, jnp.dtype("float32"))
    runs, wait, outputs, grads = gpu.ours(call, "xla")
    row = gpu.Row("grouped_matmul", "tiny", "ours", "", unit=call.unit)
    started = runs, wait, [outputs[0] + spoil], grads
    return gpu, gpu._finish(row, call, started, gpu.truth_of(call, "reference"), dtype="float32", rounds=1, dry=False)


def test_rates_and_shares_count_the_work_that_is_needed(bench, monkeypatch):
    _, row = one(bench, monkeypatch)
    forward = 2 * 33 * 5 * 7  # rows of groups, width, hidden
    assert row.error == "" and row.ms == {"forward": 1.0, "both": 1.0}
    assert row.rate == pytest.approx({"forward": forward / 1e-3, "both": 3 * forward / 1e-3})
    assert row.share == pytest.approx({"forward": forward / 1e6, "both": 3 * forward / 1e6})


def test_a_red_check_prints_no_speed(bench, monkeypatch):
    gpu, row = one(bench, monkeypatch, spoil=1e-3)
    assert row.error.startswith("output 0 is off by ") and not row.ms
    line = gpu.table([row], dry=False).splitlines()[1]
    assert "limit 1e-05" in line and "FLOP" not in line


def test_chosen_keys_are_compared_as_sets(bench):
    want = np.array([[[3, 1, 0, -1], [5, 2, 1, 0]]])
    assert bench[0].different_ids(np.array([[[0, 3, 1, -1], [5, 2, 4, 0]]]), want) == pytest.approx(1 / 7)


def test_ranks_must_be_equal(bench):
    want = [np.array([0, 1, 0, -1], np.int32)]
    assert bench[0].faults(want, {}, (want, {}), "float32", exact=True) == ""
    swapped = [np.array([1, 0, 0, -1], np.int32)]  # the same set
    assert bench[0].faults(swapped, {}, (want, {}), "float32", exact=True) == "output 0 is off by 0.5, limit 0"


def test_a_library_that_is_not_there_or_fails_is_named_and_the_others_stay(bench, monkeypatch):
    gpu, _ = bench
    peer = type(gpu.PEERS["kda"][0])

    def broken(case):
        raise RuntimeError("no kernel\nfor this case")

    peers = [peer("absent", "no_such_module", None), peer("broken", "jax", broken), peer("has nothing", "jax", lambda case: None)]
    monkeypatch.setitem(gpu.PEERS, "grouped_matmul", [*peers, gpu.PEERS["grouped_matmul"][-1]])
    monkeypatch.setattr(gpu, "seconds", lambda run, wait, rounds: 1e-3)
    monkeypatch.setattr(gpu, "ceiling", lambda unit: 1e9)
    rows = gpu.measure("grouped_matmul", CASE, "float32", implementation="xla", truth_by="reference", rounds=1, dry=False)
    assert [(row.way, row.error, bool(row.ms)) for row in rows] == [
        ("ours", "", True),
        ("absent", "not run: no_such_module is not installed", False),
        ("broken", "not run: RuntimeError: no kernel for this case", False),
        ("lax.ragged_dot", "", True),
    ]


def test_the_gradients_of_a_peer_are_those_of_its_first_output(bench):
    gpu, calls = bench
    single = calls.CALLS["grouped_matmul"](CASE, jnp.dtype("float32"))
    assert gpu.only_first_output(single) is single
    double = calls.CALLS["kda"](gpu.cases_of("kda", dry=True)[0], jnp.dtype("float32"))
    first, second = gpu.only_first_output(double).cotangents
    assert first is double.cotangents[0] and not second.any()
