"""What stands in a program compiled for a GPU: launches, collectives, registers and spills."""

import collections
import dataclasses
import re
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jaxlib.mlir import ir
from moejax_kernels.gpu import find_ptxas

from moejax.plan.targets import Target

TRITON_CALL = "triton_kernel_call_ffi"
MOSAIC_CALL = "mosaic_gpu_v2"
COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelUse:
    """What the assembler says of one GPU kernel."""

    name: str
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Stores and loads of registers to memory, per thread."""
    stack_bytes: int
    """Per thread."""


def kernel_uses(lowered: jax.stages.Lowered, target: Target) -> list[KernelUse]:
    """Registers and spills of every Triton kernel of a program, from `ptxas -v`.

    Raises:
      RuntimeError: the assembler is not installed, or refuses a kernel; its words are in the message.
    """
    return [_assemble(ptx, target) for ptx in triton_ptx(lowered)]


def triton_ptx(lowered: jax.stages.Lowered) -> list[str]:
    """PTX of each distinct Triton kernel in a lowered program."""
    found: dict[str, None] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and TRITON_CALL in str(op.attributes["call_target_name"]):
            config = ir.DictAttr(op.attributes["mhlo.backend_config" if "mhlo.backend_config" in op.attributes else "backend_config"])
            proto = zlib.decompress(ir.StringAttr(config["opaque"]).value_bytes)
            found.update(dict.fromkeys(text.decode() for text in _strings(proto) if text.startswith(b"//") and b".entry" in text))
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    return list(found)


def _strings(proto: bytes) -> Iterator[bytes]:
    """Length-delimited fields of a serialized protobuf message and of the messages inside it."""
    at = 0
    while at < len(proto):
        try:
            tag, at = _varint(proto, at)
            size, at = (4, at) if tag % 8 == 5 else (8, at) if tag % 8 == 1 else _varint(proto, at)
        except IndexError:
            return  # these bytes were no message
        if tag % 8 == 0:
            continue
        if tag % 8 == 2:
            field = proto[at : at + size]
            yield field
            if not field.startswith(b"//"):
                yield from _strings(field)
        elif tag % 8 in (3, 4, 6, 7):
            return
        at += size


def _varint(proto: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (proto[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if proto[at - 1] < 128:
            return value, at


def _assemble(ptx: str, target: Target) -> KernelUse:
    ptxas = find_ptxas()
    if ptxas is None:
        raise RuntimeError("reading registers and spills needs ptxas: pip install 'moejax[plan]'.")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [ptxas, "-v", "--gpu-name", target.architecture, str(source), "-o", f"{folder}/kernel.cubin"],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"ptxas refused a kernel for {target.name}: {done.stderr.strip()}")
    number = lambda pattern: sum(int(value) for value in re.findall(pattern, done.stderr))
    (name,) = re.findall(r"\.entry\s+(\w+)", ptx)
    return KernelUse(
        name=name,
        registers=number(r"Used (\d+) registers"),
        spilled_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
    )


def launches(compiled: jax.stages.Compiled) -> collections.Counter:
    """GPU kernels that one run of a compiled program launches, by what makes them.

    Counts instructions of the entry computation and of the loops' bodies once each: `triton`, `mosaic`, `fusion` (XLA's own),
    `gemm` and other custom calls by their target, and copies.
    """
    counts: collections.Counter = collections.Counter()
    for line in _launching_lines(compiled.as_text() or ""):
        if found := re.search(r" custom-call\(.*custom_call_target=\"([^\"]+)\"", line):
            counts[{TRITON_CALL: "triton", MOSAIC_CALL: "mosaic"}.get(found[1], found[1])] += 1
        elif found := re.search(r"^\s*(?:ROOT )?%?[\w.-]+ = .*? (fusion|copy|dot|sort|scatter|gather|reduce|convolution)\(", line):
            counts[found[1]] += 1
    return counts


def _launching_lines(text: str) -> Iterator[str]:
    """Instructions outside of fused and applied computations."""
    inside = False
    called = set(re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", text))
    for line in text.splitlines():
        if head := re.match(r"^(?:ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$", line):
            inside = head[1] not in called
        elif inside:
            yield line


def collectives(compiled: jax.stages.Compiled) -> collections.Counter:
    """How many of each collective stand in a compiled program."""
    pattern = rf" ({'|'.join(COLLECTIVES)})(?:-start)?\("
    return collections.Counter(re.findall(pattern, compiled.as_text() or ""))
