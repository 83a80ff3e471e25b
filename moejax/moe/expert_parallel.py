"""Each token visits its experts wherever they live: the chain from dispatch to combine, in one island."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from moejax_kernels import group_ranks, permute, unpermute

from moejax.config.moe import MoEConfig
from moejax.memory.names import named
from moejax.moe import copies, dispatch, overflow, transport
from moejax.moe.dispatch import kept
from moejax.moe.overlap import Beside, Trip, travel
from moejax.moe.topology import distance
from moejax.moe.transport import Peers, Traffic
from moejax.parallel.axes import ROWS, TOKENS, over_single_axes


class Visit(NamedTuple):
    """What came of sending one device's tokens to their experts."""

    y_TD: Any
    """Weighted sums over the rows that found a place."""
    weight_T: Any
    """Sum of the weights of those rows."""
    given_T: Any
    """Weight with which results of other tokens' rows came in instead of rows without a place."""
    rows: Any
    """int32, how many there were."""
    needed: Any
    """Capacity factor with which nothing would have been dropped."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One exchange with peers: where buckets go and how large they are."""

    peers: Peers
    slots_per_peer: int
    mean_rows: float
    """Rows of a bucket, on average, for each token that a device has at home."""
    choices: int
    """Largest number of rows that one token can have in a bucket, if the peer has that many slots."""
    static_factor: float
    """The buffer's capacity factor; 0: the worst case."""
    factor: Any = None
    """Traced capacity factor at most as large, or None for all of the buffer."""
    transport: str = "all_to_all"

    def bucket(self, num_tokens: int, num_home: int) -> int:
        """Rows of a bucket (Q) for `num_tokens` rows that stand for the choices of `num_home` tokens of each device."""
        return dispatch.bucket_rows(
            num_tokens,
            choices=self.choices,
            slots_per_device=self.slots_per_peer,
            capacity_factor=self.static_factor,
            mean_rows=self.mean_rows * num_home,
        )

    def plan(self, slots_TK, num_home: int) -> dispatch.SendPlan:
        """Which row goes where."""
        limit = None if self.factor is None else jnp.maximum(1, jnp.round(self.factor * self.mean_rows * num_home)).astype(jnp.int32)
        return kept(
            dispatch.plan_send(
                slots_TK,
                num_devices=self.peers.num,
                slots_per_device=self.slots_per_peer,
                rows=self.bucket(slots_TK.shape[0], num_home),
                limit=limit,
                packed=self.transport == "ragged",
            )
        )

    def needed(self, plan: dispatch.SendPlan, num_home: int):
        """Capacity factor that would have been enough for this plan."""
        return jnp.max(plan.asked_S).astype(jnp.float32) / (self.mean_rows * num_home)


