"""The mesh of devices, and the processes that hold them."""

import dataclasses

from moejax.config.errors import ConfigError, require, require_ranges

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
BUILT = ("data", "fsdp", "expert")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Sizes of the mesh axes. At most one may be -1: what the others leave."""

    pipe: int = 1
    """Pipeline stages (not built yet: 1)."""
    data: int = 1
    """Replicas of the dense weights; tokens are split over them."""
    fsdp: int = -1
    """Shards of dense weights, and of each expert's weights; tokens are split over them."""
    expert: int = 1
    """Shards of the expert dimension; tokens and dense weights are split over them too."""
    context: int = 1
    """Shards of the sequence (not built yet: 1)."""
    tensor: int = 1
    """Shards of heads and hidden widths (not built yet: 1)."""
    simulate_devices: int = 0
    """Pretend so many CPU devices in each process; 0: use the devices that are there."""

    def __post_init__(self):
        for axis in AXES:
            size = getattr(self, axis)
            require(isinstance(size, int), f"mesh.{axis}={size!r} is no whole number (int).")
            require(size == -1 or size >= 1, f"mesh.{axis}={size} must be at least 1, or -1 for what is left.")
            if axis not in BUILT and size != 1:
                raise ConfigError(f"mesh.{axis}={size}: this axis is not built yet, only 1 fits. Built are {', '.join(BUILT)}.")
        require_ranges("mesh", self, simulate_devices=">= 0")

    def resolve(self, num_devices: int) -> "MeshConfig":
        """The same mesh with every size known; raises ConfigError if it does not fit `num_devices`."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        free = [axis for axis, size in sizes.items() if size == -1]
        require(len(free) <= 1, f"mesh.{' and mesh.'.join(free)} are -1; at most one axis may be.")
        fixed = 1
        for size in sizes.values():
            fixed *= size if size != -1 else 1
        if free:
            require(num_devices % fixed == 0, f"mesh: {_spell(sizes)} needs a multiple of {fixed} devices, but there are {num_devices}.")
            sizes[free[0]] = num_devices // fixed
        elif fixed != num_devices:
            raise ConfigError(
                f"mesh: {_spell(sizes)} needs {fixed} devices, but there are {num_devices}. Change a size so that "
                f"the product is {num_devices}, set one axis to -1, or pretend devices with mesh.simulate_devices."
            )
        return dataclasses.replace(self, **sizes)

    def sizes(self) -> dict[str, int]:
        """Axis name to size, in mesh order."""
        return {axis: getattr(self, axis) for axis in AXES}


def _spell(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessConfig:
    """Several processes under jax.distributed. SLURM, Open MPI and Kubernetes are recognised by their environment."""

    coordinator: str = ""
    """host:port of process 0; empty: from the environment, or one process."""
    num_processes: int = 0
    """Processes in all; 0: from the environment."""
    process_id: int = -1
    """This process; -1: from the environment."""
    timeout_s: int = 60
    """Seconds after which the others give up on a process that is silent, and name it."""

    def __post_init__(self):
        given = (bool(self.coordinator), self.num_processes > 0, self.process_id >= 0)
        require(
            all(given) or not any(given),
            f"processes.coordinator={self.coordinator!r}, num_processes={self.num_processes}, process_id={self.process_id}: "
            "give all three or none.",
        )
        require(
            self.process_id < max(self.num_processes, 1),
            f"processes.process_id={self.process_id} must be below processes.num_processes={self.num_processes}.",
        )
        require_ranges("processes", self, timeout_s=">= 10")
