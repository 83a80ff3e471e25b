"""Each token visits its experts wherever they live: the chain from dispatch to combine, in one island."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from moejax_kernels import group_ranks, permute, unpermute

from moejax.config.model import MoEConfig
from moejax.moe import copies, dispatch, transport
from moejax.moe.transport import Peers, Traffic
from moejax.parallel.axes import ROWS, TOKENS

KEPT = "dispatch_plan"
"""Name of the results that remat keeps: a recomputed choice could break ties differently."""
kept = functools.partial(checkpoint_name, name=KEPT)


class Visit(NamedTuple):
    """What came of sending one device's tokens to their experts."""

    y_TD: Any
    """Weighted sums over the rows that found a place."""
    weight_T: Any
    """Sum of the weights of those rows."""
    rows: Any
    """int32, how many there were."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One exchange with peers: where buckets go and how large they are."""

    peers: Peers
    slots_per_peer: int
    bucket: Callable[[int], int]
    """Rows of a bucket (Q) for that many tokens."""
    limit: Callable[[int], Any] = lambda num_tokens: None
    """Traced number of rows a bucket may fill, or None for all of it."""
    transport: str = "all_to_all"


def expert_parallel(x_BLD, ids_BLK, probs_BLK, params, *, apply_experts, config: MoEConfig, control=None):
    """Sends rows to their experts, applies them, and sums the weighted results at home.

    Args:
      x_BLD: rows split over the token axes.
      ids_BLK: chosen experts, -1 for none.
      probs_BLK: weights; dropped rows' weights are given to the kept ones of the same token.
      params: tree of weights [E, ., .]: experts split over `expert`, the dim named by `embed` over `fsdp`.
      apply_experts: (params of this device's slots, rows grouped by slot, group sizes) -> rows.
      control: what changes between steps without compiling anew: `capacity_factor`, a float at most config.capacity_factor, and
        `tables` of a placement (`copies.Tables`); either may be missing.

    Returns:
      y_BLD, and a report summed over all devices: `dropped` int32, rows that found no place; with a capacity `weight_lost`, the weight of
      those choices, and `weight_given`, the part of it that other choices of the same token took over.
    """
    control = control or {}
    mesh = jax.sharding.get_abstract_mesh()
    num_devices = mesh.shape["expert"]
    arrays, specs = zip(*params.values(), strict=True)
    names = tuple(params)

    @functools.partial(jax.shard_map, in_specs=(ROWS, ROWS, ROWS, specs, P()), out_specs=(ROWS, P()), check_vma=False)
    def on_each_device(x_BLD, ids_BLK, probs_BLK, arrays, control):
        x_TD, ids_TK, probs_TK = (array.reshape(-1, array.shape[-1]) for array in (x_BLD, ids_BLK, probs_BLK))
        slots_TK = _slots(ids_TK, control.get("tables"), num_experts=config.num_experts)
        probs_TK = jnp.where(slots_TK < 0, 0, probs_TK)
        weights = {name: gather_shards(array, spec) for name, array, spec in zip(names, arrays, specs, strict=True)}
        if "tables" in control:
            weights = {name: copies.with_copies(array, control["tables"]) for name, array in weights.items()}
        run = functools.partial(apply_experts, weights)
        slots_per_device = next(iter(weights.values())).shape[0]
        visit = _chain(config, slots_per_device, num_devices, ids_TK.shape[1], control.get("capacity_factor"))
        cut = lambda array: jnp.split(array, config.overlap_chunks)
        parts = [visit(*chunk, apply=run) for chunk in zip(cut(x_TD), cut(slots_TK), cut(probs_TK), strict=True)]
        y_TD, weight_T = (jnp.concatenate([part[i] for part in parts]) for i in range(2))
        report = {}
        if config.capacity_factor:
            y_TD, report = _compensate(y_TD, weight_T, probs_TK.sum(-1))
        dropped = jnp.sum(ids_TK >= 0, dtype=jnp.int32) - sum(part.rows for part in parts)
        report = jax.lax.psum({"dropped": dropped} | report, TOKENS)
        return y_TD.reshape(x_BLD.shape), report

    return on_each_device(x_BLD, ids_BLK, probs_BLK, arrays, control)


def _slots(ids_TK, tables: copies.Tables | None, *, num_experts: int):
    """The slot of each choice."""
    if tables is None:
        return ids_TK
    rank_R, _ = group_ranks(ids_TK.reshape(-1), num_experts)
    return kept(copies.slots_of(ids_TK, rank_R.reshape(ids_TK.shape), tables, device=jax.lax.axis_index(TOKENS)))


def _chain(config: MoEConfig, slots_per_device: int, num_devices: int, k: int, factor):
    """The way to the experts and back that a config asks for: (x_TD, slots_TK, probs_TK, apply) -> Visit."""
    static = config.capacity_factor

    def stage(peers, slots_per_peer, choices, mean, *, transport="all_to_all"):
        bucket = lambda num_tokens: dispatch.bucket_rows(
            num_tokens, choices=choices, slots_per_device=slots_per_peer, capacity_factor=static, mean_rows=mean(num_tokens)
        )
        limit = lambda num_tokens: None if factor is None else jnp.maximum(1, jnp.round(factor * mean(num_tokens))).astype(jnp.int32)
        return Stage(peers, slots_per_peer, bucket, limit, transport)

    if config.transport != "hierarchical":
        flat = stage(Peers(num_devices), slots_per_device, k, lambda num_tokens: num_tokens * k / num_devices, transport=config.transport)
        return functools.partial(visit, stage=flat)
    node_size = config.node_size
    inside, across = transport.node_peers(num_devices, node_size)
    num_nodes = num_devices // node_size
    nodes_each = (
        distinct_nodes(config.num_experts, num_nodes, k) if config.router.num_groups == 1 else min(num_nodes, config.router.groups_kept)
    )
    outer = stage(across, 1, min(k, num_nodes), lambda num_tokens: num_tokens * nodes_each / num_nodes)
    # T tokens of each device make T*K choices, which end on the T' rows that a device of the node took in for others
    choices_of_row = num_nodes * k / nodes_each / num_nodes
    inner = stage(inside, slots_per_device, k, lambda num_rows: num_rows * choices_of_row / node_size)
    return functools.partial(visit_by_node, outer=outer, inner=inner)


