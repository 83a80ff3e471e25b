"""One run: everything that a config file says."""

import dataclasses
from collections.abc import Callable

from moejax.config.data import DataConfig
from moejax.config.errors import ConfigError, refuse_unused, regular_expression, require
from moejax.config.memory import MemoryConfig
from moejax.config.mesh import MeshConfig, ProcessConfig
from moejax.config.model import LayerPlan, ModelConfig, plan_layers
from moejax.config.tiers import TiersConfig
from moejax.config.training import CheckpointConfig, LossConfig, ObserveConfig, OptimConfig, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run."""

    name: str
    """Name of the run; its folder is out_dir/name."""
    out_dir: str = "runs"
    """Folder of all runs."""
    mesh: MeshConfig = MeshConfig()
    """Devices."""
    processes: ProcessConfig = ProcessConfig()
    """Processes."""
    model: ModelConfig = ModelConfig()
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    losses: LossConfig = LossConfig()
    """What is minimised."""
    optim: OptimConfig = OptimConfig()
    """How weights move."""
    tiers: TiersConfig = TiersConfig()
    """Where the optimizer's state lies."""
    train: TrainConfig = TrainConfig()
    """The loop."""
    memory: MemoryConfig = MemoryConfig()
    """What waits for the backward pass, and where."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept."""
    observe: ObserveConfig = ObserveConfig()
    """What is measured."""

    def __post_init__(self):
        require(bool(str(self.name).strip()), f"name={self.name!r} is empty, and the run's folder is out_dir/name; any other name fits.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A config with nothing left open, checked against the devices."""

    config: RunConfig
    """The config, its mesh resolved."""
    layers: LayerPlan
    """How layers are stacked."""
    rows_per_device: int
    """Rows of one microbatch on one device."""


def layer_plan(model: ModelConfig) -> LayerPlan:
    """The stacking of a model's layers; a block of AttnRes is never cut."""
    if not model.scan_layers:
        return LayerPlan(head=model.layers(), unit=(), num_units=0, tail=())
    multiple = model.residual.block_size if model.residual.kind == "block_attnres" else 1
    return plan_layers(model.layers(), multiple=multiple)


def resolve(config: RunConfig, num_devices: int) -> Plan:
    """Checks what ties the parts together, and returns a plan without an open size.

    Raises:
      ConfigError: a size does not divide, the mesh does not fit `num_devices`, or a loss and the layers do not fit each other.
    """
    mesh, data, model = config.mesh.resolve(num_devices), config.data, config.model
    batch, accumulation = data.batch_size, config.train.accumulation
    require(batch % accumulation == 0, f"train.accumulation={accumulation} must divide data.batch_size={batch}.")
    shards = mesh.data * mesh.fsdp * mesh.expert
    rows = batch // accumulation
    require(
        rows % shards == 0,
        f"data.batch_size={batch} in train.accumulation={accumulation} microbatches gives {rows} rows, which the {shards} token shards "
        f"(mesh.data={mesh.data} x mesh.fsdp={mesh.fsdp} x mesh.expert={mesh.expert}) do not divide; a multiple of {shards * accumulation} fits.",
    )
    require(
        data.tokenizer != "bytes" or model.vocab_size >= 256,
        f"model.vocab_size={model.vocab_size} is too small for data.tokenizer='bytes'; at least 256 fits.",
    )
    _check_shards(model, mesh)
    _check_moe(model, mesh, tokens_per_device=rows // shards * data.seq_len)
    _check_losses(model, config.losses)
    _check_indexer(config)
    _check_prefixes(config)
    _check_windows(config)
    _check_frozen_cache(config)
    require(
        not model.moe.copies.move or config.tiers.optimizer == "device",
        f"model.moe.copies.move=True moves moments between devices, and tiers.optimizer={config.tiers.optimizer!r} keeps them elsewhere; "
        "model.moe.copies.move=False fits.",
    )
    _check_masters(config)
    return Plan(config=dataclasses.replace(config, mesh=mesh), layers=layer_plan(model), rows_per_device=rows // shards)


def _check_prefixes(config: RunConfig) -> None:
    if not config.data.share_prefixes:
        return
    pool = config.model.indexer.pool
    require(
        pool == 1,
        f"data.share_prefixes is not built for pooled index keys (model.indexer.pool={pool}); 1 fits, or no shared prefixes.",
    )
    require(
        config.losses.average == "tokens",
        "losses.average='sequences' weighs each document on its own, and a shared prefix belongs to several: with data.share_prefixes "
        "only 'tokens' fits.",
    )
    require(
        not config.train.rebuild_metadata,
        "train.rebuild_metadata builds borders from ids, which do not tell the trees of data.share_prefixes; leave one of them out.",
    )


def _check_shards(model: ModelConfig, mesh: MeshConfig) -> None:
    """Every dim of a weight that mesh axes split must divide: experts over `expert`, the width of dense weights over `fsdp` and `expert`,
    that of expert weights over `fsdp`. Nothing else is split (`parallel/axes.py`)."""
    moe, has_moe = model.moe, _has_moe(model)
    if has_moe:
        fits = [n for n in range(1, moe.num_experts + 1) if moe.num_experts % n == 0]
        require(
            moe.num_experts % mesh.expert == 0,
            f"mesh.expert={mesh.expert} must divide model.moe.num_experts={moe.num_experts}; {fits} would fit.",
        )
    else:
        require(mesh.expert == 1, f"mesh.expert={mesh.expert}, but the model has no moe layer; use mesh.fsdp.")
    splits = [("model.width", model.width, mesh.fsdp * mesh.expert, f"mesh.fsdp={mesh.fsdp} x mesh.expert={mesh.expert} = ")]
    if has_moe and moe.latent_width:
        splits.append(("model.moe.latent_width", moe.latent_width, mesh.fsdp, "mesh.fsdp="))
    for name, size, shards, axes in splits:
        below = size // shards * shards
        fit = f"{below} or {below + shards}" if below else f"{shards}"
        require(size % shards == 0, f"{name}={size} is split over {axes}{shards} devices, which do not divide it; {fit} would fit.")


def _check_moe(model: ModelConfig, mesh: MeshConfig, *, tokens_per_device: int) -> None:
    moe = model.moe
    if not _has_moe(model):
        return
    require(
        tokens_per_device % moe.overlap_chunks == 0,
        f"model.moe.overlap_chunks={moe.overlap_chunks} must divide the {tokens_per_device} tokens of a device in one microbatch.",
    )
    require(
        not moe.copies.every or mesh.expert > 1,
        f"model.moe.copies.every={moe.copies.every} needs experts on several devices, and mesh.expert={mesh.expert}; leave it out.",
    )
    if moe.node_size:
        fits = [n for n in range(1, mesh.expert + 1) if mesh.expert % n == 0]
        require(moe.node_size in fits, f"model.moe.node_size={moe.node_size} must divide mesh.expert={mesh.expert}; {fits} would fit.")


def _check_losses(model: ModelConfig, losses: LossConfig) -> None:
    losses.check_coefficients()
    moe, has_moe = model.moe, _has_moe(model)
    require(losses.balance == "none" or has_moe, f"losses.balance={losses.balance!r}, but the model has no moe layer.")
    require(losses.router_z_coef == 0 or has_moe, f"losses.router_z_coef={losses.router_z_coef}, but the model has no moe layer; 0 fits.")
    require(
        losses.bias_update == "none" or (has_moe and moe.router.correction_bias),
        f"losses.bias_update={losses.bias_update!r} needs model.moe.router.correction_bias=True and a moe layer.",
    )
    require(
        losses.bias_update != "quantile" or moe.router.num_groups == 1,
        f"losses.bias_update='quantile' is exact for one group of experts only, model.moe.router.num_groups={moe.router.num_groups}; use 'sign'.",
    )
    require(
        losses.index == "none" or model.indexer.pool == 1,
        f"losses.index={losses.index!r} is not built for pooled index keys (model.indexer.pool={model.indexer.pool}); 1 fits.",
    )
    require(
        losses.index == "none" or any(kind.mixer == "dsa" for kind in model.layers()),
        f"losses.index={losses.index!r}, but the model has no dsa layer.",
    )


def _check_masters(config: RunConfig) -> None:
    precision = config.model.precision
    if config.tiers.master_weights:
        require(
            precision.params != precision.compute,
            f"tiers.master_weights=True with model.precision.compute={precision.compute!r} = params would copy weights that are not rounded; "
            "leave it out, or set compute='bfloat16'.",
        )
        require(
            layer_plan(config.model).num_units > 0,
            "tiers.master_weights=True is built for stacked layers, and this model has none (model.scan_layers, model.mixers); leave it out.",
        )


def _learner(config: RunConfig) -> Callable[[str], bool]:
    """Tells of a weight's path whether training moves it."""
    wanted = regular_expression("train.train_only", config.train.train_only)
    groups = [
        (regular_expression(f"optim.groups[{i}].pattern", group.pattern), group.lr_scale) for i, group in enumerate(config.optim.groups)
    ]
    rate = lambda path: next((scale for pattern, scale in groups if pattern.search(path)), 1.0)
    return lambda path: bool(wanted.search(path)) and rate(path) > 0


def _check_indexer(config: RunConfig) -> None:
    """An indexer that no loss reaches must be frozen: weight decay alone would move it."""
    learns = _learner(config)
    moved = [path for path in indexer_paths(config.model) if learns(path)]
    losses, pool = config.losses, config.model.indexer.pool
    if moved and (losses.index == "none" or losses.index_coef == 0):
        loss = "set losses.index='sparse' or 'dense', or" if pool == 1 else f"no index loss is built for model.indexer.pool={pool}, so"
        raise ConfigError(
            f"losses.index={losses.index!r} with losses.index_coef={losses.index_coef}, but {moved[0]} is not frozen: only its own loss "
            f"teaches an indexer, without it weight decay alone would move it; {loss} freeze it, e.g. with train.train_only='^(?!.*indexer)'."
        )


def _check_windows(config: RunConfig) -> None:
    """What a window leaves for the next one must have a layer that takes it."""
    train, mixers = config.train, {kind.mixer for kind in config.model.layers()}
    if not config.data.windows:
        refuse_unused("train", train, "carry_keys", unless=False, why="data.windows is False")
        return
    require(train.accumulation == 1, f"data.windows goes on from batch to batch, train.accumulation={train.accumulation}; 1 fits.")
    require(not config.data.share_prefixes, "data.windows and data.share_prefixes pack rows each in its own way; leave one of them out.")
    require(
        not train.rebuild_metadata,
        "train.rebuild_metadata builds positions from ids, which do not tell where a window begins; leave it out with data.windows.",
    )
    require(
        config.losses.average == "tokens",
        "losses.average='sequences' needs each document as a whole; with data.windows only 'tokens' fits.",
    )
    pool = config.model.indexer.pool
    require(pool == 1, f"data.windows is not built for pooled index keys (model.indexer.pool={pool}); 1 fits.")
    require(
        not train.carry_keys or bool(mixers - {"kda", "gdn"}),
        f"train.carry_keys={train.carry_keys}, but no layer of the model has keys to carry ({sorted(mixers)}); 0 fits.",
    )


def _check_frozen_cache(config: RunConfig) -> None:
    size, accumulation = config.train.frozen_cache_mib, config.train.accumulation
    if not size:
        return
    require(accumulation == 1, f"train.frozen_cache_mib={size} takes one microbatch, train.accumulation={accumulation}; 1 fits.")
    require(not config.data.windows, f"train.frozen_cache_mib={size} keeps rows that begin anew, and data.windows=True lets them go on.")
    require(
        not config.train.debug, f"train.frozen_cache_mib={size} leaves layers out of the step, and train.debug=True looks at all of them."
    )
    require(
        config.tiers.optimizer == "device",
        f"train.frozen_cache_mib={size} hands the step what frozen layers made, and with tiers.optimizer={config.tiers.optimizer!r} the step "
        "takes none; 'device' fits.",
    )
    require(
        not _learner(config)(EMBEDDING),
        f"train.frozen_cache_mib={size} keeps what frozen layers make, and {EMBEDDING} learns; train.train_only={config.train.train_only!r} "
        f"must leave out the embedding and the first layers, as '^(tail|final_norm|unembed)' does.",
    )
    check_frozen_rows(config.model, config.losses)


def check_frozen_rows(model: ModelConfig, losses: LossConfig) -> None:
    """Refuses what lets frozen layers make something else of a row when it comes by again.

    Raises:
      ConfigError: something else than training moves them, or what they do depends on other rows or on the step.
    """
    moe, router = model.moe, model.moe.router
    require(losses.bias_update == "none", f"losses.bias_update={losses.bias_update!r} moves frozen layers too; 'none' fits.")
    for field, value, fits in (
        ("capacity_factor", moe.capacity_factor, 0.0),
        ("copies.every", moe.copies.every, 0),
        ("router.topology_far", router.topology_far, 0.0),
        ("router.overload_strength", router.overload_strength, 0.0),
    ):
        require(
            value == fits,
            f"model.moe.{field}={value} makes what frozen layers do depend on other rows or on the step, and train.frozen_cache_mib keeps it "
            f"row by row; {fits} fits.",
        )
    kind = model.residual.kind
    require(kind != "block_attnres", f"train.frozen_cache_mib takes model.residual.kind='plain' and 'mhc', not {kind!r}.")


EMBEDDING = "embed/weight_VD"
"""The embedding's path in the parameter tree."""


def indexer_paths(model: ModelConfig) -> list[str]:
    """Paths of all weights of indexers, as the parameter tree has them."""
    names = ("q_RJC", "k_DC", "k_norm_scale_C", "k_norm_bias_C", "weight_DJ")
    names += ("pool_gate_DC", "pool_bias_PC") if model.indexer.pool > 1 else ()
    places = [layer_plan(model).place(layer)[:2] for layer, kind in enumerate(model.layers()) if kind.mixer == "dsa"]
    return [f"{section}/{place}/mixer/indexer/{name}" for section, place in dict.fromkeys(places) for name in names]


def _has_moe(model: ModelConfig) -> bool:
    return any(kind.feed_forward == "moe" for kind in model.layers())
