"""Switches of the sequence mixers: what one layer does along the sequence."""

import dataclasses
from typing import Literal

from moejax.config.errors import refuse_unused, require, require_ranges


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer."""

    kind: Literal["none", "half", "interleaved"] = "half"
    """How channels pair up: `half` (i with i + dim/2), `interleaved` (2i with 2i + 1), or no rotation."""
    theta: float = 10_000.0
    """Base of the geometric series of wavelengths, > 0."""
    yarn_factor: float = 1.0
    """YaRN: how many times longer the context is than in pre-training; 1 switches YaRN off."""
    yarn_original_length: int = 4096
    """YaRN: positions seen in pre-training."""
    yarn_beta_fast: float = 32.0
    """YaRN: rotations within the original length above which a channel pair is left as it is."""
    yarn_beta_slow: float = 1.0
    """YaRN: rotations below which a pair is interpolated fully."""
    yarn_mscale: float = 1.0
    """YaRN: factor of the logarithmic correction of cosine and sine."""
    yarn_mscale_all_dim: float = 0.0
    """YaRN: factor of the logarithmic correction of the attention scale (0: none)."""

    def __post_init__(self):
        require_ranges(
            "rope",
            self,
            theta="> 0",
            yarn_factor=">= 1 (1: no YaRN)",
            yarn_original_length=">= 1",
            yarn_beta_fast="> 0",
            yarn_beta_slow="> 0",
            yarn_mscale=">= 0",
            yarn_mscale_all_dim=">= 0",
        )
        refuse_unused("rope", self, "theta", "yarn_factor", unless=self.kind != "none", why="kind='none' rotates nothing")
        yarn = ("yarn_original_length", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim")
        refuse_unused("rope", self, *yarn, unless=self.yarn_factor > 1, why="yarn_factor=1 switches YaRN off")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GQAConfig:
    """Grouped-query softmax attention (mixer `gqa`, and `dsa` with `indexer.base = "gqa"`)."""

    num_heads: int = 4
    """Query heads (H)."""
    num_kv_heads: int = 2
    """Key and value heads (G); divides num_heads."""
    head_dim: int = 64
    """Channels per head (C and M)."""
    rotary_dim: int = 0
    """Leading channels that are rotated; 0: all of them. Even."""
    qk_norm: bool = False
    """RMSNorm over each head's channels of q and k before the rotation."""
    output_gate: bool = False
    """Sigmoid gate per channel before the output projection; q's projection becomes twice as wide (Qwen3-Next)."""
    window: int = 0
    """Sliding window in tokens, the token itself included; 0: no window."""
    sinks: bool = False
    """One learned logit per head that takes part in the softmax without a value."""
    rope: RopeConfig = RopeConfig()
    """Rotation of q and k."""

    def __post_init__(self):
        require_ranges("gqa", self, num_heads=">= 1", num_kv_heads=">= 1", head_dim=">= 1", window=">= 0 (0: no window)")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"gqa.num_kv_heads={self.num_kv_heads} must divide gqa.num_heads={self.num_heads}.",
        )
        require(
            0 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"gqa.rotary_dim={self.rotary_dim} must be even and at most gqa.head_dim={self.head_dim}.",
        )
        refuse_unused("gqa", self, "rotary_dim", unless=self.rope.kind != "none", why="gqa.rope.kind='none' rotates nothing")
        require(
            self.rope.kind == "none" or self.rotary_dim > 0 or self.head_dim % 2 == 0,
            f"gqa.head_dim={self.head_dim} is odd, and a rotation turns pairs of channels; an even one fits, or an even gqa.rotary_dim below "
            "it, or gqa.rope.kind='none'.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MLAConfig:
    """Multi-head latent attention (mixer `mla`, and `dsa` with `indexer.base = "mla"`)."""

    num_heads: int = 4
    """Query heads (H)."""
    q_lora_rank: int = 0
    """Width of the query latent; 0: one full projection (an indexer needs a latent)."""
    kv_lora_rank: int = 64
    """Width of the key-value latent."""
    nope_dim: int = 32
    """Channels per head without rotation."""
    rope_dim: int = 16
    """Channels per head taken from the shared rotary key; they stay unrotated if rope.kind is `none`."""
    value_dim: int = 32
    """Value channels per head (M)."""
    latent_norm_eps: float = 1e-6
    """Epsilon of the two latent RMSNorms."""
    output_gate: bool = False
    """Sigmoid gate per channel before the output projection (Kimi K3)."""
    rope: RopeConfig = RopeConfig(kind="interleaved")
    """Rotation of the rope_dim channels."""

    def __post_init__(self):
        require_ranges(
            "mla",
            self,
            num_heads=">= 1",
            q_lora_rank=">= 0 (0: one full projection)",
            kv_lora_rank=">= 1",
            nope_dim=">= 0",
            rope_dim=">= 0",
            value_dim=">= 1",
            latent_norm_eps="> 0",
        )
        require(
            self.nope_dim + self.rope_dim > 0,
            f"mla.nope_dim={self.nope_dim} and mla.rope_dim={self.rope_dim} leave no channel; one of them must be at least 1.",
        )
        require(
            self.rope.kind == "none" or self.rope_dim % 2 == 0,
            f"mla.rope_dim={self.rope_dim} is odd, and a rotation turns pairs of channels; an even one fits, or mla.rope.kind='none'.",
        )
        refuse_unused(
            "mla", self, "rope", unless=self.rope_dim > 0 or self.rope.kind == "none", why="mla.rope_dim=0 has no channel to rotate"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IndexerConfig:
    """The indexer of sparse attention (mixers `dsa` and `dsa_shared`): picks the keys that a query may see."""

    base: Literal["mla", "gqa"] = "mla"
    """Attention that runs over the chosen keys."""
    num_heads: int = 4
    """Index heads (J)."""
    head_dim: int = 32
    """Channels per index head."""
    topk: int = 256
    """Keys per query. With pooling: topk / pool pools, and up to pool - 1 tokens of the unfinished pool on top."""
    pool: int = 1
    """Tokens per pooled index key; 1: plain indexer. Divides topk."""
    rotary_dim: int = 0
    """Leading index channels that are rotated; 0: none."""
    rope: RopeConfig = RopeConfig(kind="half")
    """Rotation of the index channels (frequencies follow this, not the base's)."""

    def __post_init__(self):
        require_ranges("indexer", self, num_heads=">= 1", head_dim=">= 1", topk=">= 1", pool=">= 1 (1: plain indexer)")
        require(self.topk % self.pool == 0, f"indexer.pool={self.pool} must divide indexer.topk={self.topk}.")
        require(
            0 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"indexer.rotary_dim={self.rotary_dim} must be even and at most indexer.head_dim={self.head_dim}.",
        )
        rotates = self.rotary_dim > 0
        require(
            not rotates or self.rope.kind != "none",
            f"indexer.rotary_dim={self.rotary_dim} would be ignored: indexer.rope.kind='none' rotates nothing. 0 fits, or another kind.",
        )
        refuse_unused("indexer", self, "rope", unless=rotates or self.rope.kind == "none", why="indexer.rotary_dim=0 rotates nothing")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GDNConfig:
    """Gated DeltaNet (mixer `gdn`): one decay per head."""

    num_key_heads: int = 2
    """Query and key heads (G)."""
    num_heads: int = 4
    """Value heads (H), a multiple of num_key_heads."""
    key_dim: int = 32
    """Key channels per head (C)."""
    value_dim: int = 32
    """Value channels per head (M)."""

    def __post_init__(self):
        require_ranges("gdn", self, num_key_heads=">= 1", num_heads=">= 1", key_dim=">= 1", value_dim=">= 1")
        require(
            self.num_heads % self.num_key_heads == 0,
            f"gdn.num_key_heads={self.num_key_heads} must divide gdn.num_heads={self.num_heads}.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KDAConfig:
    """Kimi Delta Attention (mixer `kda`): one decay per key channel."""

    num_heads: int = 4
    """Value heads (H)."""
    num_key_heads: int = 0
    """Query and key heads (G), a divisor of num_heads; 0: as many as num_heads."""
    key_dim: int = 32
    """Key channels per head (C); also the rank of the decay's projection."""
    value_dim: int = 32
    """Value channels per head (M)."""
    decay: Literal["softplus", "bounded"] = "bounded"
    """`softplus`: -exp(A) softplus(a + b), unbounded. `bounded`: lower_bound * sigmoid(exp(A) (a + b)), fast form allowed."""
    lower_bound: float = -5.0
    """Smallest log-decay of one step under `bounded`, in nats; between -5 and 0."""
    full_rank_gate: bool = False
    """Output gate by one full projection instead of one of rank value_dim."""

    def __post_init__(self):
        require_ranges("kda", self, num_heads=">= 1", num_key_heads=">= 0 (0: as many as num_heads)", key_dim=">= 1", value_dim=">= 1")
        refuse_unused("kda", self, "lower_bound", unless=self.decay == "bounded", why=f"kda.decay={self.decay!r} has no bound")
        require(-5 <= self.lower_bound < 0, f"kda.lower_bound={self.lower_bound} must lie in [-5, 0): the chunked form relies on it.")
        require(
            self.num_heads % (self.num_key_heads or self.num_heads) == 0,
            f"kda.num_key_heads={self.num_key_heads} must divide kda.num_heads={self.num_heads}.",
        )
