"""Small models, batches and compiled functions that many tests share."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config.mixers import GDNConfig, GQAConfig, IndexerConfig, KDAConfig, MLAConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.config.training import LossConfig, OptimConfig
from moejax.data.batch import Batch
from moejax.memory.policy import Saved
from moejax.model import language_model
from moejax.model.context import Switches
from moejax.model.objective import switches_for
from moejax.optim import groups
from moejax.optim.build import build
from moejax.parallel.axes import TOKENS
from moejax.parallel.mesh import mesh_from
from moejax.train import step as steps
from moejax.train.control import init_control
from moejax.train.state import TrainState, state_shardings

SGD = OptimConfig(kind="sgd", learning_rate=1.0, clip_norm=0.0, warmup_steps=0, schedule="constant", weight_decay=0.0)
"""Moves each weight by its gradient; Adam would hide a factor."""
FLOAT64 = PrecisionConfig(params="float64", compute="float64")
FLOAT32 = PrecisionConfig(params="float32", compute="float32")
COEFS = ("balance_coef", "index_coef")
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}
"""The same partitioned program, and machine code that LLVM does not polish: half the time."""
FULLY_OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""As programs are compiled outside the tests, whose `jax_disable_most_optimizations` is taken back."""
SIZES = {
    "gqa": {"gqa": GQAConfig(num_heads=2, num_kv_heads=1, head_dim=8)},
    "mla": {"mla": MLAConfig(num_heads=2, kv_lora_rank=8, nope_dim=8, rope_dim=4, value_dim=8)},
    "dsa": {
        "mla": MLAConfig(num_heads=2, q_lora_rank=8, kv_lora_rank=8, nope_dim=8, rope_dim=4, value_dim=8),
        "indexer": IndexerConfig(num_heads=2, head_dim=8, topk=4, rotary_dim=4),
    },
    "dsa_shared": {},
    "gdn": {"gdn": GDNConfig(num_key_heads=1, num_heads=2, key_dim=8, value_dim=8)},
    "kda": {"kda": KDAConfig(num_heads=2, key_dim=8, value_dim=8)},
}
MOE = MoEConfig(num_experts=8, experts_per_token=2, hidden=16, shared_hidden=16, router=RouterConfig(score="sigmoid", correction_bias=True))


def model(*mixers: str, **changes) -> ModelConfig:
    """One layer per mixer named, 64 tokens, 16 wide, with 8 experts of which each token visits 2 and a shared one, in float32."""
    fields = {"vocab_size": 64, "width": 16, "num_layers": len(mixers), "mixers": mixers, "moe": MOE, "precision": FLOAT32}
    for mixer in mixers:
        fields |= SIZES[mixer]
    return ModelConfig(**fields | changes)


def moe(**changes):
    """The experts of `model`, changed."""
    router = {name: changes.pop(name) for name in list(changes) if name in RouterConfig.__dataclass_fields__}
    return dataclasses.replace(MOE, router=dataclasses.replace(MOE.router, **router), **changes)


