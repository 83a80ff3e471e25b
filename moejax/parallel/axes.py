"""Which mesh axis carries each logical axis: the one table that a new layout edits."""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

TOKENS = ("data", "fsdp", "expert")
"""Mesh axes over which rows of a batch are split."""
ROWS = P(TOKENS)
"""Spec of an array whose first dim is rows (or tokens)."""

RULES: dict[str, tuple[str, ...]] = {
    "expert": ("expert",),
    "embed": ("fsdp", "expert"),
    "vocab": (),
    "heads": (),
    "mlp": (),
    "layers": (),
}
"""Logical axis -> mesh axes, in order. A mesh axis that an earlier dim of the same weight took is left out, so expert
weights lie on `expert` first and their width on `fsdp` alone."""


def spec(axes: tuple[str | None, ...]) -> P:
    """PartitionSpec of a weight whose dims carry these logical axes; None is replicated."""
    taken: set[str] = set()
    dims = []
    for axis in axes:
        mesh_axes = tuple(name for name in RULES[axis] if name not in taken) if axis else ()
        taken.update(mesh_axes)
        dims.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return P(*dims)


def over_single_axes(mesh, place: P) -> P:
    """The same place of an array with at least one dim, split also over the mesh's axes of size 1.

    shard_map's backward sums a gradient over the axes that its place does not name, and XLA's CPU backend copies for a sum over one device.
    """
    dims = [(dim,) if isinstance(dim, str) else dim or () for dim in place] or [()]
    single = tuple(axis for axis, size in mesh.shape.items() if size == 1 and not any(axis in dim for dim in dims))
    return P((*dims[0], *single), *dims[1:])


def sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """NamedSharding of a weight on `mesh`."""
    return NamedSharding(mesh, spec(axes))


def on_host(place: NamedSharding) -> NamedSharding:
    """The same place in pinned host memory.

    JAX forgets the memory of devices that a program is only compiled for; on the mesh's shape without its devices it keeps it.
    """
    there = place.with_memory_kind("pinned_host")
    return there if there.memory_kind else NamedSharding(place.mesh.abstract_mesh, place.spec, memory_kind="pinned_host")


def constrain_rows(x):
    """Keeps the first dim of an activation split over the token axes (needs a mesh set by jax.set_mesh)."""
    return jax.lax.with_sharding_constraint(x, ROWS)
