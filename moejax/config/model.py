"""What the model is: switches, not a class per family."""

import dataclasses
from typing import Literal

from moejax.config.errors import ConfigError, refuse_unused, require, require_ranges
from moejax.config.mixers import GDNConfig, GQAConfig, IndexerConfig, KDAConfig, MLAConfig
from moejax.config.moe import MoEConfig

MIXERS = ("gqa", "mla", "dsa", "dsa_shared", "gdn", "kda")
FEED_FORWARDS = ("dense", "moe")
Dtype = Literal["float32", "bfloat16", "float64"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ActivationConfig:
    """Gated activation of every MLP, dense and expert."""

    kind: Literal["swiglu", "swiglu_clamped", "situ"] = "swiglu"
    """silu(gate) * up; the same with clamped inputs (GLM-5.3); or SiTU-GLU (Kimi K3)."""
    limit: float = 10.0
    """`swiglu_clamped`: gate <= limit, |up| <= limit."""
    beta: float = 4.0
    """`situ`: the gate becomes beta * tanh(gate / beta) * sigmoid(gate)."""
    linear_beta: float = 25.0
    """`situ`: the linear part becomes linear_beta * tanh(up / linear_beta); 0: stays as it is."""

    def __post_init__(self):
        require_ranges("activation", self, limit="> 0", beta="> 0", linear_beta=">= 0 (0: stays as it is)")
        why = f"activation.kind is {self.kind!r}"
        refuse_unused("activation", self, "limit", unless=self.kind == "swiglu_clamped", why=why)
        refuse_unused("activation", self, "beta", "linear_beta", unless=self.kind == "situ", why=why)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResidualConfig:
    """How layers add up."""

    kind: Literal["plain", "mhc", "block_attnres"] = "plain"
    """x + f(x); manifold-constrained hyper-connections; or Block AttnRes (softmax over earlier blocks' sums)."""
    num_streams: int = 4
    """`mhc`: residual streams (N)."""
    sinkhorn_iters: int = 20
    """`mhc`: normalisations of the mixing matrix."""
    mhc_eps: float = 1e-6
    """`mhc`: epsilon of the mixing weights."""
    block_size: int = 12
    """`block_attnres`: layers per block."""

    def __post_init__(self):
        require_ranges("residual", self, num_streams=">= 1", sinkhorn_iters=">= 1", mhc_eps="> 0", block_size=">= 1")
        why = f"residual.kind is {self.kind!r}"
        refuse_unused("residual", self, "num_streams", "sinkhorn_iters", "mhc_eps", unless=self.kind == "mhc", why=why)
        refuse_unused("residual", self, "block_size", unless=self.kind == "block_attnres", why=why)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """The precision contract; docs/model.md says what is float32 inside."""

    params: Dtype = "float32"
    """Master weights, gradients and optimizer moments, at least as wide as compute. Gradients are summed over devices and microbatches in it."""
    compute: Dtype = "bfloat16"
    """Activations and matmul inputs. Products accumulate in float32; router, gates, state, softmax, norms and loss are float32 (float64 if this is)."""

    def __post_init__(self):
        sizes = {"bfloat16": 2, "float32": 4, "float64": 8}
        require(
            sizes.get(self.params, 8) >= sizes.get(self.compute, 2),
            f"precision.params={self.params!r} is narrower than precision.compute={self.compute!r}; params={self.compute!r} fits.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only language model."""

    vocab_size: int = 256
    """Tokens (V)."""
    width: int = 128
    """Width of the residual stream (D)."""
    num_layers: int = 4
    """Layers, each a mixer and a feed-forward."""
    mixers: tuple[str, ...] = ("gqa",)
    """Mixer of each layer, repeated along the depth: gqa, mla, dsa, dsa_shared (uses the last dsa layer's keys), gdn, kda."""
    feed_forwards: tuple[str, ...] = ("moe",)
    """Feed-forward of each layer, repeated along the depth: dense, moe."""
    scan_layers: bool = True
    """Stack the layers of a repeating pattern and scan over them. False: each layer on its own, which spares copies between layers, and
    compiles as long as the model is deep. Checkpoints of the two differ."""
    num_dense_layers: int = 0
    """First layers that are dense whatever `feed_forwards` says."""
    dense_hidden: int = 256
    """Hidden width of the dense feed-forward (F)."""
    norm_eps: float = 1e-6
    """Epsilon of the RMSNorms."""
    zero_centred_norm: bool = False
    """RMSNorm scales by 1 + w instead of w (Qwen3-Next)."""
    tie_embeddings: bool = False
    """The output projection is the embedding."""
    logit_cap: float = 0.0
    """Soft cap: logits become logit_cap * tanh(logits / logit_cap), in training and sampling (Gemma 2 has 30); 0: they stay."""
    init_std: float = 0.02
    """Standard deviation of the embedding's initial weights."""
    gqa: GQAConfig = GQAConfig()
    """Mixer `gqa`."""
    mla: MLAConfig = MLAConfig()
    """Mixer `mla`."""
    indexer: IndexerConfig = IndexerConfig()
    """Mixers `dsa` and `dsa_shared`."""
    gdn: GDNConfig = GDNConfig()
    """Mixer `gdn`."""
    kda: KDAConfig = KDAConfig()
    """Mixer `kda`."""
    moe: MoEConfig = MoEConfig()
    """Feed-forward `moe`."""
    activation: ActivationConfig = ActivationConfig()
    """Activation of all MLPs."""
    residual: ResidualConfig = ResidualConfig()
    """How layers add up."""
    precision: PrecisionConfig = PrecisionConfig()
    """Dtypes of weights and activations."""

    def __post_init__(self):
        require_ranges(
            "model", self, vocab_size=">= 1", width=">= 1", num_layers=">= 1", dense_hidden=">= 1", norm_eps="> 0", init_std=">= 0"
        )
        require_ranges("model", self, logit_cap=">= 0 (0: none)")
        for field, names, legal in (("mixers", self.mixers, MIXERS), ("feed_forwards", self.feed_forwards, FEED_FORWARDS)):
            unknown = [name for name in names if name not in legal]
            require(bool(names) and not unknown, f"model.{field}={names} has {unknown or 'no entry'}; legal are {', '.join(legal)}.")
            require(
                len(names) <= self.num_layers, f"model.{field} names {len(names)} layers, more than model.num_layers={self.num_layers}."
            )
        require(
            0 <= self.num_dense_layers <= self.num_layers,
            f"model.num_dense_layers={self.num_dense_layers} must lie between 0 and model.num_layers={self.num_layers}.",
        )
        kinds = [layer.mixer for layer in self.layers()]
        if "dsa_shared" in kinds:
            require("dsa" in kinds[: kinds.index("dsa_shared")], "model.mixers: a dsa_shared layer needs a dsa layer before it.")
        if "dsa" in kinds and self.indexer.base == "mla":
            require(self.mla.q_lora_rank > 0, "model.mla.q_lora_rank=0: the indexer of dsa reads the query latent; set it above 0.")
        self._refuse_unused({layer.feed_forward for layer in self.layers()} | set(kinds))

    def _refuse_unused(self, used: set[str]) -> None:
        sparse = bool(used & {"dsa", "dsa_shared"})
        if sparse and self.indexer.base == "gqa":
            why = "a sparse layer over model.indexer.base='gqa' attends to the keys that its indexer chose, and to no window or sink"
            for name in ("window", "sinks"):
                value = getattr(self.gqa, name)
                require(not value, f"model.gqa.{name}={value}: {why}. Leave it out, or set model.indexer.base='mla'.")
        refuse_unused("model", self, "dense_hidden", unless="dense" in used, why="no layer is dense")
        needed = {
            "gqa": "gqa" in used or (sparse and self.indexer.base == "gqa"),
            "mla": "mla" in used or (sparse and self.indexer.base == "mla"),
            "indexer": sparse,
            "gdn": "gdn" in used,
            "kda": "kda" in used,
            "moe": "moe" in used,
        }
        for name, wanted in needed.items():
            field = type(self).__dataclass_fields__[name]
            if not wanted and getattr(self, name) != field.default:
                raise ConfigError(
                    f"model.{name} is set, but no layer uses it: model.mixers={self.mixers}, "
                    f"model.feed_forwards={self.feed_forwards}. Leave it out, or add such a layer."
                )

    def layers(self) -> tuple["LayerKind", ...]:
        """The kinds of all layers, from first to last."""
        return tuple(
            LayerKind(
                mixer=self.mixers[i % len(self.mixers)],
                feed_forward="dense" if i < self.num_dense_layers else self.feed_forwards[i % len(self.feed_forwards)],
            )
            for i in range(self.num_layers)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """What distinguishes one layer from another; equal kinds can be stacked."""

    mixer: str
    """One of MIXERS."""
    feed_forward: str
    """One of FEED_FORWARDS."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """Layers cut into an unrolled head, a repeated unit that is scanned, and an unrolled tail."""

    head: tuple[LayerKind, ...]
    unit: tuple[LayerKind, ...]
    num_units: int
    tail: tuple[LayerKind, ...]

    def place(self, layer: int) -> tuple[str, int, int | None]:
        """Where a layer's weights lie: section (`head`, `unit`, `tail`), place in it, and index in the stack (unit alone)."""
        body = len(self.unit) * self.num_units
        if layer < len(self.head):
            return "head", layer, None
        if layer < len(self.head) + body:
            unit, place = divmod(layer - len(self.head), len(self.unit))
            return "unit", place, unit
        return "tail", layer - len(self.head) - body, None


def plan_layers(kinds: tuple[LayerKind, ...], *, multiple: int = 1) -> LayerPlan:
    """Cuts layers so that as few as possible are unrolled.

    Args:
      kinds: all layers in order.
      multiple: the unit's length and the head's length must be multiples of it (a residual block must not be cut).
    """
    best = LayerPlan(head=kinds, unit=(), num_units=0, tail=())
    cost = len(kinds)
    total = len(kinds)
    for head in range(0, total, multiple):
        for period in range(multiple, (total - head) // 2 + 1, multiple):
            units = 1
            while kinds[head + units * period : head + (units + 1) * period] == kinds[head : head + period]:
                units += 1
            tail = total - head - units * period
            if units >= 2 and head + period + tail < cost:
                cost = head + period + tail
                best = LayerPlan(
                    head=kinds[:head], unit=kinds[head : head + period], num_units=units, tail=kinds[total - tail :] if tail else ()
                )
    return best
