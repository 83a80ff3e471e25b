"""What a layer keeps for its backward pass, and where."""

import dataclasses
from typing import Literal

from moejax.config.errors import ConfigError, refuse_unused, require, require_ranges

Choice = Literal["keep", "offload", "recompute"]
RESULTS = {
    "layer_input": "what enters a layer: the residual stream, with block_attnres the finished blocks too",
    "residual_mix": "mhc and block_attnres: the mix that a sublayer reads, and the logits of its weights",
    "norm": "the mixer's and the feed-forward's normalised inputs",
    "latent": "mla: the down-projections of keys and values, and of queries where they have one",
    "query": "the queries' projection; gqa with an output gate: the gate too",
    "key_value": "the keys' and values' projections; gdn: queries and output gate too, which one product makes",
    "conv": "kda, gdn: the short convolutions' results",
    "decay": "kda, gdn: the projections that make decays and write strengths",
    "chunk_states": "kda, gdn: the delta rule's output, its states per chunk and small matrices",
    "index_inputs": "dsa with an index loss: the indexer's queries, keys and head weights",
    "index_ids": "dsa: the chosen keys",
    "attention": "softmax attention: its output and log-sum-exp",
    "output_gate": "kda, mla: the output gate's projections",
    "mixer_out": "the mixer's output projection",
    "dense_hidden": "dense feed-forward: gate and up",
    "router_logits": "the router's logits",
    "dispatch_plan": "the chosen experts and where each row goes",
    "expert_rows": "the rows as the experts take them, after the exchange",
    "expert_hidden": "the experts' gate and up",
    "expert_out": "the experts' results, at home again",
    "shared_hidden": "the shared expert's gate and up",
    "shared_out": "the shared expert's result, where it is gated",
}
"""Results of a layer that are worth a choice, in the order in which they are made."""
INPUTS = ("layer_input",)
"""Nothing that they could be computed from is there any more."""
CHOSEN = ("index_ids", "dispatch_plan")
"""Computed again, ties could fall differently: the backward pass would be that of another layer."""
LEAN = (*INPUTS, *CHOSEN)
BALANCED = (*LEAN, "residual_mix", "latent", "chunk_states", "attention", "mixer_out", "router_logits", "expert_rows")
"""What takes the sequence, the width of the residual stream or an exchange to compute; per token it is little beside the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """Which results of a layer are kept for its backward pass, and where; `moejax show CONFIG --memory` lists them, and docs/memory.md."""

    preset: Literal["fast", "balanced", "lean", "auto"] = "fast"
    """`fast`: keep all. `balanced`: results of exchanges and of mixing along the sequence. `lean`: layer inputs. `auto`: what fits budget_gb."""
    keep: tuple[str, ...] = ()
    """Names that are kept where the preset says otherwise."""
    offload: tuple[str, ...] = ()
    """Names that go to pinned host memory and come back for the backward pass. XLA's CPU backend leaves them where they are."""
    recompute: tuple[str, ...] = ()
    """Names that are computed again. Layer inputs and choices (`index_ids`, `dispatch_plan`) cannot be."""
    budget_gb: float = 0.0
    """`auto`: 1e9 bytes on each device for what is kept between the passes."""
    compute_tflops: float = 400.0
    """Rate of recomputed matmuls, 1e12 FLOP/s."""
    memory_gb_per_s: float = 4800.0
    """Bandwidth of device memory: a result that is recomputed is read and written at least once."""
    copy_gb_per_s: float = 55.0
    """Rate of copies between device and host, each way."""
    exchange_gb_per_s: float = 450.0
    """Rate at which a device sends rows to others."""

    def __post_init__(self):
        rates = ("compute_tflops", "memory_gb_per_s", "copy_gb_per_s", "exchange_gb_per_s")
        require_ranges("memory", self, budget_gb=">= 0", **dict.fromkeys(rates, "> 0"))
        refuse_unused("memory", self, "budget_gb", unless=self.preset == "auto", why=f"memory.preset is {self.preset!r}")
        require(self.preset != "auto" or self.budget_gb > 0, "memory.budget_gb=0.0 must be above 0 with memory.preset='auto'.")
        seen: dict[str, str] = {}
        for choice, names in self.overrides().items():
            for name in names:
                require(name in RESULTS, f"memory.{choice} names {name!r}, which is no result of a layer; legal are {', '.join(RESULTS)}.")
                if name in seen:
                    raise ConfigError(f"memory.{choice} and memory.{seen[name]} both name {name!r}; leave it in one.")
                seen[name] = choice
        for name in self.recompute:
            why = "nothing is left to compute it from" if name in INPUTS else "ties could fall differently the second time"
            require(name not in LEAN, f"memory.recompute names {name!r}: {why}; keep or offload fits.")
        refuse_unused("memory", self, "keep", unless=self.preset != "fast", why="memory.preset is 'fast', which keeps every name")

    def overrides(self) -> dict[Choice, tuple[str, ...]]:
        """Names by what the config says of them, apart from the preset."""
        return {"keep": self.keep, "offload": self.offload, "recompute": self.recompute}