def batch(rows: int = 8, length: int = 16, *, vocab: int = 64, seed: int = 0) -> Batch:
    """Random tokens; up to three documents a row, the last two rows half and all padding."""
    rng = np.random.default_rng(seed)
    ids_BL = np.sort(rng.integers(0, 3, (rows, length)), 1)
    ids_BL[-2, length // 2 :] = -1
    ids_BL[-1] = -1
    return Batch.build(rng.integers(0, vocab, (rows, length)), ids_BL)


def put(batch: Batch, mesh, accumulation: int = 1) -> Batch:
    """[A, B / A, ...] arrays, rows split over the token axes."""
    cut = jax.tree.map(lambda array: array.reshape(accumulation, -1, *array.shape[1:]), batch)
    return jax.device_put(cut, NamedSharding(mesh, P(None, TOKENS)))


def weights(config: ModelConfig, *, bias: float = 0.0, seed: int = 0) -> dict:
    """Weights as numpy arrays, drawn here since compiling the model's own initialisation takes long: norm scales near 1, embeddings of
    size 1, so that routing and attention are far from uniform. `bias` spreads the routers' correction biases."""
    rng = np.random.default_rng(seed)

    def draw(path, like):
        name = path[-1].key.rsplit("_", 1)[0]
        size = {"bias": bias, "scale": 0.1}.get(name, 1.0 if path[0].key == "embed" else config.width**-0.5)
        return (rng.normal(0, size, like.shape) + (name in ("scale", "k_norm_scale", "out_norm_scale"))).astype(like.dtype)

    return jax.tree_util.tree_map_with_path(draw, language_model.shapes(config))


def lay(params: dict, config: ModelConfig, mesh) -> dict:
    """Host weights on the mesh."""
    return jax.device_put(params, language_model.shardings(config, mesh))


@functools.cache
def _gradients(config, losses, saved):
    def run(params, batches, coefs):
        return steps.gradients(config, dataclasses.replace(losses, **coefs), params, batches, switches_for(losses, saved=saved))

    return jax.jit(run, compiler_options=QUICK_TO_COMPILE)


def gradients(
    config: ModelConfig, losses: LossConfig, params: dict, batch: Batch, *, accumulation: int = 1, saved: Saved | None = None, **mesh_sizes
):
    """Loss, gradients and report of a global batch on a mesh, all on the host. Losses that differ by COEFS alone share one program."""
    mesh = mesh_from(**mesh_sizes)
    coefs = {name: getattr(losses, name) for name in COEFS}
    run = _gradients(config, dataclasses.replace(losses, balance_coef=1.0, index_coef=1.0), saved)
    with jax.set_mesh(mesh):
        return jax.device_get(run(lay(params, config, mesh), put(batch, mesh, accumulation), coefs))


@functools.cache
def _forward(config, switches):
    return jax.jit(lambda params, batch: language_model.forward(config, params, batch, switches), compiler_options=QUICK_TO_COMPILE)


def hidden(config: ModelConfig, params: dict, batch: Batch, **switches):
    """Hidden states [B, L, D] and the layers' reports, on one device."""
    mesh = mesh_from()
    with jax.set_mesh(mesh):
        output = _forward(config, Switches(**switches))(lay(params, config, mesh), jax.device_put(batch))
    return np.asarray(output.hidden_BLD), jax.device_get(output.aux)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A compiled train step and what it starts from."""

    step: object
    state: TrainState
    mesh: object
    accumulation: int

    def run(self, batches, state: TrainState | None = None):
        """State and what each step told, after one step per batch."""
        state, told = self.state if state is None else state, []
        with jax.set_mesh(self.mesh):
            for each in batches:
                state, out = self.step(state, put(each, self.mesh, self.accumulation))
                told.append(jax.device_get(out))
        return state, told


@functools.cache
def trainer(
    config: ModelConfig,
    losses: LossConfig = LossConfig(),
    optim: OptimConfig = SGD,
    *,
    accumulation: int = 1,
    train_only: str = "",
    debug: bool = False,
    saved: Saved | None = None,
    num_steps: int = 10,
    **mesh_sizes,
) -> Trainer:
    """A run's step on a mesh, built as the main job builds it."""
    mesh, like = mesh_from(**mesh_sizes), language_model.shapes(config)
    optimizer = build(optim, steps=num_steps, params_like=like, train_only=train_only)
    trainable = jax.tree.map(lambda rule: rule.trainable, groups.assign(optim, like, train_only=train_only))
    step = functools.partial(
        steps.train_step,
        config=config,
        losses=losses,
        optimizer=optimizer,
        clip_norm=optim.clip_norm,
        trainable=trainable,
        switches=switches_for(losses, debug=debug, saved=saved),
    )
    places = state_shardings(config, optimizer, mesh)
    params = lay(weights(config), config, mesh)
    moments = jax.jit(optimizer.init, out_shardings=places.opt_state)(params)
    control = jax.device_put(init_control(config, mesh.shape["expert"]), places.step)
    state = TrainState(params, moments, *(jax.device_put(np.int32(0), places.step) for _ in range(3)), control)
    return Trainer(jax.jit(step, out_shardings=(places, None), compiler_options=QUICK_TO_COMPILE), state, mesh, accumulation)


def leaves(tree) -> dict[str, np.ndarray]:
    """Path -> array."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def worst(ours, theirs) -> tuple[float, str]:
    """Largest difference of two trees of weights relative to each tensor's peak, and the tensor's path; a peak of 0 demands 0."""
    theirs = leaves(theirs)
    errors = {}
    for path, array in leaves(ours).items():
        difference, peak = np.abs(array - theirs[path]).max(), np.abs(theirs[path]).max()
        errors[path] = float(difference / peak) if peak else float(difference)
    return max((error, path) for path, error in errors.items())