def expert_parallel(x_BLD, ids_BLK, probs_BLK, params, *, apply_experts, config: MoEConfig, control=None, beside: Beside | None = None):
    """Sends rows to their experts, applies them, and sums the weighted results at home.

    Args:
      x_BLD: rows split over the token axes.
      ids_BLK: chosen experts, -1 for none.
      probs_BLK: weights.
      params: name -> weight [E, ., .] and its spec: experts split over `expert`, the dim named by `embed` over `fsdp`.
      apply_experts: (params of this device's slots, rows grouped by slot, group sizes) -> rows.
      control: what changes between steps without compiling anew: `capacity_factor`, a float, of which config.capacity_factor bounds the
        effect, and `tables` of a placement (`copies.Tables`); either may be missing.
      beside: what is computed meanwhile.

    Returns:
      y_BLD; what `beside` made, or None; and a report over all devices: `dropped` int32, rows that found no place; with a capacity
      `weight_lost` and `weight_given` (`overflow.settle`), and `needed_capacity`, the factor with which nothing would have been dropped
      (`hierarchical`: of the rows that the first stage let through); with nodes and `tables` also `distance_rows_3`, int32 rows computed
      on their device, in their node, and elsewhere.
    """
    control = control or {}
    mesh = jax.sharding.get_abstract_mesh()
    num_devices = mesh.shape["expert"]
    beside = beside or Beside(None, {}, lambda weights, x_BLD: x_BLD, lambda weights, rows: rows)
    (arrays, specs), (other_arrays, other_specs) = (_parted(group) for group in (params, beside.params))
    split = functools.partial(jax.tree.map, functools.partial(over_single_axes, mesh), is_leaf=lambda leaf: isinstance(leaf, P))
    in_specs = (*split((ROWS, ROWS, ROWS, specs)), P(), *split((ROWS, other_specs)))

    @functools.partial(jax.shard_map, in_specs=in_specs, out_specs=(ROWS, ROWS, P()), check_vma=False)
    def on_each_device(x_BLD, ids_BLK, probs_BLK, arrays, control, other_BLD, other_arrays):
        x_TD, ids_TK, probs_TK = (array.reshape(-1, array.shape[-1]) for array in (x_BLD, ids_BLK, probs_BLK))
        slots_TK = _slots(ids_TK, control.get("tables"), num_experts=config.num_experts)
        probs_TK = jnp.where(slots_TK < 0, 0, probs_TK)
        weights = {name: gather_shards(array, specs[name]) for name, array in arrays.items()}
        if "tables" in control:
            weights = {name: copies.with_copies(array, control["tables"]) for name, array in weights.items()}
        run = functools.partial(apply_experts, weights)
        slots_per_device = next(iter(weights.values())).shape[0]
        visit = chain(config, slots_per_device, num_devices, ids_TK.shape[1], control.get("capacity_factor"))
        cut = lambda array: jnp.split(array, config.overlap_chunks)
        trips = [visit(*chunk, apply=run) for chunk in zip(cut(x_TD), cut(slots_TK), cut(probs_TK), strict=True)]
        enter, leave = (functools.partial(step, other_arrays) for step in (beside.enter, beside.leave))
        parts, other_BLD = travel(trips, other_BLD, enter, leave)
        y_TD, weight_T, given_T = (jnp.concatenate([part[i] for part in parts]) for i in range(3))
        dropped = jnp.sum(ids_TK >= 0, dtype=jnp.int32) - sum(part.rows for part in parts)
        counts = {"dropped": dropped}
        if config.node_size and "tables" in control:  # copies may lie nearer than homes, by which `choose_layer` counts
            away_TK = distance(slots_TK // slots_per_device, jax.lax.axis_index("expert"), devices_per_node=config.node_size)
            counts["distance_rows_3"] = jnp.sum((away_TK[..., None] == jnp.arange(3)) & (slots_TK >= 0)[..., None], (0, 1), dtype=jnp.int32)
        report = jax.lax.psum(counts, TOKENS)
        if config.capacity_factor:
            y_TD, moved = overflow.settle(y_TD, weight_T, given_T, probs_TK.sum(-1), renormalise=config.overflow == "renormalise")
            report |= jax.lax.psum(moved, TOKENS)
            needed = jnp.max(jnp.stack([part.needed for part in parts]))
            report["needed_capacity"] = jax.lax.stop_gradient(jax.lax.pmax(needed, TOKENS))
        return y_TD.reshape(x_BLD.shape), other_BLD, report

    return on_each_device(x_BLD, ids_BLK, probs_BLK, arrays, control, beside.x_BLD, other_arrays)


def _parted(params: dict) -> tuple[dict, dict]:
    """Arrays and specs."""
    return {name: array for name, (array, _) in params.items()}, {name: spec for name, (_, spec) in params.items()}


def _slots(ids_TK, tables: copies.Tables | None, *, num_experts: int):
    """The slot of each choice."""
    if tables is None:
        return ids_TK
    rank_R, _ = group_ranks(ids_TK.reshape(-1), num_experts)
    return kept(copies.slots_of(ids_TK, rank_R.reshape(ids_TK.shape), tables, device=jax.lax.axis_index(TOKENS)))


def chain(config: MoEConfig, slots_per_device: int, num_devices: int, k: int, factor):
    """The way to the experts and back that a config asks for: (x_TD, slots_TK, probs_TK, apply) -> Trip of a Visit."""
    outer, inner = stages(config, slots_per_device, num_devices, k, factor)
    if outer is None:
        return functools.partial(visit, stage=inner, similar=overflow.of(config))
    return functools.partial(visit_by_node, outer=outer, inner=inner)


def stages(config: MoEConfig, slots_per_device: int, num_devices: int, k: int, factor=None) -> tuple[Stage | None, Stage]:
    """The exchange between nodes, or None, and the one inside a node or between all devices."""
    stage = functools.partial(Stage, static_factor=config.capacity_factor, factor=factor)
    if config.transport != "hierarchical":
        return None, stage(Peers(num_devices), slots_per_device, k / num_devices, k, transport=config.transport)
    inside, across = transport.node_peers(num_devices, config.node_size)
    limited = config.router.num_groups == across.num and not config.copies.every  # groups of experts are nodes
    nodes = config.router.groups_kept if limited else distinct_nodes(config.num_experts, across.num, k)
    outer = stage(across, 1, nodes / across.num, min(k, across.num))
    return outer, stage(inside, slots_per_device, k / inside.num, k)  # a device takes in as many choices for others as it has


def distinct_nodes(num_experts: int, num_nodes: int, k: int) -> float:
    """Nodes that a token's k experts lie on, on average, when all choices are as likely: G (1 - C(E - E/G, k) / C(E, k))."""
    missed = 1.0
    for i in range(k):
        missed *= (num_experts - num_experts / num_nodes - i) / (num_experts - i)
    return num_nodes * (1 - missed)


def visit(x_TD, slots_TK, probs_TK, *, apply, stage: Stage, similar: overflow.Similar | None = None, num_home: int = 0) -> Trip:
    """There and back in one exchange each way; `num_home`: see Stage.bucket, 0: as many as there are tokens."""
    peers, num_home = stage.peers, num_home or x_TD.shape[0]
    plan = stage.plan(slots_TK, num_home)
    counts_Sx = kept(peers.exchange(plan.counts_Sx))
    rows, arrived_S = stage.bucket(x_TD.shape[0], num_home), counts_Sx.sum(1, dtype=jnp.int32)
    packed_S, spread_S = jnp.cumsum(arrived_S, dtype=jnp.int32) - arrived_S, jnp.arange(peers.num, dtype=jnp.int32) * rows
    arrive_start_S = packed_S if stage.transport == "ragged" else spread_S
    traffic = Traffic(plan.start_S, plan.sent_S, arrive_start_S, arrived_S)
    send = functools.partial(transport.FLAT[stage.transport], peers=peers)
    out_RD = permute(x_TD, plan.rows)

    def work(arrived_WD):
        if peers.num == 1:  # one sender's rows come grouped
            return apply(arrived_WD, counts_Sx[0])
        grouping, sizes_x = kept(dispatch.plan_receive(counts_Sx, arrive_start_S, num_rows=peers.num * rows))
        return permute(apply(permute(arrived_WD, grouping), sizes_x), dispatch.inverse(grouping))

    def finish(home_RD):
        home_RD = named(home_RD, "expert_out")
        y_TD = unpermute(home_RD, plan.rows, probs_TK)
        weight_T = jnp.sum(jnp.where(plan.rows.slot_TK >= 0, probs_TK, 0), -1)
        given_T = jnp.zeros_like(weight_T)
        if similar is not None:
            borrowed_TD, given_T = similar.borrow(x_TD, out_RD, home_RD, plan, slots_TK, probs_TK)
            y_TD = y_TD + borrowed_TD
        return Visit(y_TD, weight_T, given_T, jnp.sum(plan.sent_S, dtype=jnp.int32), stage.needed(plan, num_home))

    back = lambda done_WD: done_WD if peers.num == 1 else send(done_WD, traffic.reversed())
    return Trip(out_RD, lambda out_RD: send(out_RD, traffic), work, back, finish)


def visit_by_node(x_TD, slots_TK, probs_TK, *, apply, outer: Stage, inner: Stage) -> Trip:
    """First to the node, where the device with the same place takes a token in once for all of its experts there; then inside the node.

    The weighted sum over a node's experts is made in that node, so one row for each token and node comes home.
    """
    num_tokens, peers = x_TD.shape[0], outer.peers
    rows, slots_per_node = outer.bucket(num_tokens, num_tokens), inner.peers.num * inner.slots_per_peer
    node_TK = jnp.where(slots_TK < 0, -1, slots_TK // slots_per_node)
    earlier_KK = jnp.tri(slots_TK.shape[1], k=-1, dtype=bool)
    repeated_TK = jnp.any((node_TK[:, :, None] == node_TK[:, None, :]) & earlier_KK, -1)
    plan = outer.plan(jnp.where(repeated_TK, -1, node_TK), num_tokens)
    node_W1 = jnp.arange(peers.num * rows)[:, None] // rows
    source_W1 = plan.rows.source_R[:, None]
    here_WK = (source_W1 >= 0) & (node_TK[plan.rows.source_R] == node_W1)
    slots_WK = jnp.where(here_WK, slots_TK[plan.rows.source_R] % slots_per_node, -1)
    probs_WK = jnp.where(here_WK, permute(probs_TK, plan.rows), 0)
    slots_WK = kept(peers.exchange(slots_WK))
    probs_WK = peers.exchange(probs_WK)

    def work(arrived_WD):
        ((inside,), _) = travel([visit(arrived_WD, slots_WK, probs_WK, apply=apply, stage=inner, num_home=num_tokens)])
        return inside

    def finish(home: Visit):
        home = home._replace(y_TD=named(home.y_TD, "expert_out"))
        y_TD, weight_T1 = (unpermute(rows, plan.rows, jnp.ones_like(probs_TK)) for rows in (home.y_TD, home.weight_T))
        needed = jnp.maximum(home.needed, outer.needed(plan, num_tokens))
        return Visit(y_TD, weight_T1[:, 0], jnp.zeros_like(weight_T1[:, 0]), home.rows, needed)

    back = lambda inside: inside._replace(y_TD=peers.exchange(inside.y_TD), weight_T=peers.exchange(inside.weight_T[:, None]))
    return Trip(permute(x_TD, plan.rows), peers.exchange, work, back, finish)


def gather_shards(array, spec: P):
    """This device's experts as a whole: gathered over `fsdp`; the gradient is summed and scattered back in the master's dtype."""
    for dim, axes in enumerate(spec):
        if axes == "fsdp" and jax.lax.axis_size("fsdp") > 1:
            array = jax.lax.all_gather(array, "fsdp", axis=dim, tiled=True)
    return array
