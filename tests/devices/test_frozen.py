"""Fine-tuning with frozen lower layers: what they make of a batch is taken from a store when the batch comes again."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from moejax.config.errors import ConfigError
from moejax.config.mesh import MeshConfig
from moejax.config.moe import CopiesConfig
from moejax.config.run import RunConfig, resolve
from moejax.config.training import GroupConfig, LossConfig, TrainConfig
from moejax.memory.sizing import TierLimits
from moejax.memory.store import Store, StoreBusyError
from moejax.model import language_model
from moejax.parallel.mesh import mesh_from
from moejax.train.frozen import FrozenLayers, below_shapes, open_store
from moejax.train.placement import batch_shapes
from moejax.train.program import frozen_stages, make_program
from moejax.train.report import plan_lines
from moejax.train.state import placed_shapes

CONFIG = tiny.model("gqa", "gqa", feed_forwards=("dense",), dense_hidden=16, moe=tiny.MoEConfig(), scan_layers=False)
STACKED = tiny.model("gqa", "kda", "gqa", "kda", "gqa")
"""Two stacked units with experts, and a layer behind them."""


def from_frozen(trainer, config, only):
    """Stages that are frozen, and the trainer's step that takes what they make."""
    rules = tiny.groups.assign(tiny.SGD, language_model.shapes(config), train_only=only)
    num_stages = frozen_stages(config, rules, TrainConfig())
    places = jax.tree.map(lambda array: array.sharding, trainer.state)
    step = functools.partial(trainer.step.__wrapped__, num_frozen=num_stages)
    return num_stages, jax.jit(step, out_shardings=(places, None), compiler_options=tiny.QUICK_TO_COMPILE)


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
    num_stages, step = from_frozen(trainer, config, only)
    assert num_stages == 1  # a layer, or the stack
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
    told = frozen.metrics()
    assert [told[f"frozen_{name}"] for name in ("hits", "misses", "refused")] == [1 + 8 + 8 + 6, 8 + 7 + 2, 0]
    assert told["frozen_store_hits"] == told["frozen_hits"] and told["frozen_store_host_bytes"] > 0
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
        below = below_shapes(CONFIG, LossConfig(), state.params, tiny.batch(), mesh, num_stages=program.num_frozen)
        rest = flops(program.lower(state, batches, below))
    assert rest < whole - 0.9 * of_layers, (rest, whole, of_layers)


SPARSE = tiny.model("dsa", "dsa", scan_layers=False)


@pytest.mark.parametrize(
    "losses",
    [LossConfig(index="dense"), LossConfig(index="sparse", balance="sequence", router_z_coef=1e-2, z_coef=1e-3, average="sequences")],
    ids=["dense", "sparse"],
)
def test_frozen_layers_do_what_the_losses_ask_of_them(losses):
    only, batch = "^(head/1|final_norm|unembed)", tiny.batch()
    trainer = tiny.trainer(SPARSE, losses, tiny.SGD, train_only=only)
    want, (told,) = trainer.run([batch])
    num_stages, step = from_frozen(trainer, SPARSE, only)
    store, state = Store(host=TierLimits(limit_bytes=2**24)), trainer.state
    with jax.set_mesh(trainer.mesh):
        frozen = FrozenLayers(SPARSE, losses, state.params, num_stages=num_stages, store=store)
        placed = tiny.put(batch, trainer.mesh)
        got, out = step(state, placed, frozen(state.params, placed))
        other = dataclasses.replace(losses, index="sparse" if losses.index == "dense" else "dense")
        FrozenLayers(SPARSE, other, state.params, num_stages=num_stages, store=store)(state.params, placed)
    np.testing.assert_allclose(out.scalars["loss_nats"], told.scalars["loss_nats"], rtol=1e-6)
    error, path = tiny.worst(got.params, want.params)
    assert error < 2e-6, path
    assert store.metrics()["store_hits"] == 0  # rows of other switches are others


@pytest.mark.parametrize(
    ("changes", "losses", "words"),
    [
        ({}, LossConfig(bias_update="sign"), r"losses\.bias_update='sign' moves frozen layers"),
        ({"capacity_factor": 1.5}, LossConfig(), r"moe\.capacity_factor=1\.5 makes .* depend on other rows .* 0\.0 fits"),
        ({"copies": CopiesConfig(every=3)}, LossConfig(), r"moe\.copies\.every=3 makes"),
        ({"topology_far": 0.5, "node_size": 1}, LossConfig(), r"moe\.router\.topology_far=0\.5 makes"),
        ({"overload_strength": 0.5}, LossConfig(), r"moe\.router\.overload_strength=0\.5 makes"),
    ],
    ids=["bias", "capacity", "copies", "topology", "overload"],
)
def test_what_moves_frozen_layers_is_refused(changes, losses, words):
    """Where the config is resolved, and where rows would be kept."""
    config = tiny.model("gqa", "gqa", moe=tiny.moe(**changes), vocab_size=256)
    train = TrainConfig(train_only="^(unembed)", frozen_cache_mib=4)
    mesh = MeshConfig(expert=2)
    with pytest.raises(ConfigError, match=words):
        resolve(RunConfig(name="a", mesh=mesh, model=config, losses=losses, train=train), 2)
    resolve(RunConfig(name="a", mesh=mesh, model=config, losses=losses, train=TrainConfig(train_only="^(unembed)")), 2)
    with pytest.raises(ConfigError, match=words):
        FrozenLayers(config, losses, {}, num_stages=1, store=Store(host=TierLimits(limit_bytes=2**20)))


def test_the_store_of_a_run_finds_its_size_leaves_memory_to_others_and_has_the_files_that_are_asked_for(tmp_path):
    store = open_store(TrainConfig(frozen_cache_mib=64), tmp_path / "a")
    assert store.metrics()["store_host_room_bytes"] == 2**20 and not (tmp_path / "a").exists()
    train = TrainConfig(frozen_cache_mib=64, frozen_cache_files_mib=128)
    store = open_store(train, tmp_path / "b" / "frozen_cache")
    assert store.metrics()["store_files_room_bytes"] == 2 * 2**20
    with pytest.raises(StoreBusyError, match="frozen_cache"):
        open_store(train, tmp_path / "b" / "frozen_cache")
    reserves = [tier.sizing.limits.reserve_bytes for tier in store._tiers]
    assert len(reserves) == 2 and min(reserves) > 2**20
    store.close()
    with pytest.raises(ConfigError, match=r"frozen_cache_files_mib=4 would be ignored: train\.frozen_cache_mib is 0"):
        TrainConfig(frozen_cache_files_mib=4)


def test_a_cache_with_no_frozen_layer_is_refused_before_a_run_starts():
    optim = dataclasses.replace(tiny.SGD, groups=(GroupConfig(pattern="^embed", lr_scale=0.0),))
    train = TrainConfig(frozen_cache_mib=4)
    with pytest.raises(ConfigError, match=r"frozen_cache_mib=4, but no layer is frozen.*\(head/0 is the first of them\)"):
        make_program(CONFIG, LossConfig(), optim, train)
    plan = resolve(RunConfig(name="a", model=dataclasses.replace(CONFIG, vocab_size=256), optim=optim, train=train), 1)
    with pytest.raises(ConfigError, match="no layer is frozen"):
        plan_lines(plan)  # what `moejax show` prints
    frozen = dataclasses.replace(plan.config, train=TrainConfig(frozen_cache_mib=4, train_only="^head/1"))
    assert "frozen    head/0: what they make of rows is kept, and the step starts from there" in "\n".join(plan_lines(resolve(frozen, 1)))
