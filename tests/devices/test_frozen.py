"""Fine-tuning with frozen lower layers: what they make of a batch is taken from a store when the batch comes again."""

import functools

import jax
import numpy as np
import pytest
import tiny

from moejax.config.errors import ConfigError
from moejax.config.training import LossConfig, TrainConfig
from moejax.memory.sizing import TierLimits
from moejax.memory.store import Store
from moejax.model import language_model
from moejax.parallel.mesh import mesh_from
from moejax.train.frozen import FrozenLayers
from moejax.train.placement import batch_shapes
from moejax.train.program import make_program
from moejax.train.state import placed_shapes

CONFIG = tiny.model("gqa", "gqa", feed_forwards=("dense",), dense_hidden=16, moe=tiny.MoEConfig(), scan_layers=False)
STACKED = tiny.model("gqa", "kda", "gqa", "kda", "gqa")
"""Two stacked units with experts, and a layer behind them."""


@pytest.mark.parametrize(
    ("config", "top", "mesh"),
    [(CONFIG, "head/1", {"data": 2, "fsdp": 2}), pytest.param(STACKED, "tail", {"fsdp": 2, "expert": 2}, marks=pytest.mark.slow)],
    ids=["dense", "stacked, experts"],
)
def test_steps_from_the_store_are_steps_that_compute_everything(config, top, mesh):
    only = f"^({top}|final_norm|unembed)"
    trainer = tiny.trainer(config, LossConfig(), tiny.SGD, train_only=only, **mesh)
    first, second = tiny.batch(seed=0), tiny.batch(seed=1)
    mixed = jax.tree.map(lambda ours, theirs: np.concatenate([ours[3:], theirs[:3]]), first, second)  # known rows, at other places
    unknown = jax.tree.map(lambda ours, theirs: np.concatenate([ours[:5], theirs[5:]]), first, tiny.batch(seed=2))
    batches = [first, second, first, mixed, unknown]
    want, told = trainer.run(batches)
    like = language_model.shapes(config)
    trainable = jax.tree.map(lambda rule: rule.trainable, tiny.groups.assign(tiny.SGD, like, train_only=only))
    num_stages = language_model.num_frozen(config, trainable)
    assert num_stages == 1  # a layer, or the stack
    places = jax.tree.map(lambda array: array.sharding, trainer.state)
    step = functools.partial(trainer.step.__wrapped__, num_frozen=num_stages)
    step = jax.jit(step, out_shardings=(places, None), compiler_options=tiny.QUICK_TO_COMPILE)
    store, state = Store(host=TierLimits(limit_bytes=2**24, start_bytes=2**24)), trainer.state
    with jax.set_mesh(trainer.mesh):
        frozen = FrozenLayers(config, LossConfig(), state.params, num_stages=num_stages, store=store)
        for batch, theirs in zip(batches, told, strict=True):
            placed = tiny.put(batch, trainer.mesh)
            state, out = step(state, placed, frozen(state.params, placed))
            np.testing.assert_allclose(out.scalars["loss_nats"], theirs.scalars["loss_nats"], rtol=1e-6)
    for path, weight in tiny.leaves(state.params).items():  # nothing frozen has moved
        assert path.startswith((top, "final_norm", "unembed")) or np.array_equal(weight, tiny.leaves(trainer.state.params)[path]), path
    # found: of `second` the row of padding alone; all of the third and fourth; of the last five rows of `first` and the padding
    assert frozen.metrics() == {"frozen_hits": 1.0 + 8 + 8 + 6, "frozen_misses": 8.0 + 7 + 2, "frozen_refused": 0.0}
    error, path = tiny.worst(state.params, want.params)
    assert error < 2e-6, path  # float32, fused otherwise


def test_the_compiled_step_holds_no_frozen_layer():
    program = make_program(CONFIG, LossConfig(), tiny.SGD, TrainConfig(train_only="^(head/1|final_norm|unembed)"))
    mesh, options = mesh_from(), tiny.QUICK_TO_COMPILE
    with jax.set_mesh(mesh):
        state = placed_shapes(CONFIG, program.optimizer, mesh)
        batches = batch_shapes(tiny.batch(), mesh, accumulation=1)
        lower = jax.jit(lambda params: language_model.lower(CONFIG, params, tiny.batch(), num_stages=program.num_frozen))
        flops = lambda lowered: lowered.compile(compiler_options=options).cost_analysis()["flops"]
        whole, of_layers = flops(program.lower(state, batches)), flops(lower.lower(state.params))
        rest = flops(program.lower(state, batches, jax.eval_shape(lower, state.params)))
    assert rest < whole - 0.9 * of_layers, (rest, whole, of_layers)


def test_what_moves_frozen_layers_is_refused():
    params = language_model.shapes(CONFIG)
    make = functools.partial(FrozenLayers, CONFIG, params=params, store=Store(host=TierLimits(limit_bytes=2**20)))
    with pytest.raises(ConfigError, match=r"losses\.bias_update='sign' moves frozen layers"):
        make(LossConfig(bias_update="sign"), num_stages=1)
    with pytest.raises(ConfigError, match="no layer is frozen"):
        make(LossConfig(), num_stages=0)
    with pytest.raises(ConfigError, match="depend on other rows"):
        FrozenLayers(tiny.model("gqa", moe=tiny.moe(capacity_factor=1.0)), LossConfig(), params, num_stages=1, store=make.keywords["store"])
