"""The mesh of devices."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from moejax.config.errors import require
from moejax.config.mesh import AXES, MeshConfig


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    """All six axes in the order of the config, axis types Auto.

    Args:
      config: resolved sizes (no -1).
      devices: devices to use, by default all.
    """
    sizes = config.sizes()
    shape = tuple(sizes[axis] for axis in AXES)
    devices = np.array(jax.devices() if devices is None else devices)
    return Mesh(devices.reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def one_device_mesh(device=None) -> Mesh:
    """A mesh of one device, by default the first."""
    return make_mesh(MeshConfig(fsdp=1), [device or jax.local_devices()[0]])


def complete(mesh: Mesh) -> Mesh:
    """A mesh of the same devices that has all six axes, those it lacked with size 1, all of type Auto.

    Raises:
      ConfigError: it has an axis that moejax does not know, or one that is not built yet is longer than 1.
    """
    unknown = [axis for axis in mesh.axis_names if axis not in AXES]
    require(not unknown, f"the mesh has axes {unknown}; known are {', '.join(AXES)}.")
    config = MeshConfig(**{"fsdp": 1} | dict(mesh.shape))
    order = [mesh.axis_names.index(axis) for axis in AXES if axis in mesh.axis_names]
    return make_mesh(config, mesh.devices.transpose(order))


def mesh_from(**sizes: int) -> Mesh:
    """A mesh of the first devices, e.g. `mesh_from(fsdp=2, expert=4)`; axes left out have size 1."""
    config = MeshConfig(**{"fsdp": 1} | sizes)
    count = int(np.prod(list(config.sizes().values())))
    return make_mesh(config.resolve(count), jax.devices()[:count])