def distinct_nodes(num_experts: int, num_nodes: int, k: int) -> float:
    """Nodes that a token's k experts lie on, on average, when all choices are as likely: G (1 - C(E - E/G, k) / C(E, k))."""
    missed = 1.0
    for i in range(k):
        missed *= (num_experts - num_experts / num_nodes - i) / (num_experts - i)
    return num_nodes * (1 - missed)


def visit(x_TD, slots_TK, probs_TK, *, apply, stage: Stage) -> Visit:
    """There and back in one exchange each way."""
    peers, packed, num_tokens = stage.peers, stage.transport == "ragged", x_TD.shape[0]
    rows = stage.bucket(num_tokens)
    plan = kept(
        dispatch.plan_send(
            slots_TK, num_devices=peers.num, slots_per_device=stage.slots_per_peer, rows=rows, limit=stage.limit(num_tokens), packed=packed
        )
    )
    counts_Sx = kept(peers.exchange(plan.counts_Sx))
    num_rows = peers.num * rows
    arrived_S = counts_Sx.sum(1, dtype=jnp.int32)
    arrive_start_S = jnp.cumsum(arrived_S) - arrived_S if packed else jnp.arange(peers.num, dtype=jnp.int32) * rows
    traffic = Traffic(plan.start_S, plan.sent_S, arrive_start_S, arrived_S)
    send = functools.partial(transport.FLAT[stage.transport], peers=peers)
    arrived_WD = send(permute(x_TD, plan.rows), traffic)
    if peers.num == 1:  # one sender's rows come grouped
        home_RD = apply(arrived_WD, counts_Sx[0])
    else:
        grouping, sizes_x = kept(dispatch.plan_receive(counts_Sx, arrive_start_S, num_rows=num_rows))
        done_WD = apply(permute(arrived_WD, grouping), sizes_x)
        home_RD = send(permute(done_WD, dispatch.inverse(grouping)), traffic.reversed())
    weight_T = jnp.sum(jnp.where(plan.rows.slot_TK >= 0, probs_TK, 0), -1)
    return Visit(unpermute(home_RD, plan.rows, probs_TK), weight_T, jnp.sum(plan.sent_S, dtype=jnp.int32))


def visit_by_node(x_TD, slots_TK, probs_TK, *, apply, outer: Stage, inner: Stage) -> Visit:
    """First to the node, where the device with the same place takes a token in once for all of its experts there; then inside the node.

    The weighted sum over a node's experts is made in that node, so one row for each token and node comes home.
    """
    num_tokens, peers = x_TD.shape[0], outer.peers
    rows, slots_per_node = outer.bucket(num_tokens), inner.peers.num * inner.slots_per_peer
    node_TK = jnp.where(slots_TK < 0, -1, slots_TK // slots_per_node)
    earlier_KK = jnp.tri(slots_TK.shape[1], k=-1, dtype=bool)
    repeated_TK = jnp.any((node_TK[:, :, None] == node_TK[:, None, :]) & earlier_KK, -1)
    plan = kept(
        dispatch.plan_send(
            jnp.where(repeated_TK, -1, node_TK), num_devices=peers.num, slots_per_device=1, rows=rows, limit=outer.limit(num_tokens)
        )
    )
    node_W1 = jnp.arange(peers.num * rows)[:, None] // rows
    source_W1 = plan.rows.source_R[:, None]
    here_WK = (source_W1 >= 0) & (node_TK[plan.rows.source_R] == node_W1)
    slots_WK = jnp.where(here_WK, slots_TK[plan.rows.source_R] % slots_per_node, -1)
    probs_WK = jnp.where(here_WK, permute(probs_TK, plan.rows), 0)
    slots_WK = kept(peers.exchange(slots_WK))
    inside = visit(peers.exchange(permute(x_TD, plan.rows)), slots_WK, peers.exchange(probs_WK), apply=apply, stage=inner)
    ones_TK = jnp.ones_like(probs_TK)
    home = lambda rows_WD: unpermute(peers.exchange(rows_WD), plan.rows, ones_TK)
    return Visit(home(inside.y_TD), home(inside.weight_T[:, None])[:, 0], inside.rows)


def gather_shards(array, spec: P):
    """This device's experts as a whole: gathered over `fsdp`; the gradient is summed and scattered back in the master's dtype."""
    for dim, axes in enumerate(spec):
        if axes == "fsdp" and jax.lax.axis_size("fsdp") > 1:
            array = jax.lax.all_gather(array, "fsdp", axis=dim, tiled=True)
    return array


def _compensate(y_TD, weight_T, total_T):
    """Scales each token's sum to the weight it would have without drops, exactly by 1 where nothing was dropped; all dropped: 0."""
    some_T = weight_T > 0
    scale_T = jnp.where(some_T, total_T / jnp.where(some_T, weight_T, 1), 0)
    lost_T = total_T - weight_T
    report = {"weight_lost": jnp.sum(lost_T), "weight_given": jnp.sum(jnp.where(some_T, lost_T, 0))}
    y_TD = (y_TD.astype(scale_T.dtype) * scale_T[:, None]).astype(y_TD.dtype)
    return y_TD, jax.lax.stop_gradient(report)
