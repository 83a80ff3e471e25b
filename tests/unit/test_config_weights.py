"""What the config says of weights without building them is true of the tree of weights: which dims a mesh splits, and where indexers and the embedding lie."""

import dataclasses
import itertools

import jax
import pytest
import tiny
from jax.sharding import AbstractMesh

from moejax.config.errors import ConfigError
from moejax.config.mesh import MeshConfig
from moejax.config.mixers import GDNConfig, GQAConfig, IndexerConfig, KDAConfig, MLAConfig
from moejax.config.model import ModelConfig, ResidualConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.config.run import EMBEDDING, RunConfig, indexer_paths, resolve
from moejax.config.training import TrainConfig
from moejax.model import language_model
from moejax.optim.groups import path_of

MOE = MoEConfig(num_experts=4, experts_per_token=2, hidden=3, shared_hidden=5, shared_gate=True, router=RouterConfig(correction_bias=True))
ODD = {  # every size that no axis splits is odd or prime
    "gqa": {"gqa": GQAConfig(num_heads=3, num_kv_heads=1, head_dim=10, qk_norm=True, output_gate=True, sinks=True)},
    "mla": {"mla": MLAConfig(num_heads=3, kv_lora_rank=7, nope_dim=5, rope_dim=2, value_dim=3, output_gate=True)},
    "dsa": {
        "mla": MLAConfig(num_heads=3, q_lora_rank=5, kv_lora_rank=7, nope_dim=5, rope_dim=2, value_dim=3),
        "indexer": IndexerConfig(num_heads=3, head_dim=5, topk=6, pool=3),
    },
    "gdn": {"gdn": GDNConfig(num_key_heads=1, num_heads=3, key_dim=5, value_dim=7)},
    "kda": {"kda": KDAConfig(num_heads=3, key_dim=5, value_dim=7)},
}
RESIDUALS = [ResidualConfig(), ResidualConfig(kind="mhc", num_streams=3), ResidualConfig(kind="block_attnres", block_size=1)]


def fits_the_tree(model: ModelConfig, **sizes: int) -> bool:
    """Whether each dim of each weight is a multiple of its shards."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    try:
        jax.tree.map(
            lambda weight, place: place.shard_shape(weight.shape), language_model.shapes(model), language_model.shardings(model, mesh)
        )
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("fsdp", "expert"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (8, 1)])
@pytest.mark.parametrize("mixer", ODD)
def test_a_model_resolves_if_and_only_if_the_mesh_divides_its_weights(mixer, fsdp, expert):
    run = RunConfig(name="a", mesh=MeshConfig(data=1, fsdp=fsdp, expert=expert), train=TrainConfig(train_only="^(?!.*indexer)"))
    seen = set()
    for number, (width, latent) in enumerate(itertools.product((8, 12, 18), (0, 6, 8))):
        moe = dataclasses.replace(MOE, latent_width=latent)
        model = tiny_model(mixer, width=width, moe=moe, residual=RESIDUALS[number % 3])
        fits = fits_the_tree(model, data=1, fsdp=fsdp, expert=expert)
        seen.add(fits)
        try:
            resolve(dataclasses.replace(run, model=model), fsdp * expert)
        except ConfigError as error:
            assert not fits and ("model.width=" in str(error) or "latent_width=" in str(error))
        else:
            assert fits
    assert seen == ({True} if fsdp * expert <= 2 else {True, False})


def tiny_model(mixer: str, **changes) -> ModelConfig:
    """A dense and a sparse layer of one mixer, of awkward sizes."""
    return ModelConfig(
        **{"vocab_size": 257, "num_layers": 2, "num_dense_layers": 1, "dense_hidden": 11, "mixers": (mixer,)} | ODD[mixer] | changes
    )


@pytest.mark.parametrize(
    "model",
    [
        tiny.model("dsa"),
        tiny.model("kda", "dsa", "dsa_shared", num_layers=7),
        tiny.model("gqa"),
        tiny_model("dsa", width=8),
    ],
    ids=["one layer", "head, unit and tail", "no indexer", "pooled"],
)
def test_paths_of_indexers_and_embedding_are_those_of_the_tree(model):
    paths = {path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(language_model.shapes(model))}
    assert {path for path in paths if path.startswith("embed")} == {EMBEDDING}
    assert sorted(indexer_paths(model)) == sorted(path for path in paths if "/indexer/" in path)
