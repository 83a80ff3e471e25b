import dataclasses

import pytest
import tiny

from moejax.config.errors import ConfigError
from moejax.config.mesh import MeshConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import CopiesConfig
from moejax.config.run import RunConfig, resolve
from moejax.config.tiers import TiersConfig

HOST = TiersConfig(optimizer="host")
MASTERS = TiersConfig(optimizer="host", master_weights=True)
MODEL = tiny.model("gqa", "gqa", vocab_size=256, precision=PrecisionConfig())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"master_weights": True}, "twice on the devices"),
        ({"folder": "/nvme"}, "tiers.folder=/nvme would be ignored: tiers.optimizer is 'device'"),
        ({"optimizer": "host", "ahead": 3}, "tiers.ahead=3 would be ignored"),
        ({"optimizer": "files", "ahead": 0}, "tiers.ahead=0 must be at least 1"),
    ],
)
def test_fields_without_effect_or_sense_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        TiersConfig(**fields)


@pytest.mark.parametrize(
    ("tiers", "model", "words"),
    [
        (
            HOST,
            dataclasses.replace(MODEL, moe=tiny.moe(copies=CopiesConfig(every=2, move=True), node_size=1)),
            "model.moe.copies.move=True moves",
        ),
        (MASTERS, dataclasses.replace(MODEL, precision=tiny.FLOAT32), "copy weights that are not rounded"),
        (MASTERS, dataclasses.replace(MODEL, scan_layers=False), "built for stacked layers"),
    ],
)
def test_what_tiers_cannot_do_with_a_model_is_refused(tiers, model: ModelConfig, words):
    with pytest.raises(ConfigError, match=words):
        resolve(RunConfig(name="x", model=model, mesh=MeshConfig(expert=2), tiers=tiers), 2)
    resolve(RunConfig(name="x", model=model, mesh=MeshConfig(expert=2)), 2)
