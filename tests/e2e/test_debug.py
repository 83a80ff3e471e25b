"""What a run does with data and numbers that are wrong."""

import dataclasses
import io

import commands
import numpy as np
import pytest
from moejax_kernels.segments import StaleSegmentsError
from rich.console import Console

from moejax.config.load import load_config
from moejax.data.loader import Loader
from moejax.observe import metrics
from moejax.stages import pretrain

FLAGS = ("--train.eval_batches", "1", "--observe.tensorboard", "False", "--train.steps", "8")


def run(folder, *flags):
    pretrain.run(load_config(commands.write_config(folder), [*FLAGS, *flags]), Console(file=io.StringIO()))


def test_debug_refuses_segments_that_were_not_built_from_their_ids(tmp_path, monkeypatch):
    fresh = Loader.__next__

    def stale(loader):
        batch = fresh(loader)
        ids_BL = np.maximum(batch.segments.ids_BL, 0)
        return dataclasses.replace(batch, segments=dataclasses.replace(batch.segments, ids_BL=ids_BL + 1))

    monkeypatch.setattr(Loader, "__next__", stale)
    with pytest.raises(StaleSegmentsError, match="segments are stale"):
        run(tmp_path, "--debug")


@pytest.mark.slow
def test_debug_ends_at_the_first_number_that_is_not_finite_and_says_where(tmp_path):
    with pytest.raises(pretrain.DivergedError, match=r"step \d: the first non-finite value is in (layer \d, |the gradient of )"):
        run(tmp_path, "--debug", "--optim.kind", "sgd", "--optim.learning_rate", "1e30")


@pytest.mark.slow
def test_a_run_skips_and_counts_steps_that_are_not_finite_until_it_gives_up(tmp_path):
    with pytest.raises(pretrain.DivergedError, match=r"3 steps in a row had a non-finite loss or gradient \(train\.max_skipped=2\)"):
        run(tmp_path, "--train.max_skipped", "2", "--optim.kind", "sgd", "--optim.learning_rate", "1e30")
    lines = metrics.read(tmp_path / "runs" / "smallest")
    assert [line["skipped_in_a_row"] for line in lines][-2:] == [1, 2]
