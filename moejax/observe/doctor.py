"""What this machine can run, and what would mend the rest."""

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import jax
from moejax_kernels.gpu import find_ptxas
from moejax_kernels.survey import survey

from moejax.observe.run_folder import installed

OLDEST_PYTHON = (3, 12)
CLUSTERS = {
    "SLURM": "SLURM_PROCID",
    "Open MPI": "OMPI_COMM_WORLD_RANK",
    "Kubernetes": "KUBERNETES_SERVICE_HOST",
    "JAX variables": "JAX_NUM_PROCESSES",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that was looked for."""

    name: str
    ok: bool
    found: str
    """What is there, or what its absence means."""
    mend: str = ""
    """What to do, where something is missing."""
    needed: bool = True
    """Whether moejax cannot run without it; False: a part of it."""


def examine() -> list[Row]:
    """Looks at everything; starts JAX's devices."""
    return [_python(), *_packages(), *_machine(), *_gpu(), _cluster(), *_ops()]


def _python() -> Row:
    return Row(
        name="python",
        ok=sys.version_info[:2] >= OLDEST_PYTHON,
        found=platform.python_version(),
        mend=f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer and run `make train` again",
    )


def _packages() -> list[Row]:
    """Every package that moejax asks for, against the versions it asks for; those of extras are not needed."""
    rows, seen = [], set()
    wishes = [_parse_requirement(wish) for wish in importlib.metadata.requires("moejax") or []]
    for name, wanted, extra in sorted(wishes, key=lambda wish: wish[2] == "dev"):  # what others ask for too is named with their extra
        if name in seen:
            continue
        seen.add(name)
        version = installed(name)
        pinned = wanted.partition("==")[2]
        ok = version is not None and pinned in ("", version)
        mend = f"pip install '.[{extra}]'" if extra else "pip install ."
        rows.append(
            Row(name=name, ok=ok, found=version or "not installed", mend=f"{mend} (wants {wanted or 'any version'})", needed=not extra)
        )
    return rows


def _parse_requirement(wish: str) -> tuple[str, str, str]:
    """Name, version condition and extra of e.g. `jax[cuda12]==0.11.2; extra == "gpu"`."""
    package, _, marker = wish.partition(";")
    ((name, condition),) = re.findall(r"^([\w.-]+(?:\[[\w,]+\])?)\s*(.*)$", package.strip())
    extra = re.search(r'extra == "(\w+)"', marker)
    if name == "jax[cuda12]":
        return "jax-cuda12-plugin", condition, extra.group(1) if extra else ""
    return name.partition("[")[0], condition, extra.group(1) if extra else ""


def _machine() -> list[Row]:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    free_gb = shutil.disk_usage(".").free / 1e9
    return [
        Row(name="cores", ok=True, found=str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())),
        Row(name="memory", ok=memory_gb >= 8, found=f"{memory_gb:.0f} GB", mend="the tiny configs want 8 GB", needed=False),
        Row(name="disk", ok=free_gb >= 5, found=f"{free_gb:.0f} GB free here", mend="an install and a run want 5 GB", needed=False),
    ]


def _gpu() -> list[Row]:
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    devices = jax.devices()
    on_gpu = devices[0].platform == "gpu"
    seen = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    ptxas = shutil.which("ptxas") or find_ptxas()
    cudnn = installed("nvidia-cudnn-cu12")
    return [
        Row(
            name="devices",
            ok=on_gpu or not driver,
            found=seen,
            needed=False,
            mend="there is a GPU driver, but JAX does not use it: pip install '.[gpu]', or unset JAX_PLATFORMS",
        ),
        Row(
            name="GPU driver",
            ok=driver,
            found="there" if driver else "none: runs go to the CPU",
            needed=False,
            mend="a machine with an NVIDIA GPU",
        ),
        Row(
            name="ptxas",
            ok=ptxas is not None,
            found=ptxas or "not found: GPU kernels cannot be compiled",
            needed=False,
            mend="pip install '.[gpu]'",
        ),
        Row(name="cuDNN", ok=cudnn is not None, found=cudnn or "not installed: no GPU runs", needed=False, mend="pip install '.[gpu]'"),
    ]


def _cluster() -> Row:
    found = [name for name, variable in CLUSTERS.items() if variable in os.environ]
    return Row(
        name="processes",
        ok=True,
        needed=False,
        found=f"{', '.join(found)} in the environment" if found else "one; no SLURM, Open MPI or Kubernetes in the environment",
    )


def _ops() -> list[Row]:
    """What each op runs as here, and why not as something faster."""
    rows = []
    for op, implementations in survey().items():
        runs = next(name for name, reason in implementations.items() if reason is None)
        faster = [f"{name} {reason.partition('. ')[0]}" for name, reason in implementations.items() if reason]
        rows.append(Row(name=op, ok=True, needed=False, found="; ".join([f"runs as {runs}", *faster])))
    return rows
