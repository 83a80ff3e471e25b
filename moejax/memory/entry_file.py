"""One cached value in one file: whole or not there, and never mistaken for another.

The file is MAGIC, the header's length and checksum, the header (json), the arrays' bytes one after the other. It is written under another
name and renamed when it is on disk.
"""

import hashlib
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAGIC = b"moejax entry 1\n"
_PREFIX = struct.Struct(f"<{len(MAGIC)}sQ16s")
UNFINISHED = ".unfinished"
"""Suffix of files that are being written."""


class CorruptEntryError(ValueError):
    """A file is not what its name says: cut off, changed, or of another entry."""


def write_entry(path: Path, key: str, version: str, value: Any) -> int:
    """Writes a tree of numpy arrays (of dicts, lists, tuples and None); returns the file's bytes."""
    leaves, shape = [], spell_tree(value)
    jax.tree.map(leaves.append, value)
    checksum = hashlib.blake2b(digest_size=16)
    blocks = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves]
    for block in blocks:
        checksum.update(block)
    header = {
        "key": key,
        "version": version,
        "tree": shape,
        "arrays": [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves],
        "checksum": checksum.hexdigest(),
    }
    text = json.dumps(header).encode()
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            file.write(_PREFIX.pack(MAGIC, len(text), _digest(text)) + text)
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)  # a full disk
        raise
    return size


def read_header(path: Path) -> dict[str, Any]:
    """Header of a file of the right length.

    Raises:
      CorruptEntryError: see there.
    """
    with path.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise CorruptEntryError(f"{path} ends in its first {_PREFIX.size} bytes.")
        magic, length, checksum = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise CorruptEntryError(f"{path} is no entry of a store.")
        size = path.stat().st_size
        text = file.read(min(length, size))
        if _digest(text) != checksum:
            raise CorruptEntryError(f"{path} has a broken header.")
    header = json.loads(text)
    header["starts_at"] = _PREFIX.size + length
    wanted = header["starts_at"] + sum(_bytes_of(*array) for array in header["arrays"])
    if size != wanted:
        raise CorruptEntryError(f"{path} has {size} bytes, its header tells of {wanted}.")
    return header


def read_entry(path: Path, key: str, version: str) -> Any:
    """The value that `write_entry` was given, read-only arrays.

    Raises:
      FileNotFoundError: there is no such file.
      CorruptEntryError: it is damaged, or holds another entry.
    """
    header = read_header(path)
    if (header["key"], header["version"]) != (key, version):
        raise CorruptEntryError(f"{path} holds {header['key']} of version {header['version']}, not {key} of {version}.")
    with path.open("rb") as file:
        file.seek(header["starts_at"])
        content = file.read()
    if hashlib.blake2b(content, digest_size=16).hexdigest() != header["checksum"]:
        raise CorruptEntryError(f"{path} has changed since it was written.")
    leaves, at = [], 0
    for dtype, shape in header["arrays"]:
        size = _bytes_of(dtype, shape)
        leaves.append(np.frombuffer(content[at : at + size], jnp.dtype(dtype)).reshape(shape))
        at += size
    return _build_tree(header["tree"], iter(leaves))


def spell_tree(value: Any) -> Any:
    """The structure of a tree as json.

    Raises:
      TypeError: a node is neither dict with string keys, list, tuple nor None, or a leaf is no array.
    """
    if value is None:
        return None
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {"dict": [[name, spell_tree(value[name])] for name in sorted(value)]}  # the order of jax.tree
    if type(value) in (list, tuple):
        return {type(value).__name__: [spell_tree(node) for node in value]}
    if isinstance(value, np.ndarray | jax.Array):
        return "array"
    raise TypeError(f"a store keeps arrays in dicts with string keys, lists and tuples; {type(value).__name__} is none of them.")


def _build_tree(shape: Any, leaves) -> Any:
    if shape is None:
        return None
    if shape == "array":
        return next(leaves)
    ((kind, nodes),) = shape.items()
    if kind == "dict":
        return {name: _build_tree(node, leaves) for name, node in nodes}
    return {"list": list, "tuple": tuple}[kind](_build_tree(node, leaves) for node in nodes)


def _bytes_of(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
