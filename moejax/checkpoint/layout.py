"""The layout of a checkpoint: what must agree before any tensor is read."""

import hashlib
import json
from typing import Any

import jax
import numpy as np

Layout = dict[str, Any]


class LayoutError(ValueError):
    """A checkpoint holds other arrays than the run needs. The message lists the first that differ."""


def layout(state: Any, optimizer: str) -> Layout:
    """Paths, shapes and dtypes of a tree of arrays, and the optimizer that gives its moments a meaning.

    Args:
      state: tree of arrays or of `jax.ShapeDtypeStruct`.
      optimizer: kind of optimizer, e.g. "adamw".

    Returns:
      A json dict with `optimizer`, `arrays` (path to e.g. "float32[4,8]", sorted) and `hash` over both.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): _spell(leaf) for path, leaf in leaves}
    content = {"optimizer": optimizer, "arrays": dict(sorted(arrays.items()))}
    return content | {"hash": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def _spell(leaf: Any) -> str:
    shape, dtype = (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else (np.shape(leaf), np.result_type(leaf))
    return f"{dtype}[{','.join(map(str, shape))}]"


def check(stored: Layout, wanted: Layout, *, where: str, limit: int = 8) -> None:
    """Raises LayoutError, with the first `limit` differences, unless both layouts are the same."""
    if stored["hash"] == wanted["hash"]:
        return
    differences = []
    if stored["optimizer"] != wanted["optimizer"]:
        differences.append(f"optimizer: stored {stored['optimizer']}, the run has {wanted['optimizer']}")
    for path in sorted(stored["arrays"].keys() | wanted["arrays"].keys()):
        theirs, ours = stored["arrays"].get(path, "nothing"), wanted["arrays"].get(path, "nothing")
        if theirs != ours:
            differences.append(f"{path}: stored {theirs}, the run has {ours}")
    more = f"\n  and {len(differences) - limit} more" if len(differences) > limit else ""
    raise LayoutError(
        f"The checkpoint {where} has another layout than this run, nothing was read:\n  "
        + "\n  ".join(differences[:limit])
        + more
        + "\nGo on with the config it was written with (config.json in its run's folder), or give the run another --name to start afresh."
    )
