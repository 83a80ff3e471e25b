"""The order in which a compiled program runs: what is computed while a collective or a copy to the host is on its way, and whom it reaches."""

import dataclasses
import math
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import jax
import numpy as np

from moejax.plan.compiled import MOSAIC_CALL

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_ON_HOST = ":S(5)"
_NO_COPY = ("parameter", "get-tuple-element", "tuple", "while", "bitcast", "custom-call", "conditional", "call", "opt-barrier")
"""Instructions that name arrays in host memory without moving any."""
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One collective of a compiled program."""

    operand_bytes: int
    """On one device."""
    groups: tuple[tuple[int, ...], ...]
    """Devices that exchange with each other."""
    op_name: str
    """Where it comes from in the traced program."""
    meanwhile: tuple[str, ...]
    """Where the matrix products between its start and its end come from; empty for a collective that everything waits for."""


def exchanges(compiled: jax.stages.Compiled, kind: str) -> list[Exchange]:
    """Collectives of one kind (as in `compiled.COLLECTIVES`) in the order in which they start; those of a loop's body once."""
    found = []
    for _, instructions, products in _schedules(compiled):
        shapes = {match[1]: match[2] for match in instructions}
        for place, match in enumerate(instructions):
            if _is_start(match, kind):
                found.append(
                    Exchange(
                        operand_bytes=sum(_bytes(shapes[name]) for name in re.findall(r"%([\w.-]+)", match[4])),
                        groups=_groups(match.string),
                        op_name=_op_name(match.string),
                        meanwhile=_meanwhile(instructions, place, products),
                    )
                )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostCopy:
    """One copy between a device's memory and the host's."""

    to_host: bool
    moved_bytes: int
    op_name: str
    """Where it comes from in the traced program."""
    meanwhile: tuple[str, ...]
    """Where the matrix products between its start and its end come from, whole loops of them too; empty for a copy that everything waits for."""


def host_copies(compiled: jax.stages.Compiled) -> list[HostCopy]:
    """Copies between device and host in the order in which they start; those of a loop's body once."""
    found = []
    fused = set(re.findall(r"calls=%?([\w.-]+)", compiled.as_text() or ""))
    schedules = list(_schedules(compiled))
    loops = {name for name, instructions, products in schedules if any(_is_matmul(match.string, products) for match in instructions)}
    for name, instructions, products in schedules:
        if name in fused:
            continue
        shapes = {match[1]: match[2] for match in instructions}
        for place, match in enumerate(instructions):
            operands = [shapes.get(name, "") for name in re.findall(r"%([\w.-]+)", match[4])]
            if match[3] in _NO_COPY or match[3].endswith("-done") or not any(_ON_HOST in shape for shape in (match[2], *operands)):
                continue
            device_bytes = [_bytes(shape) for shape in operands if _ON_HOST not in shape]
            result = _result(match)
            to_host = _ON_HOST in result
            found.append(
                HostCopy(
                    to_host=to_host,
                    moved_bytes=max(device_bytes, default=0) if to_host else _bytes(result),
                    op_name=_op_name(match.string),
                    meanwhile=_meanwhile(instructions, place, products, loops),
                )
            )
    return found


def _schedules(compiled: jax.stages.Compiled) -> Iterator[tuple[str, list[re.Match], set[str]]]:
    """Name and instructions of each computation, in the order of the schedule, and the names of those that hold matrix products."""
    computations = _computations(compiled.as_text() or "")
    products = {name for name, lines in computations.items() if any(" dot(" in line for line in lines)}
    for name, lines in computations.items():
        yield name, [match for match in map(_INSTRUCTION.match, lines) if match], products


def _meanwhile(instructions: list[re.Match], place: int, products: set[str], loops: AbstractSet[str] = frozenset()) -> tuple[str, ...]:
    """Where the products between the start at `place` and its end come from, and the loops whose bodies are among `loops`."""
    used = re.compile(rf"%{re.escape(instructions[place][1])}\b")
    later = instructions[place + 1 :]
    end = next((i for i, other in enumerate(later) if other[3].endswith("-done") and used.search(other[4])), 0)
    works = lambda line: _is_matmul(line, products) or bool(loops & set(re.findall(r" while\(.*body=%?([\w.-]+)", line)))
    return tuple(_op_name(other.string) for other in later[:end] if works(other.string))


def _computations(text: str) -> dict[str, list[str]]:
    """Lines of each computation, in the order of the schedule."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = computations.setdefault(head[1], [])
        else:
            lines.append(line)
    return computations


def _result(match: re.Match) -> str:
    """Type of an instruction's result; a start's tuple holds operands and a context beside it."""
    if match[3] == "copy-start":  # (there, here, context)
        return re.findall(r"\w+\[[^\]]*\]\{[^}]*\}", match[2])[0]
    if match[3].endswith("-start"):  # ((operands), result, context)
        return re.sub(r"^\(\(.*?\), (.*), u32\[\]\)$", r"\1", match[2])
    return match[2]


def _is_start(match: re.Match, kind: str) -> bool:
    """Whether an instruction begins a collective; one that JAX or XLA wrapped names the computation that holds it."""
    if match[3] == "async-start":
        called = re.search(r"calls=%?([\w.-]+)", match.string)
        return called is not None and re.match(rf"(?:async_|wrapped_)*{kind}\b", called[1].replace("_", "-")) is not None
    return match[3] in (kind, f"{kind}-start")


def _is_matmul(line: str, products: set[str]) -> bool:
    """A product of XLA or of a library, or one of our Mosaic kernels, all of which are grouped matmuls."""
    called = re.search(r"calls=%?([\w.-]+)", line)
    target = re.search(r'custom_call_target="([^"]+)"', line)
    inside = called is not None and called[1] in products
    return inside or " dot(" in line or (target is not None and (target[1] == MOSAIC_CALL or "gemm" in target[1] or "matmul" in target[1]))


def _op_name(line: str) -> str:
    found = re.search(r'op_name="([^"]*)"', line)
    return found[1] if found else ""


def _bytes(shape: str) -> int:
    """Of an array, or of all arrays of a tuple."""
    parts = re.findall(rf"\b({'|'.join(_ITEM_BYTES)})\[([\d,]*)\]", shape)
    return sum(_ITEM_BYTES[dtype] * math.prod(int(size) for size in sizes.split(",") if size) for dtype, sizes in parts)


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """Spelt out, as {{0,1},{2,3}}, or by the axes of a mesh, as mesh['fsdp'=2,'expert'=4] {'expert'}."""
    if spelt := re.search(r"replica_groups=\{(\{[\d,{}]+\})\}", line):
        return tuple(tuple(int(device) for device in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", spelt[1]))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if mesh is None:
        raise ValueError(f"replica groups in a form that is not known here: {line.strip()[:400]}")
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    axes = re.findall(r"'(\w+)'", mesh[2])
    order = [name for name in sizes if name not in axes] + axes
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    groups = devices.transpose([list(sizes).index(name) for name in order]).reshape(-1, math.prod(sizes[name] for name in axes))
    return tuple(tuple(int(device) for device in group) for group in groups)
