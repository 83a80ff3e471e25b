"""N steps and then N more are 2 N steps, on one mesh bit for bit, and on fewer and fewer devices up to rounding."""

import dataclasses
import io

import commands
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from rich.console import Console

from moejax.checkpoint.layout import LayoutError
from moejax.checkpoint.store import MissingCheckpointError
from moejax.config.load import load_config
from moejax.config.moe import AdaptiveConfig, CopiesConfig
from moejax.observe import metrics
from moejax.stages.pretrain import run


def train(config, folder, **changes):
    """Runs the config in this process; returns what a person reads, the final checkpoint's leaves and the losses."""
    config = dataclasses.replace(config, out_dir=str(folder), train=dataclasses.replace(config.train, **changes))
    text = io.StringIO()
    run(config, Console(file=text, width=200))
    return (
        text.getvalue(),
        final(folder / config.name),
        [line["loss_nats"] for line in metrics.read(folder / config.name) if "loss_nats" in line],
    )


def final(run_folder):
    """Path -> array of the newest checkpoint, read without knowing its layout."""
    newest = max((run_folder / "checkpoints").iterdir(), key=lambda child: int(child.name))
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        tree = reader.restore(
            newest / "state",
            args=ocp.args.StandardRestore(
                jax.tree.map(lambda meta: np.zeros(meta.shape, meta.dtype), reader.metadata(newest / "state").item_metadata.tree)
            ),
        )
    return tiny.leaves(tree)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = commands.write_config(tmp_path_factory.mktemp("resume"))
    config = load_config(path, ["--train.eval_batches", "1", "--observe.tensorboard", "False", "--optim.kind", "muon"])
    return config


def test_4_and_4_steps_are_8_steps_bit_for_bit(config, tmp_path):
    _, want, losses = train(config, tmp_path / "whole", steps=8)
    train(config, tmp_path / "halves", steps=4)
    text, got, again = train(config, tmp_path / "halves", steps=8)
    assert "start     resumed from" in text and "after step 4" in text
    assert again == losses
    assert len(got) == len(want) > 30
    for path in want:
        np.testing.assert_array_equal(got[path], want[path], err_msg=path)
    record = tmp_path / "halves" / config.name / "config.json"
    before = record.read_text()
    with pytest.raises(LayoutError, match="another layout"):
        train(dataclasses.replace(config, model=dataclasses.replace(config.model, width=32)), tmp_path / "halves", steps=8)
    assert record.read_text() == before  # a start that is refused leaves the record of the run


def test_a_checkpoint_named_that_is_not_there_is_fatal(config, tmp_path):
    missing = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=str(tmp_path / "7")))
    with pytest.raises(MissingCheckpointError, match="There is no checkpoint"):
        train(missing, tmp_path, steps=2)


@pytest.mark.slow
def test_8_then_4_then_1_devices_are_8_devices_up_to_rounding(tmp_path):
    flags = ("--optim.kind", "sgd", "--optim.learning_rate", "0.5", "--train.eval_batches", "1")
    finals, losses = {}, {}
    for name, stages in {"whole": ((8, 4, 6),), "fewer": ((8, 4, 2), (4, 2, 4), (1, 1, 6))}.items():
        folder = tmp_path / name
        folder.mkdir()
        path = commands.write_config(folder)
        for devices, expert, steps in stages:
            code, out, err = commands.moejax(
                "train", path, *flags, "--train.steps", steps, "--mesh.simulate_devices", devices, "--mesh.expert", expert
            )
            assert code in (0, 1), out + err
        finals[name], losses[name] = (
            final(folder / "runs" / "smallest"),
            [line["loss_nats"] for line in metrics.read(folder / "runs" / "smallest") if "loss_nats" in line],
        )
    np.testing.assert_allclose(losses["fewer"], losses["whole"], rtol=1e-6)
    for path, want in finals["whole"].items():
        np.testing.assert_allclose(finals["fewer"][path], want, rtol=0, atol=1e-6 * max(np.abs(want).max(), 1e-3), err_msg=path)


@pytest.mark.slow
def test_capacities_copies_and_homes_go_on_as_they_were(config, tmp_path):
    """Experts move, are copied and get room at steps 2 and 4; a run that stops between them is the run that does not."""
    adaptive = AdaptiveConfig(highest=4.0, lowest=0.5, patience=1, drop_rate=0.0, buffers=2)
    moe = dataclasses.replace(
        config.model.moe,
        num_experts=8,
        capacity_factor=0.5,
        adaptive=adaptive,
        copies=CopiesConfig(every=2, move=True, gain=0.0),
        node_size=2,
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))
    text, want, losses = train(config, tmp_path / "whole", steps=6)
    assert "capacity  buffers for" in text
    train(config, tmp_path / "halves", steps=3)
    _, got, again = train(config, tmp_path / "halves", steps=6)
    assert again == losses
    for path in want:
        np.testing.assert_array_equal(got[path], want[path], err_msg=path)
    factors = [array for path, array in want.items() if path.endswith("capacity/factor")]
    homes = [array for path, array in want.items() if path.endswith("tables/position_E")]
    assert factors and all((array > 0.5).all() for array in factors)
    assert any((np.diff(array) != 1).any() for array in homes), "no expert moved"
    assert all(array.size for array in want.values())


@pytest.mark.slow
def test_windows_go_on_over_a_restart_bit_for_bit(config, tmp_path):
    """Documents of 300 letters and more in windows of 32; what the rows left is in the checkpoint."""
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, windows=True),
        model=dataclasses.replace(config.model, mixers=("kda", "gqa"), kda=tiny.KDAConfig(num_heads=2, key_dim=8, value_dim=8)),
    )
    _, want, losses = train(config, tmp_path / "whole", steps=6, carry_keys=40)
    train(config, tmp_path / "halves", steps=3, carry_keys=40)
    text, got, again = train(config, tmp_path / "halves", steps=6, carry_keys=40)
    assert "after step 3" in text and again == losses
    pasts = {path for path in want if path.startswith("past/") and want[path].any()}
    assert len(pasts) == 8  # next_B, held_B; four of kda, two of gqa
    assert (want["past/held_B"] > 40).any()
    for path in want:
        np.testing.assert_array_equal(got[path], want[path], err_msg=path)
