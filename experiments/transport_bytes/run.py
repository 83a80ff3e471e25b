"""Bytes that each transport of the MoE chain sends, read from the compiled module, beside the formula. Needs no GPU.

JAX_PLATFORMS=cpu python experiments/transport_bytes/run.py       # prints the table of the README
"""

import dataclasses
import functools
import math

import jax

from moejax.config.mesh import MeshConfig
from moejax.config.model import ModelConfig, PrecisionConfig
from moejax.config.moe import MoEConfig, RouterConfig
from moejax.parallel.mesh import make_mesh
from moejax.parallel.xla_flags import options_for
from moejax.plan.layer import lower_moe_layer
from moejax.plan.schedule import Exchange, exchanges
from moejax.plan.targets import TARGETS, devices

NODES, PER_NODE, TOKENS, EXPERTS, CHOSEN, LATENT = 8, 8, 8192, 896, 16, 3584
DEVICES = NODES * PER_NODE
ROW_BYTES = 2 * LATENT
"""bfloat16, at the latent width."""
WAYS = 4
"""There and back, and both again for the gradients."""
COUNTS_BYTES = 4 * EXPERTS
"""Flat: int32 rows per device and expert, sent once."""
CHOICES_BYTES = 3 * 4 * CHOSEN + 2 * 4
"""Hierarchical, beside each row that goes to a node: its slots, its weights and their gradients; and a sum of weights with its gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes a device, forward and backward of one layer."""

    transport: str
    factor: float
    """Capacity factor of the buckets."""
    across: float
    """To other nodes, read from the module."""
    formula: float
    inside: float
    """To other devices of its node, read from the module."""


def formula(transport: str, factor: float) -> float:
    """Copies sent to other nodes x bytes of a row x bucket factor, and metadata."""
    remote = 1 - 1 / NODES
    if transport == "hierarchical":  # one copy to each of the D(8) nodes that a token's experts lie on
        missed = math.comb(EXPERTS - EXPERTS // NODES, CHOSEN) / math.comb(EXPERTS, CHOSEN)
        copies = min(factor * NODES * (1 - missed), NODES)  # no bucket is larger than all tokens
        return TOKENS * copies * remote * (WAYS * ROW_BYTES + CHOICES_BYTES)
    return remote * (TOKENS * factor * CHOSEN * WAYS * ROW_BYTES + COUNTS_BYTES)


def sent_bytes(exchange: Exchange, *, across: bool) -> float:
    """What a device sends to other nodes, or to others of its own. Each member of a group gets an equal part of the operand."""
    (group, *_) = exchange.groups
    here = group[0] // PER_NODE
    receivers = [device for device in group if device != group[0] and (device // PER_NODE != here) == across]
    return exchange.operand_bytes * len(receivers) / len(group)


@functools.cache
def compiled(transport: str, factor: float) -> jax.stages.Compiled:
    """Kimi K3's layer without its shared expert, forward and backward, for 64 H200s."""
    moe = MoEConfig(
        num_experts=EXPERTS,
        experts_per_token=CHOSEN,
        hidden=3072,
        latent_width=LATENT,
        capacity_factor=factor,
        transport=transport,  # pyright: ignore[reportArgumentType]
        node_size=PER_NODE if transport == "hierarchical" else 0,
        router=RouterConfig(score="sigmoid", correction_bias=True),
    )
    model = ModelConfig(width=2 * LATENT, num_layers=1, moe=moe, precision=PrecisionConfig(params="bfloat16"))
    mesh = make_mesh(MeshConfig(fsdp=1, expert=DEVICES), devices(TARGETS["h200"], DEVICES))
    options = options_for(mesh.devices.flat[0]).taken
    return lower_moe_layer(model, mesh, tokens_per_device=TOKENS).compile(compiler_options=options)


def measure(transport: str, factor: float) -> Row:
    """One line of the table."""
    found = exchanges(compiled(transport, factor), "all-to-all")
    across, inside = (sum(sent_bytes(exchange, across=way) for exchange in found) for way in (True, False))
    return Row(transport=transport, factor=factor, across=across, formula=formula(transport, factor), inside=inside)


def ragged_exchanges() -> int:
    """How many exchanges a program with transport="ragged" has; how much they send is known only when it runs."""
    return len(exchanges(compiled("ragged", 1.1), "ragged-all-to-all"))


def main() -> None:
    titles = ("transport", "factor", "to other nodes, GB", "formula, GB", "read / formula", "of flat", "inside the node, GB")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for factor in (1.1, 1.25):
        rows = [measure(transport, factor) for transport in ("all_to_all", "hierarchical")]
        for row in rows:
            print(
                f"| {row.transport} | {factor} | {row.across / 1e9:.4f} | {row.formula / 1e9:.4f} | {row.across / row.formula:.4f} | "
                f"{row.across / rows[0].across:.3f} | {row.inside / 1e9:.4f} |"
            )
    print(f"ragged: compiles with gradients, {ragged_exchanges()} ragged exchanges")


if __name__ == "__main__":
    main()
