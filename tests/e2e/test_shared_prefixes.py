"""A run that computes shared prefixes once learns what the run that computes them again and again learns."""

import dataclasses
import io
import json

import commands
import numpy as np
import pytest
from rich.console import Console

from moejax.config.data import SourceConfig
from moejax.config.load import load_config
from moejax.config.training import CheckpointConfig
from moejax.observe import metrics
from moejax.stages.pretrain import run

PROMPT, ANSWER, ANSWERS, PROMPTS = 24, 8, 4, 50


@pytest.fixture
def config(tmp_path):
    """Every batch has all answers to eight prompts: 32 rows written out, or eight with a stem and four branches each."""
    rng = np.random.default_rng(0)
    letters = lambda num: "".join(rng.choice(list("abcdefghijklmnop"), num))
    records = [
        prompt + str(answer) + letters(ANSWER - 1) for prompt in (letters(PROMPT) for _ in range(PROMPTS)) for answer in range(ANSWERS)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
    config = load_config(commands.write_config(tmp_path), ["--observe.tensorboard", "False"])
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "answers.jsonl"))
    data = dataclasses.replace(config.data, sources=(source,), shuffle_block=ANSWERS, seq_len=PROMPT + ANSWER, batch_size=8 * ANSWERS)
    return dataclasses.replace(
        config,
        data=data,
        train=dataclasses.replace(config.train, steps=4, eval_batches=2),
        checkpoint=CheckpointConfig(resume="never"),
    )


def train(config, name: str):
    """The outcome, and the metrics of every step."""
    outcome = run(dataclasses.replace(config, name=name), Console(file=io.StringIO(), width=200))
    lines = metrics.read(commands.Path(config.out_dir) / name)
    return outcome, [line for line in lines if "loss_nats" in line]


@pytest.mark.slow
def test_losses_with_shared_prefixes_are_those_without(config):
    shared = dataclasses.replace(
        config.data,
        share_prefixes=True,
        min_shared=16,
        row_segments=ANSWERS + 2,
        seq_len=PROMPT - 1 + ANSWERS * (ANSWER + 1),
        batch_size=8,
    )
    (plain, want), (tree, got) = train(config, "plain"), train(dataclasses.replace(config, data=shared), "shared")
    assert len(want) == len(got) == 4
    for ours, theirs in zip(got, want, strict=True):
        # float32 sums in another order
        for name in ("loss_nats", "objective", "gradient_norm", "balance_loss"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, err_msg=name)
        assert ours["tokens"] == theirs["tokens"] == 8 * ANSWERS * (PROMPT + ANSWER)
        assert ours["targets"] == theirs["targets"]
        assert ours["computed_tokens"] == 8 * (PROMPT - 1 + ANSWERS * (ANSWER + 1)) and "computed_tokens" not in theirs
    np.testing.assert_allclose(tree.heldout_nats, plain.heldout_nats, rtol=1e-5)
    assert tree.baseline_nats == pytest.approx(plain.baseline_nats, rel=1e-12)
