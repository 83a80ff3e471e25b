"""A folder of safetensors: what is in it, read tensor by tensor."""

import json
import pathlib
import re

import numpy as np
from safetensors import SafetensorError, safe_open

from moejax.hf.families import CheckpointError

READABLE = ("F64", "F32", "F16", "BF16")


class TensorFiles:
    """All tensors of a checkpoint folder; nothing is read before it is asked for."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        # never what else lies there: an optimizer's file has the same keys
        names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
        absent = [name for name in names if not (folder / name).exists()]
        if absent:
            there = ", ".join(sorted(path.name for path in folder.glob("*.safetensors"))) or "none"
            raise CheckpointError(
                f"{folder}: {', '.join(absent)} is missing; a checkpoint is model.safetensors, or the files that "
                f"model.safetensors.index.json lists. Files of that kind there: {there}."
            )
        self._files = {name: _opened(folder / name) for name in names}
        self._file_of = {key: name for name, file in self._files.items() for key in file.keys()}  # noqa: SIM118 (not a dict)

    @property
    def keys(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of one tensor, from the file's header."""
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """Dtype as safetensors names it."""
        return self._slice(key).get_dtype()

    def read(self, key: str) -> np.ndarray:
        """One tensor, from disk."""
        return self._files[self._file_of[key]].get_tensor(key)

    def refuse_unreadable(self, num_layers: int) -> None:
        """Raises CheckpointError if there are tensors of a kind that is not read yet, naming the kind and the first few keys."""
        beyond = [
            key
            for key in self.keys
            if (found := re.search(r"(?:^|\.)layers\.(\d+)\.", key)) and int(found[1]) >= num_layers and "visual" not in key
        ]
        mtp = sorted(beyond + [key for key in self.keys if re.search(r"(?:^|\.)mtp\.", key)])
        packed = sorted(key for key in self.keys if re.search(r"weight_packed$|_blocks$|blocks$|weight_scale$", key))
        fp8 = sorted(key for key in self.keys if self.dtype(key).startswith("F8") or key.endswith("weight_scale_inv"))
        for kind, keys in (("FP8 weights", fp8), ("MXFP4 blocks", packed), ("multi-token-prediction (MTP) layers", mtp)):
            if keys:
                raise CheckpointError(f"{self.folder}: {kind} are not read yet: {_some(keys)}.")
        odd = sorted(key for key in self.keys if self.dtype(key) not in READABLE)
        if odd:
            raise CheckpointError(f"{self.folder}: dtype {self.dtype(odd[0])} is not read, only {', '.join(READABLE)}: {_some(odd)}.")

    def _slice(self, key: str):
        return self._files[self._file_of[key]].get_slice(key)


def read_json(path: pathlib.Path) -> dict:
    """A checkpoint's json file; CheckpointError names one that is none."""
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: is no json: {error}.") from error


def _opened(path: pathlib.Path):
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is no whole safetensors file: {error}.") from error


def _some(keys: list[str], limit: int = 10) -> str:
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(keys[:limit]) + more


def compare_keys(wanted: list[tuple[str, ...]], there: set[str], ignored: set[str], source: pathlib.Path) -> list[str]:
    """The name under which each wanted tensor is there.

    Raises:
      CheckpointError: some are missing, or some that are there are not wanted; both are listed.
    """
    found = [next((key for key in keys if key in there), None) for keys in wanted]
    missing = sorted(keys[0] for keys, key in zip(wanted, found, strict=True) if key is None)
    unknown = sorted(there - ignored - {key for key in found if key})
    if missing or unknown:
        parts = [f"{len(keys)} {word} keys: {_some(keys)}" for word, keys in (("missing", missing), ("unknown", unknown)) if keys]
        raise CheckpointError(f"{source}: " + "; ".join(parts) + ".")
    return [key for key in found if key]
