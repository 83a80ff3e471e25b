"""What the model is: switches, not a class per family."""

import dataclasses
from typing import Literal

from moejax.config.errors import ConfigError, refuse_unused, require, require_ranges
from moejax.config.mixers import GDNConfig, GQAConfig, IndexerConfig, KDAConfig, MLAConfig

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
class RouterConfig:
    """How a token chooses its experts."""

    score: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax"
    """Turns logits into scores, in float32: over all experts, or each alone; or chooses by logit and weighs by a softmax over the chosen
    logits (gpt-oss)."""
    logit_bias: bool = False
    """A trained bias per expert on the logits, part of choice and weights (gpt-oss)."""
    correction_bias: bool = False
    """A bias per expert that enters the choice but not the weights; moved by losses.bias_update, never by the optimizer."""
    num_groups: int = 1
    """Groups of experts, of which groups_kept are open to a token. Node-limited routing: as many groups as nodes."""
    groups_kept: int = 1
    """Groups open to each token, at most num_groups."""
    group_top: int = 2
    """A group scores the sum of its group_top best experts. Node-limited routing of DeepSeek-V3: experts_per_token / groups_kept."""
    renormalise: bool = True
    """Divide the chosen scores by their sum."""
    scale: float = 1.0
    """Factor on the weights of the routed experts."""
    overload_strength: float = 0.0
    """Soft constraint: an expert whose load in this step passes overload_threshold times the mean has its rows' weights multiplied by
    (overload_threshold * mean / load) ** overload_strength, before renormalisation. 0: off."""
    overload_threshold: float = 1.5
    """Load, relative to the mean over experts, from which the soft constraint acts, >= 1."""
    topology_near: float = 0.0
    """What an expert on another device of the token's node loses in the choice, not in its weight; in units of the score, at most topology_far."""
    topology_far: float = 0.0
    """The same for an expert on another node, below 1; 0: distance does not matter."""
    topology_anneal_steps: int = 1000
    """Steps in which both fall linearly to 0; 0: they stay."""

    def __post_init__(self):
        require_ranges(
            "moe.router",
            self,
            group_top=">= 1",
            overload_strength=">= 0 (0: off)",
            overload_threshold=">= 1",
            topology_near=">= 0",
            topology_anneal_steps=">= 0 (0: the bias stays)",
        )
        require(
            1 <= self.groups_kept <= self.num_groups,
            f"moe.router.groups_kept={self.groups_kept} must lie between 1 and moe.router.num_groups={self.num_groups}.",
        )
        require(
            self.topology_near <= self.topology_far < 1,
            f"moe.router.topology_far={self.topology_far} must lie between moe.router.topology_near={self.topology_near} and 1, which no score passes.",
        )
        require(
            not (self.correction_bias and self.score == "softmax_chosen"),
            "moe.router.correction_bias=True has the unit of scores, but moe.router.score='softmax_chosen' chooses by logits; "
            "score='softmax' chooses and weighs the same.",
        )
        for unless, why, names in (
            (self.num_groups > 1, "moe.router.num_groups is 1", ("group_top",)),
            (self.score != "softmax_chosen", "moe.router.score is 'softmax_chosen', whose weights sum to 1", ("renormalise",)),
            (self.overload_strength > 0, "moe.router.overload_strength is 0", ("overload_threshold",)),
            (self.topology_far > 0, "moe.router.topology_far is 0", ("topology_anneal_steps",)),
        ):
            refuse_unused("moe.router", self, *names, unless=unless, why=why)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """A mixture-of-experts feed-forward layer."""

    num_experts: int = 16
    """Routed experts of one layer, over all devices (E)."""
    experts_per_token: int = 4
    """Experts that each token visits (K). At most num_experts."""
    hidden: int = 64
    """Hidden width of one routed expert (F)."""
    shared_hidden: int = 0
    """Hidden width of the shared expert (all shared experts together); 0: none."""
    shared_gate: bool = False
    """Scale the shared expert by a sigmoid of the token (Qwen3-Next)."""
    latent_width: int = 0
    """Width of the latent in which routed experts work (Kimi K3); 0: the model's width."""
    latent_norm: bool = True
    """RMSNorm on the experts' sum before it leaves the latent."""
    capacity_factor: float = 0.0
    """0: dropless, buffers for the worst case. > 0: rows per (sender, receiving device) are this times the mean; more are dropped and counted."""
    transport: Literal["all_to_all", "ragged", "hierarchical"] = "all_to_all"
    """How rows cross mesh.expert: buckets of one static size; the rows that are there and no others (GPU alone); or first to the node,
    each token once for all of its experts there, then inside the node."""
    node_size: int = 0
    """Devices of one node along mesh.expert, side by side; 0: distance is not looked at. Needed by transport='hierarchical' and by
    router.topology_far."""
    overlap_chunks: int = 1
    """Parts of a device's tokens that travel one after the other, so that one part's experts compute while the next part is on its way;
    must divide the tokens of a device. 1: no overlap."""
    router: RouterConfig = RouterConfig()
    """The choice of experts."""

    def __post_init__(self):
        require_ranges(
            "moe",
            self,
            num_experts=">= 1",
            hidden=">= 1",
            shared_hidden=">= 0 (0: no shared expert)",
            latent_width=">= 0 (0: the model's width)",
            capacity_factor=">= 0 (0: dropless)",
            node_size=">= 0 (0: distance is not looked at)",
            overlap_chunks=">= 1",
        )
        for field, wanted in (
            ("moe.transport='hierarchical'", self.transport == "hierarchical"),
            ("moe.router.topology_far", self.router.topology_far > 0),
        ):
            require(not wanted or self.node_size > 0, f"{field} needs moe.node_size, the devices of one node along mesh.expert; it is 0.")
        refuse_unused("moe", self, "shared_gate", unless=self.shared_hidden > 0, why="moe.shared_hidden=0, there is no shared expert")
        refuse_unused("moe", self, "latent_norm", unless=self.latent_width > 0, why="moe.latent_width=0, there is no latent")
        require(
            0 < self.experts_per_token <= self.num_experts,
            f"moe.experts_per_token={self.experts_per_token} must lie between 1 and moe.num_experts={self.num_experts}.",
        )
        groups = self.router.num_groups
        require(self.num_experts % groups == 0, f"moe.router.num_groups={groups} must divide moe.num_experts={self.num_experts}.")
        open_experts = self.num_experts // groups * self.router.groups_kept
        require(
            self.experts_per_token <= open_experts,
            f"moe.experts_per_token={self.experts_per_token} is more than the {open_experts} experts of moe.router.groups_kept="
            f"{self.router.groups_kept} groups.",
        )
        require(
            groups == 1 or self.num_experts // groups >= self.router.group_top,
            f"moe.router.num_groups={groups} leaves {self.num_experts // groups} experts a group, fewer than moe.router.group_top={self.router.group_top}.",
        )


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
