"""How rows cross the `expert` axis. Each transport moves buckets of rows to peers and back; back is the transpose of there.

A bucket is the rows of one sender for one receiver. `all_to_all` sends every bucket at its full static size; `ragged` sends the rows that
are there. Both run inside shard_map.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Peers:
    """The devices of the `expert` axis that exchange rows: all of it, or groups of its indices."""

    num: int
    groups: tuple[tuple[int, ...], ...] | None = None

    def exchange(self, array):
        """[num * n, ...]: part s goes to peer s, and part s of the result came from peer s."""
        if self.num == 1:
            return array
        return jax.lax.all_to_all(array, "expert", split_axis=0, concat_axis=0, tiled=True, axis_index_groups=self.groups)


def all_peers(num_devices: int) -> Peers:
    """The whole axis."""
    return Peers(num_devices)


def node_peers(num_devices: int, node_size: int) -> tuple[Peers, Peers]:
    """Peers inside each node of `node_size` neighbours, and across nodes: those with the same place in their node."""
    num_nodes = num_devices // node_size
    inside = tuple(tuple(range(node * node_size, (node + 1) * node_size)) for node in range(num_nodes))
    across = tuple(zip(*inside, strict=True))
    return Peers(node_size, inside), Peers(num_nodes, across)


class Traffic(NamedTuple):
    """Where buckets begin and how many rows they hold, on both ends; int32 [S]."""

    send_start_S: Any
    send_rows_S: Any
    arrive_start_S: Any
    arrive_rows_S: Any

    def reversed(self) -> "Traffic":
        """The way back."""
        return Traffic(self.arrive_start_S, self.arrive_rows_S, self.send_start_S, self.send_rows_S)


def all_to_all(x_WD, traffic: Traffic, peers: Peers):
    """Buckets of equal static size, empty rows too. Moves (S - 1) / S of x's bytes."""
    return peers.exchange(x_WD)


def ragged(x_WD, traffic: Traffic, peers: Peers):
    """The rows that are there and no others (GPU alone: XLA's CPU backend has no ragged_all_to_all). Rows that nobody sent are 0."""
    return x_WD if peers.num == 1 else _ragged(peers, x_WD, traffic)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(peers: Peers, x_WD, traffic: Traffic):
    there_start_S = peers.exchange(traffic.arrive_start_S)  # where my rows begin at each peer
    return jax.lax.ragged_all_to_all(
        x_WD,
        jnp.zeros_like(x_WD),
        traffic.send_start_S,
        traffic.send_rows_S,
        there_start_S,
        traffic.arrive_rows_S,
        axis_name="expert",
        axis_index_groups=peers.groups,
    )


def _save(peers: Peers, x_WD, traffic: Traffic):
    return _ragged(peers, x_WD, traffic), traffic


def _grads(peers: Peers, traffic: Traffic, dy_WD):
    return _ragged(peers, dy_WD, traffic.reversed()), None


_ragged.defvjp(_save, _grads)

FLAT = {"all_to_all": all_to_all, "ragged": ragged}
"""Transports between peers; `hierarchical` is made of two stages of the first."""
