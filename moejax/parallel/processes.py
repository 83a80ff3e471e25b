"""Several processes under `jax.distributed`: who they are, and what happens when one is lost."""

import ctypes
import dataclasses
import os
import socket
from typing import Any

import jax
from jax._src import distributed, xla_bridge
from jax._src.clusters.ompi_cluster import OmpiCluster
from jax._src.clusters.slurm_cluster import SlurmCluster

from moejax.config.errors import ConfigError, require
from moejax.config.mesh import ProcessConfig
from moejax.parallel import watch

START_TIMEOUT_S = 300
"""Seconds that the first process waits for the last one to arrive."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process among the others."""

    coordinator: str
    """host:port at which process 0 listens."""
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None
    """GPUs of this process; None: all that it sees."""
    source: str
    """Where the above is from."""


def simulate_devices(num_devices: int) -> None:
    """Pretends so many CPU devices in this process, whose freed memory glibc then keeps for reuse.

    Raises:
      ConfigError: JAX has started its devices already, with another number.
    """
    if not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
        _keep_freed_memory()
        return
    there = jax.local_device_count()
    require(
        jax.default_backend() == "cpu" and there == num_devices,
        f"mesh.simulate_devices={num_devices} comes too late: JAX has started with {there} {jax.default_backend()} device(s). "
        "Ask for them before anything uses a device, or start a new Python.",
    )


def _keep_freed_memory() -> None:
    """Tells glibc (other C libraries have no such call) to reuse freed memory instead of handing it back.

    XLA's CPU backend frees its buffers after every step, and pages that come anew must first be cleared: 11 % of the processor time of
    `moejax train configs/qwen3_moe_small_cpu.py` was that (perf, two cores of an AMD EPYC, 2026-11-30). Threads other than the first have
    small heaps and map large buffers anew, so the first one shall run the programs of one device, and with them allocate.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # numbers of malloc.h
    for option, value in ((trim_threshold, -1), (top_pad, 2**27), (mmap_max, 0)):
        if mallopt is not None and not mallopt(option, value):
            raise OSError(f"mallopt({option}, {value}) was refused by the C library.")
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def find_place(config: ProcessConfig) -> Place | None:
    """Where this process stands, from the config or else the environment; None for a run of one process.

    Raises:
      ConfigError: the environment is that of a cluster, but it does not say all.
    """
    if config.coordinator:
        return Place(coordinator=config.coordinator, num_processes=config.num_processes, process_id=config.process_id, source="processes.*")
    if "JAX_NUM_PROCESSES" in os.environ:
        return _from_variables()
    for source, cluster, shared in (("SLURM", SlurmCluster, _slurm_shares_nodes), ("Open MPI", OmpiCluster, _ompi_shares_nodes)):
        if cluster.is_env_present() and cluster.get_process_count() > 1:
            local = cluster.get_local_process_id()
            coordinator = cluster.get_coordinator_address(
                timeout_secs=START_TIMEOUT_S, override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT")
            )
            return Place(
                coordinator=coordinator,
                num_processes=cluster.get_process_count(),
                process_id=cluster.get_process_id(),
                local_device_ids=(local,) if shared() and local is not None else None,
                source=source,
            )
    return None


def _slurm_shares_nodes() -> bool:
    """Several tasks on a node take one GPU each; a lone task takes all."""
    return int(os.environ["SLURM_NTASKS"]) > int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))


def _ompi_shares_nodes() -> bool:
    return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")) > 1


def _from_variables() -> Place:
    """JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS; the last two have a default in an indexed Kubernetes job."""
    index = os.environ.get("JAX_PROCESS_ID", os.environ.get("JOB_COMPLETION_INDEX"))
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is None and "JOB_COMPLETION_INDEX" in os.environ:
        # The pods of an indexed job are called <job>-<index>, and reach each other by name under the job's headless service.
        host, _, domain = socket.getfqdn().partition(".")
        coordinator = f"{host.rpartition('-')[0]}-0.{domain}:55527"
    if index is None or coordinator is None:
        raise ConfigError(
            f"JAX_NUM_PROCESSES={os.environ['JAX_NUM_PROCESSES']} is set, but JAX_PROCESS_ID={index} and "
            f"JAX_COORDINATOR_ADDRESS={coordinator} are not both; set them, or give processes.coordinator, num_processes "
            "and process_id."
        )
    return Place(
        coordinator=coordinator,
        num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
        process_id=int(index),
        source="Kubernetes" if "JOB_COMPLETION_INDEX" in os.environ else "JAX_* variables",
    )


def initialize(config: ProcessConfig) -> Place | None:
    """Joins the other processes, and watches them from then on; does nothing in a run of one process.

    When a process dies, hangs or fails, each of the others ends within `config.timeout_s` seconds with exit code
    `watch.EXIT_LOST` and a line on stderr that names the process and its host. Call it before anything uses a device. On CPUs it turns
    JAX's persistent compilation cache off.

    Returns:
      This process's place, or None for one process.

    Raises:
      ConfigError: see `find_place`.
      RuntimeError: the others did not come within START_TIMEOUT_S, or JAX was in use already.
    """
    place = find_place(config)
    if place is None or place.num_processes == 1:
        return None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        place.coordinator,
        num_processes=place.num_processes,
        process_id=place.process_id,
        local_device_ids=place.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=START_TIMEOUT_S,
        heartbeat_timeout_seconds=2 * config.timeout_s,  # an abort without a name; the watch is to come first
    )
    watch.start(place.coordinator, place.num_processes, place.process_id, timeout_s=config.timeout_s)
    if jax.default_backend() == "cpu":
        # XLA's CPU backend forgets the order between collectives in a loop and those beside it when it reads a program back (a resource of
        # its own per sequence: ThunkSequenceSerDesProtobuf::FromProto in xla/backends/cpu/runtime/thunk_proto_serdes.cc). JAX gives the
        # program to process 0 alone, whose collectives then meet others of the processes that compiled, and all wait for ever.
        jax.config.update("jax_enable_compilation_cache", False)
    return place


class DisagreementError(RuntimeError):
    """Processes of one run that were given different things."""


def agree(name: str, text: str) -> None:
    """Returns once all processes have called it with the same text; every one of them must call it, once per name.

    Processes that compile at different speeds meet here: Gloo gives up 30 s after the first one came to a collective.

    Raises:
      DisagreementError: in all processes, with the lines that differ.
    """
    if jax.process_count() == 1:
        return
    client: Any = distributed.global_state.client  # jax has no public way to its key-value store
    client.key_value_set(f"moejax/agree/{name}/{jax.process_index()}", text)
    texts = []
    for other in range(jax.process_count()):
        try:
            texts.append(client.blocking_key_value_get(f"moejax/agree/{name}/{other}", 1000 * START_TIMEOUT_S))
        except jax.errors.JaxRuntimeError as error:
            raise DisagreementError(f"{name}: process {other} did not come to it within {START_TIMEOUT_S} s.") from error
    for other, theirs in enumerate(texts):
        if theirs != texts[0]:
            ours, theirs = (set(lines.splitlines()) for lines in (texts[0], theirs))
            spell = lambda lines: "; ".join(sorted(line.strip() for line in lines))
            raise DisagreementError(
                f"{name}: process {other} has {spell(theirs - ours)!r} where process 0 has {spell(ours - theirs)!r}. Start all with the same."
            )
