"""Named results of the layers: their bytes and what it takes to make them, by formula from the config alone.

The names are those of `moejax.config.memory.RESULTS`; FLOPs are those of the matmuls, as in `counting`.
"""

import dataclasses

import jax.numpy as jnp

from moejax.config.memory import RESULTS
from moejax.config.model import LayerKind, ModelConfig
from moejax.memory.results import Cost, Result
from moejax.model import counting
from moejax.moe import overflow
from moejax.moe.expert_parallel import Stage, stages

INT_BYTES = 4
XLA_CHUNK, GPU_CHUNK = 16, 64
"""Tokens of a chunk of the delta rules, on a CPU and in the Triton kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the bytes depend on beside the model."""

    rows: int
    """Sequences of one microbatch on one device."""
    length: int
    """Tokens of a sequence."""
    expert_devices: int = 1
    """Devices of the mesh's expert axis."""
    gpu: bool = True
    """Whether the Triton kernels run."""
    index: str = "none"
    """Loss of the indexers."""

    @property
    def tokens(self) -> int:
        """Of one microbatch on one device."""
        return self.rows * self.length


@dataclasses.dataclass(frozen=True, slots=True)
class _Numbers:
    """A layer's results as numbers per token."""

    config: ModelConfig
    setting: Setting

    @property
    def item(self) -> int:
        return jnp.dtype(self.config.precision.compute).itemsize

    @property
    def wide(self) -> int:
        """Bytes of a number in delicate arithmetic."""
        return max(self.item, 4)

    def cost(self, numbers: float, *, flops: float = 0.0, wide: float = 0.0, ints: float = 0.0) -> Cost:
        """Of so many numbers and FLOPs per token; `wide` and `ints` are numbers too."""
        tokens = self.setting.tokens
        return Cost(result_bytes=round(tokens * (numbers * self.item + wide * self.wide + ints * INT_BYTES)), flops=tokens * flops)

    def layer(self) -> dict[str, Cost]:
        """What every layer makes."""
        residual, width = self.config.residual, self.config.width
        costs = {"norm": self.cost(2 * width)}
        if residual.kind == "plain":
            return costs | {"layer_input": self.cost(width)}
        if residual.kind == "mhc":
            streams = residual.num_streams
            outputs = (2 + streams) * streams
            mix = self.cost(2 * width, wide=2 * outputs, flops=2 * 2 * outputs * streams * width)
            return costs | {"layer_input": self.cost(streams * width), "residual_mix": mix}
        entries = -(-self.config.num_layers // residual.block_size) + 1
        mix = self.cost(2 * width, wide=2 * entries, flops=2 * 4 * width * entries)
        return costs | {"layer_input": self.cost(entries * width), "residual_mix": mix}

    def gqa(self) -> dict[str, Cost]:
        gqa, width = self.config.gqa, self.config.width
        query, keys = gqa.num_heads * gqa.head_dim * (2 if gqa.output_gate else 1), 2 * gqa.num_kv_heads * gqa.head_dim
        return {
            "query": self.cost(query, flops=2 * width * query),
            "key_value": self.cost(keys, flops=2 * width * keys),
            "mixer_out": self.cost(width, flops=2 * gqa.num_heads * gqa.head_dim * width),
        }

    def mla(self) -> dict[str, Cost]:
        mla, width = self.config.mla, self.config.width
        latent = mla.q_lora_rank + mla.kv_lora_rank + mla.rope_dim
        query, keys = mla.num_heads * (mla.nope_dim + mla.rope_dim), mla.num_heads * (mla.nope_dim + mla.value_dim)
        values = mla.num_heads * mla.value_dim
        costs = {
            "latent": self.cost(latent, flops=2 * width * latent),
            "query": self.cost(query, flops=2 * (mla.q_lora_rank or width) * query),
            "key_value": self.cost(keys, flops=2 * mla.kv_lora_rank * keys),
            "mixer_out": self.cost(width, flops=2 * values * width),
        }
        return costs | ({"output_gate": self.cost(values, flops=2 * width * values)} if mla.output_gate else {})

    def attention(self, base: str, keys: float, *, log_sum: bool = True) -> Cost:
        """Of queries that see so many keys each, on average."""
        heads, values = (self.config.mla.num_heads, self.config.mla.value_dim) if base == "mla" else (self.config.gqa.num_heads, None)
        values = self.config.gqa.head_dim if values is None else values
        return self.cost(heads * values, wide=heads if log_sum else 0, flops=counting.attention_flops(self.config, base, keys))

    def mixer(self, kind: str) -> dict[str, Cost]:
        """What a mixer makes."""
        length, index = self.setting.length, self.config.indexer
        if kind in ("gqa", "mla"):
            window = self.config.gqa.window if kind == "gqa" else 0
            own = self.gqa() if kind == "gqa" else self.mla()
            return own | {"attention": self.attention(kind, counting.mean_keys(window or length, length))}
        if kind == "kda":
            return self.kda()
        if kind == "gdn":
            return self.gdn()
        costs = self.mla() if index.base == "mla" else self.gqa()
        if self.setting.index == "dense":
            costs["attention"] = self.attention(index.base, counting.mean_keys(length, length))
        else:
            chosen = index.topk + (index.pool - 1)
            gathered = not self.setting.gpu and length > 4 * chosen  # XLA keeps no log-sum-exp where it gathers keys
            costs["attention"] = self.attention(index.base, counting.mean_keys(index.topk, length), log_sum=not gathered)
            costs["index_ids"] = self.cost(0, ints=chosen)
        if kind == "dsa" and self.setting.index != "none":
            keys, latent = index.num_heads * index.head_dim, self.config.mla.q_lora_rank if index.base == "mla" else self.config.width
            flops = 2 * (latent * keys + self.config.width * (index.head_dim + index.num_heads))
            costs["index_inputs"] = self.cost(keys + index.head_dim, wide=index.num_heads, flops=flops)
        return costs

    def kda(self) -> dict[str, Cost]:
        kda, width = self.config.kda, self.config.width
        heads, groups, key, value = kda.num_heads, kda.num_key_heads or kda.num_heads, kda.key_dim, kda.value_dim
        low, gate = 0 if kda.full_rank_gate else value, heads * value
        gate_flops = 2 * width * gate if kda.full_rank_gate else 2 * (width * value + value * gate)
        return {
            "query": self.cost(groups * key, flops=2 * width * groups * key),
            "key_value": self.cost(groups * key + heads * value, flops=2 * width * (groups * key + heads * value)),
            "conv": self.cost(2 * groups * key + heads * value),
            "decay": self.cost(key + heads * key + heads, flops=2 * (width * key + key * heads * key + width * heads)),
            "chunk_states": self.chunk_states(heads, key, value),
            "output_gate": self.cost(low + gate, flops=gate_flops),
            "mixer_out": self.cost(width, flops=2 * heads * value * width),
        }

    def gdn(self) -> dict[str, Cost]:
        gdn, width = self.config.gdn, self.config.width
        heads, groups, key, value = gdn.num_heads, gdn.num_key_heads, gdn.key_dim, gdn.value_dim
        joined = 2 * groups * key + 2 * heads * value
        return {
            "key_value": self.cost(joined, flops=2 * width * joined),
            "conv": self.cost(joined - heads * value),
            "decay": self.cost(2 * heads, flops=2 * width * 2 * heads),
            "chunk_states": self.chunk_states(heads, key, value),
            "mixer_out": self.cost(width, flops=2 * heads * value * width),
        }

    def chunk_states(self, heads: int, key: int, value: int) -> Cost:
        """The output, and per chunk two square matrices and a state; on a CPU the written values too, all in the dtype of the computation."""
        length, flops = self.setting.length, counting.delta_rule_flops(heads, key, value)
        if self.setting.gpu:
            filled = -(-length // GPU_CHUNK) * GPU_CHUNK / length
            return self.cost(heads * (value + filled * (2 * GPU_CHUNK + key * value / GPU_CHUNK)), flops=flops)
        filled = -(-length // XLA_CHUNK) * XLA_CHUNK / length
        return self.cost(heads * value, wide=heads * filled * (2 * XLA_CHUNK + value + key * value / XLA_CHUNK), flops=flops)

    def feed_forward(self, kind: str) -> dict[str, Cost]:
        """What a feed-forward makes."""
        width, moe = self.config.width, self.config.moe
        if kind == "dense":
            hidden = 2 * self.config.dense_hidden
            return {"dense_hidden": self.cost(hidden, flops=2 * width * hidden)}
        costs = {"router_logits": self.cost(0, wide=moe.num_experts, flops=2 * width * moe.num_experts)} | self.experts()
        if moe.shared_hidden:
            costs["shared_hidden"] = self.cost(2 * moe.shared_hidden, flops=4 * width * moe.shared_hidden)
            if moe.shared_gate:
                costs["shared_out"] = self.cost(width, flops=2 * moe.shared_hidden * width)
        return costs

    def experts(self) -> dict[str, Cost]:
        """Along the chain to the experts and back. Bytes are those of whole buffers, FLOPs those of the rows that are there."""
        moe, tokens, devices = self.config.moe, self.setting.tokens, self.setting.expert_devices
        width, k, chunks = moe.latent_width or self.config.width, moe.experts_per_token, moe.overlap_chunks
        slots = moe.num_experts // devices + (moe.copies.per_device if moe.copies.every else 0)
        outer, inner = stages(moe, slots, devices, k)
        part = tokens // chunks
        plan = tokens * k + moe.num_experts + (tokens * k if moe.copies.every else 0)  # choices and loads; slots
        arrived, home = part, 0
        if outer is not None:  # one row for each token and node
            arrived = outer.peers.num * outer.bucket(part, part)
            plan += chunks * (_plan_ints(outer, part, arrived, k) + arrived * k)  # and the choices that come along
            home += chunks * arrived
        num_rows = inner.peers.num * inner.bucket(arrived, part)
        plan += chunks * (_plan_ints(inner, arrived, num_rows, k) + inner.peers.num * inner.slots_per_peer)  # and the counts of the others
        if inner.peers.num > 1:
            plan += chunks * (2 * num_rows + inner.slots_per_peer)  # the grouping of what arrives
        plan_bytes = INT_BYTES * plan
        if (similar := overflow.of(moe)) is not None:
            plan_bytes += chunks * similar.num_rows(part * k) * (INT_BYTES + self.wide)
        rows_bytes, home_bytes = (round(chunks * num_rows * width * self.item), round((chunks * num_rows + home) * width * self.item))
        sent_bytes = rows_bytes * (inner.peers.num - 1) / inner.peers.num
        if outer is not None:
            sent_bytes += home * width * self.item * (outer.peers.num - 1) / outer.peers.num
        return {
            "dispatch_plan": Cost(result_bytes=plan_bytes),
            "expert_rows": Cost(result_bytes=rows_bytes, flops=tokens * 2 * self.config.width * moe.latent_width, sent_bytes=sent_bytes),
            "expert_hidden": Cost(
                result_bytes=round(chunks * num_rows * 2 * moe.hidden * self.item), flops=tokens * k * 4 * width * moe.hidden
            ),
            "expert_out": Cost(result_bytes=home_bytes, flops=tokens * k * 2 * moe.hidden * width, sent_bytes=sent_bytes),
        }


def _plan_ints(stage: Stage, num_tokens: int, num_rows: int, k: int) -> int:
    """Numbers of a stage's plan: sources and slots of rows, counts, starts, and what asked for a place."""
    return num_rows + num_tokens * k + stage.peers.num * (stage.slots_per_peer + 2)


def layer_costs(config: ModelConfig, kind: LayerKind, setting: Setting) -> dict[str, dict[str, Cost]]:
    """Maker -> name -> cost, of one layer."""
    numbers = _Numbers(config, setting)
    return {"layer": numbers.layer(), kind.mixer: numbers.mixer(kind.mixer), kind.feed_forward: numbers.feed_forward(kind.feed_forward)}


def results(config: ModelConfig, setting: Setting) -> list[Result]:
    """All results of the model, in the order in which names are listed."""
    counts: dict[tuple[str, str], int] = {}
    costs: dict[tuple[str, str], Cost] = {}
    for kind in config.layers():
        for maker, named in layer_costs(config, kind, setting).items():
            for name, cost in named.items():
                counts[name, maker] = counts.get((name, maker), 0) + 1
                costs[name, maker] = cost
    order = {name: place for place, name in enumerate(RESULTS)}
    found = sorted(costs.items(), key=lambda item: order[item[0][0]])
    return [Result(name=name, maker=maker, layers=counts[name, maker], cost=cost) for (name, maker), cost in found]
