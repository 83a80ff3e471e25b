"""Which GPU a program is lowered for, and what stands in the way of GPU kernels here."""

import importlib.util
import os
import pathlib
import re

import jax


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU, in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def find_ptxas() -> str | None:
    """The assembler of JAX's CUDA wheel, which is the one that loads what jax-triton emits; None if it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    paths = (pathlib.Path(folder) / "cuda_nvcc" / "bin" / "ptxas" for folder in folders)
    return next((str(path) for path in paths if path.exists()), None)


def device_kind() -> str | None:
    """Kind of the NVIDIA GPU that a program traced here is for, e.g. "NVIDIA H200"; None for another device.

    The mesh that `jax.set_mesh` or `jax.sharding.use_abstract_mesh` has set goes before the default device, so that programs
    can be lowered for GPUs that are not there.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device is not None else jax.devices()[0].device_kind
    return kind if "NVIDIA" in kind else None


def why_no_triton() -> str | None:
    """Why Triton kernels cannot run or be compiled here, as the end of a sentence; None if they can."""
    missing = [name for name in ("triton", *(() if interpreted() else ("jax_triton",))) if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs the package {missing[0]}, which is not installed. pip install 'moejax[gpu]', or pass implementation='xla'."
    if not interpreted() and device_kind() is None:
        return f"needs an NVIDIA GPU, and this program is for {_where()}. Pass implementation='xla'."
    return None


def why_no_mosaic() -> str | None:
    """Why Pallas Mosaic kernels of the Hopper kind cannot run or be compiled here, as the end of a sentence; None if they can."""
    kind = device_kind()
    if kind is None or not re.search(r"\bG?H[128]00\b", kind):
        instead = "triton_gpu" if kind else "xla"
        return f"needs a Hopper GPU (H100, H200), and this program is for {kind or _where()}. Pass implementation={instead!r}."
    return None


def _where() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind
