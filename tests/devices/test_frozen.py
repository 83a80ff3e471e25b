"""Fine-tuning with frozen lower layers: what they make of a batch is taken from a store when the batch comes again."""

import functools
import hashlib

import jax
import numpy as np
import pytest
import tiny

from moejax.config.errors import ConfigError
from moejax.config.training import LossConfig
from moejax.model import language_model
from moejax.train.frozen import FrozenLayers

CONFIG = tiny.model("gqa", "gqa", feed_forwards=("dense",), dense_hidden=16, moe=tiny.MoEConfig(), scan_layers=False)
STACKED = tiny.model("gqa", "kda", "gqa", "kda", "gqa")
"""Two stacked units with experts, and a layer behind them."""


class Dict(dict):
    """The least that a store is."""

    def get(self, key, version):
        return super().get((key, version))

    def put(self, key, version, value):
        self[key, version] = value


def content_key(arrays, *strings):
    digest = hashlib.sha256("/".join(strings).encode())
    for leaf in jax.tree.leaves(arrays):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("config", "top", "mesh"),
    [(CONFIG, "head/1", {"data": 2, "fsdp": 2}), pytest.param(STACKED, "tail", {"fsdp": 2, "expert": 2}, marks=pytest.mark.slow)],
    ids=["dense", "stacked, experts"],
)
def test_steps_from_the_store_are_steps_that_compute_everything(config, top, mesh):
    only = f"^({top}|final_norm|unembed)"
    trainer = tiny.trainer(config, LossConfig(), tiny.SGD, train_only=only, **mesh)
    batches = [tiny.batch(seed=seed) for seed in (0, 1, 0, 1)]
    want, told = trainer.run(batches)
    like = language_model.shapes(config)
    trainable = jax.tree.map(lambda rule: rule.trainable, tiny.groups.assign(tiny.SGD, like, train_only=only))
    num_stages = language_model.num_frozen(config, trainable)
    assert num_stages == 1  # a layer, or the stack
    places = jax.tree.map(lambda array: array.sharding, trainer.state)
    step = functools.partial(trainer.step.__wrapped__, num_frozen=num_stages)
    step = jax.jit(step, out_shardings=(places, None), compiler_options=tiny.QUICK_TO_COMPILE)
    store, state = Dict(), trainer.state
    with jax.set_mesh(trainer.mesh):
        frozen = FrozenLayers(config, LossConfig(), state.params, num_stages=num_stages, store=store, content_key=content_key)
        for batch, theirs in zip(batches, told, strict=True):
            placed = tiny.put(batch, trainer.mesh)
            state, out = step(state, placed, frozen(state.params, placed))
            np.testing.assert_allclose(out.scalars["loss_nats"], theirs.scalars["loss_nats"], rtol=1e-6)
    for path, weight in tiny.leaves(state.params).items():  # nothing frozen has moved
        assert path.startswith((top, "final_norm", "unembed")) or np.array_equal(weight, tiny.leaves(trainer.state.params)[path]), path
    assert (frozen.recall.hits, frozen.recall.misses, len(store)) == (2, 2, 2)
    error, path = tiny.worst(state.params, want.params)
    assert error < 2e-6, path  # float32, fused otherwise


def test_what_moves_frozen_layers_is_refused():
    params = language_model.shapes(CONFIG)
    make = functools.partial(FrozenLayers, CONFIG, params=params, store=Dict(), content_key=content_key)
    with pytest.raises(ConfigError, match=r"losses\.bias_update='sign' moves frozen layers"):
        make(LossConfig(bias_update="sign"), num_stages=1)
    with pytest.raises(ConfigError, match="no layer is frozen"):
        make(LossConfig(), num_stages=0)
