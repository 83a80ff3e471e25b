"""The mixture-of-experts layer: its experts, router, capacity, copies and traffic."""

import dataclasses
from typing import Literal

from moejax.config.errors import refuse_unused, require, require_ranges


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
        require(self.num_groups >= 1, f"moe.router.num_groups={self.num_groups} must be >= 1.")
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
class AdaptiveConfig:
    """Capacity of each layer by what it drops. moe.capacity_factor is where it begins."""

    highest: float = 0.0
    """Largest capacity factor; 0: moe.capacity_factor stays as it is."""
    lowest: float = 1.0
    """Smallest capacity factor."""
    patience: int = 10
    """Steps in a row that must ask for a change."""
    drop_rate: float = 0.01
    """A step asks for more if a larger share of the layer's rows finds no place."""
    spare: float = 0.1
    """A step asks for less if nothing is dropped and even the fullest bucket (the mean over microbatches) would leave this share of the
    capacity empty."""
    step: float = 1.1
    """Factor by which the capacity grows or shrinks, > 1."""
    buffers: int = 3
    """Sizes of buffers between lowest and highest that a run may compile for; a layer's capacity moves freely below the current one."""

    def __post_init__(self):
        require_ranges(
            "moe.adaptive",
            self,
            highest=">= 0 (0: the capacity stays)",
            lowest="> 0",
            patience=">= 1",
            drop_rate=">= 0",
            spare=">= 0",
            step="> 1",
            buffers=">= 1",
        )
        require(
            not 0 < self.highest <= self.lowest,
            f"moe.adaptive.highest={self.highest} must pass moe.adaptive.lowest={self.lowest}.",
        )
        require(self.spare < 1, f"moe.adaptive.spare={self.spare} must be below 1, or no capacity is ever lowered.")
        names = ("lowest", "patience", "drop_rate", "spare", "step", "buffers")
        refuse_unused("moe.adaptive", self, *names, unless=self.highest > 0, why="moe.adaptive.highest is 0")

    def sizes(self) -> tuple[float, ...]:
        """Capacity factors that buffers are made for, the smallest first, at even ratios."""
        ratio = self.highest / self.lowest
        return (*(self.lowest * ratio ** (i / self.buffers) for i in range(1, self.buffers)), self.highest)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CopiesConfig:
    """Hot experts: where experts live and which of them have copies, decided anew from counted loads."""

    every: int = 0
    """Steps between decisions; 0: every expert stays at home, without copies."""
    per_device: int = 1
    """Copies that a device has room for. Their weights are fetched in every step."""
    move: bool = False
    """Experts may also change their home, with moe.node_size so that those often chosen together sit in one node; weights and moments move."""
    gain: float = 0.05
    """A decision is carried out if the largest load of a device falls by more than this share of the mean, or as large a share of the pairs
    of experts that one token chose comes together in a node."""

    def __post_init__(self):
        require_ranges("moe.copies", self, every=">= 0 (0: no copies)", per_device=">= 0", gain=">= 0")
        require(
            self.per_device > 0 or self.move or not self.every,
            "moe.copies.per_device=0 with moe.copies.move=False leaves nothing to decide every moe.copies.every steps; per_device=1 fits.",
        )
        refuse_unused("moe.copies", self, "per_device", "move", "gain", unless=self.every > 0, why="moe.copies.every is 0")


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
    adaptive: AdaptiveConfig = AdaptiveConfig()
    """Capacity that follows what is dropped."""
    overflow: Literal["renormalise", "similar"] = "renormalise"
    """What becomes of the weight of a row that finds no place: the other experts of its token take it over; or the token takes the result
    of the kept row of the same expert whose input is most similar, with the cosine as part of the weight (candidates: overflow_candidates)."""
    overflow_share: float = 0.02
    """`similar`: share of a device's rows that may take another's result; the weight of further ones is lost, and counted."""
    overflow_candidates: int = 16
    """`similar`: kept rows of the expert that are looked at, spread evenly over them."""
    copies: CopiesConfig = CopiesConfig()
    """Copies of hot experts."""
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
            overflow_share="> 0",
            overflow_candidates=">= 1",
            node_size=">= 0 (0: distance is not looked at)",
            overlap_chunks=">= 1",
        )
        require(self.overflow_share <= 1, f"moe.overflow_share={self.overflow_share} is a share of a device's rows; at most 1 fits.")
        dropless, similar = self.capacity_factor == 0, self.overflow == "similar"
        refuse_unused("moe", self, "adaptive", "overflow", unless=not dropless, why="moe.capacity_factor=0, nothing is dropped")
        refuse_unused("moe", self, "overflow_share", "overflow_candidates", unless=similar, why=f"moe.overflow is {self.overflow!r}")
        require(
            not (similar and self.transport == "hierarchical"),
            "moe.overflow='similar' looks at kept rows where tokens are at home, and moe.transport='hierarchical' also drops them on the way; "
            "overflow='renormalise' fits.",
        )
        if self.adaptive.highest:
            low, high = self.adaptive.lowest, self.adaptive.highest
            require(
                low <= self.capacity_factor <= high,
                f"moe.capacity_factor={self.capacity_factor} must lie between moe.adaptive.lowest={low} and moe.adaptive.highest={high}.",
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
