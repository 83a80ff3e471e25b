"""Bytes per device, from the compiler and from shardings; no data is needed."""

import math
from typing import Any

import jax


def tree_bytes(tree: Any, *, on_host: bool = False) -> int:
    """Bytes of a sharded tree on the device that holds most, or for that device in pinned host memory.

    Args:
      tree: arrays, or `jax.ShapeDtypeStruct` with shardings; a leaf without a sharding counts in full.
      on_host: count the leaves in host memory instead of the others.
    """
    held: dict[Any, int] = {}
    everywhere = 0
    for leaf in jax.tree.leaves(tree):
        if on_host != (leaf.sharding is not None and leaf.sharding.memory_kind == "pinned_host"):
            continue
        if leaf.sharding is None:
            everywhere += math.prod(leaf.shape) * leaf.dtype.itemsize
            continue
        shard_bytes = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        if isinstance(
            getattr(leaf.sharding, "mesh", None), jax.sharding.AbstractMesh
        ):  # a mesh without its devices: every one holds a shard
            everywhere += shard_bytes
            continue
        for device in leaf.sharding.device_set:
            held[device] = held.get(device, 0) + shard_bytes
    return max(held.values(), default=0) + everywhere


def compiled_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    """What a compiled program takes on each device.

    Returns:
      `arguments_bytes`, `outputs_bytes`, `aliased_bytes` (outputs that reuse an argument), `temporaries_bytes`, `code_bytes`,
      `total_bytes` of these, in which an alias counts once, and `host_bytes`, temporaries in the host's memory.

    Raises:
      RuntimeError: the backend makes no memory analysis.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise RuntimeError("This backend gives no memory analysis of a compiled program.")
    parts = {
        "arguments_bytes": analysis.argument_size_in_bytes,
        "outputs_bytes": analysis.output_size_in_bytes,
        "aliased_bytes": analysis.alias_size_in_bytes,
        "temporaries_bytes": analysis.temp_size_in_bytes,
        "code_bytes": analysis.generated_code_size_in_bytes,
    }
    total = sum(parts.values()) - 2 * parts["aliased_bytes"]
    return parts | {"total_bytes": total, "host_bytes": analysis.host_temp_size_in_bytes}
