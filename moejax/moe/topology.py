"""Where experts live as a token's device sees it: here, on this node, or across the fabric.

Devices are numbered along the `expert` axis, and a node is `devices_per_node` of them in a row.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moejax.config.moe import RouterConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """What a layer knows of distances."""

    devices_per_node: int
    """Devices of one node along the `expert` axis."""
    home_device_E: Any
    """int32, where each expert lives on the `expert` axis."""
    factor: Any = None
    """Factor on the topology bias (`anneal`); None: no bias, as outside training."""


def contiguous_homes(num_experts: int, num_devices: int):
    """Home of each expert where none has moved, int32 [E]: equal runs of experts."""
    return jnp.arange(num_experts, dtype=jnp.int32) // (num_experts // num_devices)


def own_device():
    """This device's place on the `expert` axis; to be called inside an island."""
    return jax.lax.axis_index("expert") if jax.sharding.get_abstract_mesh().shape["expert"] > 1 else 0


def distance(home_device, device, *, devices_per_node: int):
    """0 for this device, 1 for another of its node, 2 for another node; int32, of home_device's shape."""
    same_node = home_device // devices_per_node == device // devices_per_node
    return jnp.where(home_device == device, 0, jnp.where(same_node, 1, 2)).astype(jnp.int32)


def anneal(step, *, num_steps: int):
    """Factor on the topology bias at a step, traced or not: linearly from 1 to 0 at num_steps; num_steps = 0: always 1."""
    return jnp.maximum(1 - jnp.asarray(step, jnp.float32) / num_steps, 0) if num_steps else jnp.ones((), jnp.float32)


def distance_bias(distance_E, *, config: RouterConfig, factor):
    """What a device adds to the choice of each expert: minus topology_near on its node, minus topology_far elsewhere, times `factor`.

    Args:
      distance_E: `distance` of the experts' homes; of an expert with copies, the smallest.
      factor: scalar, `anneal`.

    Returns:
      float32 [E], 0 for the device's own experts.
    """
    return -factor * jnp.asarray([0, config.topology_near, config.topology_far], jnp.float32)[distance_E]


def rows_by_distance(load_E, distance_E):
    """Rows of a device whose expert lives on it, on another device of its node, and on another node: int32 [3].

    Args:
      load_E: int32, rows of this device per expert.
      distance_E: `distance` of the experts' homes.
    """
    return jnp.sum(jnp.where(distance_E[:, None] == jnp.arange(3), load_E[:, None], 0), 0, dtype=jnp.int32)
