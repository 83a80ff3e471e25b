"""One run: everything that a config file says."""

import dataclasses

from moejax.config.data import DataConfig
from moejax.config.errors import require
from moejax.config.mesh import MeshConfig, ProcessConfig
from moejax.config.model import LayerPlan, ModelConfig, plan_layers
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
    train: TrainConfig = TrainConfig()
    """The loop."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept."""
    observe: ObserveConfig = ObserveConfig()
    """What is measured."""


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
    multiple = model.residual.block_size if model.residual.kind == "block_attnres" else 1
    return plan_layers(model.layers(), multiple=multiple)


def resolve(config: RunConfig, num_devices: int) -> Plan:
    """Checks what ties the parts together, and returns a plan without an open size.

    Raises:
      ConfigError: a size does not divide, or the mesh does not fit `num_devices`.
    """
    mesh = config.mesh.resolve(num_devices)
    batch, accumulation = config.data.batch_size, config.train.accumulation
    require(batch % accumulation == 0, f"train.accumulation={accumulation} must divide data.batch_size={batch}.")
    shards = mesh.data * mesh.fsdp * mesh.expert
    rows = batch // accumulation
    require(
        rows % shards == 0,
        f"data.batch_size={batch} in train.accumulation={accumulation} microbatches gives {rows} rows, which the {shards} token shards "
        f"(mesh.data={mesh.data} x mesh.fsdp={mesh.fsdp} x mesh.expert={mesh.expert}) do not divide; a multiple of {shards * accumulation} fits.",
    )
    kinds = config.model.layers()
    moe = config.model.moe
    if any(kind.feed_forward == "moe" for kind in kinds):
        fits = [n for n in range(1, moe.num_experts + 1) if moe.num_experts % n == 0]
        require(
            moe.num_experts % mesh.expert == 0,
            f"mesh.expert={mesh.expert} must divide model.moe.num_experts={moe.num_experts}; {fits} would fit.",
        )
    else:
        require(mesh.expert == 1, f"mesh.expert={mesh.expert}, but the model has no moe layer; use mesh.fsdp.")
    losses = config.losses
    has_moe = any(kind.feed_forward == "moe" for kind in kinds)
    require(losses.balance == "none" or has_moe, f"losses.balance={losses.balance!r}, but the model has no moe layer.")
    require(
        losses.bias_update == "none" or (has_moe and moe.router.correction_bias),
        f"losses.bias_update={losses.bias_update!r} needs model.moe.router.correction_bias=True and a moe layer.",
    )
    require(
        losses.bias_update != "quantile" or moe.router.num_groups == 1,
        f"losses.bias_update='quantile' is exact for one group of experts only, model.moe.router.num_groups={moe.router.num_groups}; use 'sign'.",
    )
    require(
        losses.index == "none" or config.model.indexer.pool == 1,
        f"losses.index={losses.index!r} is not built for pooled index keys (model.indexer.pool={config.model.indexer.pool}); 1 fits.",
    )
    require(
        losses.index == "none" or any(kind.mixer == "dsa" for kind in kinds),
        f"losses.index={losses.index!r}, but the model has no dsa layer.",
    )
    require(
        config.data.tokenizer != "bytes" or config.model.vocab_size >= 256,
        f"model.vocab_size={config.model.vocab_size} is too small for data.tokenizer='bytes'; at least 256 fits.",
    )
    config = dataclasses.replace(config, mesh=mesh)
    return Plan(config=config, layers=layer_plan(config.model), rows_per_device=rows // shards)
