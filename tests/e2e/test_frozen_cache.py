"""A run whose lower layers are frozen finds rows of earlier epochs again."""

import dataclasses
import io

import commands
import numpy as np
import pytest
from rich.console import Console

from moejax.config.load import load_config
from moejax.config.training import LossConfig
from moejax.observe import metrics
from moejax.stages.pretrain import run


@pytest.mark.slow
def test_losses_are_those_of_a_run_without_the_cache(tmp_path):
    """Documents of exactly three rows, so that rows come again however documents are shuffled; 4 steps or 5 are an epoch."""
    path = commands.write_config(tmp_path, text=str(tmp_path / "few" / "*.txt"))
    (tmp_path / "few").mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        (tmp_path / "few" / f"{number}.txt").write_text("".join(rng.choice(list("abcdefgh"), 96)))
    flags = [
        "--train.eval_batches",
        "1",
        "--train.steps",
        "9",
        "--observe.tensorboard",
        "False",
        "--train.train_only",
        "^(final_norm|unembed)",
    ]
    config = dataclasses.replace(load_config(path, flags), losses=LossConfig())
    losses = {}
    for mib in (0, 4):
        cached = dataclasses.replace(
            config,
            out_dir=str(tmp_path / f"{mib}"),
            train=dataclasses.replace(config.train, frozen_cache_mib=mib, frozen_cache_files_mib=2 * mib),
        )
        run(cached, Console(file=io.StringIO(), width=200))
        lines = [line for line in metrics.read(tmp_path / f"{mib}" / config.name) if "loss_nats" in line]
        losses[mib] = [line["loss_nats"] for line in lines]
    np.testing.assert_allclose(losses[4], losses[0], rtol=1e-6)  # float32, compiled in two programs
    hits, misses = lines[-1]["frozen_hits"], lines[-1]["frozen_misses"]
    assert hits + misses == 9 * 8 and misses <= 12 * 3 and lines[-1]["frozen_refused"] == 0
    told = {name.removeprefix("frozen_store_"): value for name, value in lines[-1].items() if name.startswith("frozen_store_")}
    assert (told["hits"], told["misses"], told["hit_rate"]) == (hits, misses, hits / 72)
    assert [told[name] for name in ("stale", "corrupt", "thrown_away", "unwritten")] == [0] * 4
    assert 0 < told["host_bytes"] <= told["host_room_bytes"] < 4 * 2**20 and 0 < told["files_room_bytes"] < 8 * 2**20
    # the run goes on in what could be another process: rows are found in its files
    longer = dataclasses.replace(cached, train=dataclasses.replace(cached.train, steps=12))
    run(longer, Console(file=io.StringIO(), width=200))
    lines = [line for line in metrics.read(tmp_path / "4" / config.name) if "loss_nats" in line]
    assert len(lines) == 12 and lines[-1]["frozen_hits"] > 0 and lines[-1]["frozen_misses"] <= 12 * 3 - misses
