"""GPUs that programs are compiled for without having one.

Figures: XLA's public GPU specs (openxla/xla, xla/backends/gpu/target_config/specs); H200 is H100 with its own memory.
"""

import dataclasses
import importlib.util
import re

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from moejax.config.errors import ConfigError

GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One kind of GPU."""

    name: str
    """As JAX calls it."""
    compute_capability: tuple[int, int]
    num_cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    bytes_per_s: int
    """Memory bandwidth."""
    l2_bytes: int
    shared_per_core_bytes: int
    shared_per_block_bytes: int
    """Largest that a kernel can ask for."""

    @property
    def architecture(self) -> str:
        """As the assembler calls it, e.g. sm_90a."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def config(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        major, minor = self.compute_capability
        features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_per_core_bytes}
  shared_memory_per_block_optin: {self.shared_per_block_bytes}
  core_count: {self.num_cores} fpus_per_core: {self.fpus_per_core} clock_rate_ghz: {self.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {self.bytes_per_s} l2_cache_size: {self.l2_bytes} device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {major}.{minor}{"a" if major >= 9 else ""}"
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true name: "{self.name}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{self.name}"
"""


_HOPPER = {
    "compute_capability": (9, 0),
    "num_cores": 132,
    "fpus_per_core": 128,
    "clock_ghz": 1.98,
    "l2_bytes": 52428800,
    "shared_per_core_bytes": 233472,
    "shared_per_block_bytes": 232448,
}
TARGETS = {
    "a100": Target(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        num_cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        memory_bytes=85100068864,
        bytes_per_s=2039040000000,
        l2_bytes=41943040,
        shared_per_core_bytes=167936,
        shared_per_block_bytes=166912,
    ),
    "h100": Target(name="NVIDIA H100 80GB HBM3", memory_bytes=84942979072, bytes_per_s=3352320000000, **_HOPPER),
    "h200": Target(name="NVIDIA H200", memory_bytes=151397597184, bytes_per_s=4800000000000, **_HOPPER),
    "b200": Target(
        name="NVIDIA B200",
        compute_capability=(10, 0),
        num_cores=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        memory_bytes=191514411008,
        bytes_per_s=7672320000000,
        l2_bytes=132644864,
        shared_per_core_bytes=233472,
        shared_per_block_bytes=232448,
    ),
}


def parse(text: str) -> tuple[Target, int]:
    """Target and number of GPUs of e.g. "h200x8".

    Raises:
      ConfigError: no such target, or a number that is neither below 8 nor a multiple of it.
    """
    found = re.fullmatch(r"(\w+?)x(\d+)", text)
    if found is None or found[1] not in TARGETS:
        raise ConfigError(f"--target={text!r} must be one of {', '.join(TARGETS)} and a number, e.g. h200x8.")
    count = int(found[2])
    if count == 0 or (count > GPUS_PER_HOST and count % GPUS_PER_HOST):
        raise ConfigError(
            f"--target={text!r}: the number of GPUs must be 1 to {GPUS_PER_HOST}, or a multiple of {GPUS_PER_HOST} (whole hosts)."
        )
    return TARGETS[found[1]], count


def devices(target: Target, count: int) -> list:
    """Devices that programs can be compiled for, hosts of eight.

    Raises:
      ConfigError: the CUDA plugin of JAX is not installed.
    """
    plugins = importlib.util.find_spec("jax_plugins")  # the search for a module inside an absent package raises
    if plugins is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        raise ConfigError("compiling for GPUs needs JAX's CUDA plugin: pip install 'moejax[plan]' (no GPU is needed).")
    hosts, each = max(count // GPUS_PER_HOST, 1), min(count, GPUS_PER_HOST)
    topology = topologies.get_topology_desc(
        topology_name=target.name, platform="cuda", target_config=target.config(), topology=f"1x{hosts}x{each}"
    )
    return list(topology.devices)


def one_gpu(target: Target) -> Mesh:
    """A mesh of one GPU that is not there."""
    return Mesh(np.array(devices(target, 1)), ("gpu",), axis_types=(AxisType.Auto,))


def compile_for(target: Target, function, *shapes: jax.ShapeDtypeStruct):
    """`function`, lowered and compiled for one GPU.

    Args:
      function: of arrays.
      shapes: shapes and dtypes of its arguments, or trees of them.

    Returns:
      jax.stages.Lowered and jax.stages.Compiled.
    """
    mesh = one_gpu(target)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda like: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place), shapes)
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).lower(*placed)
        return lowered, lowered.compile()
