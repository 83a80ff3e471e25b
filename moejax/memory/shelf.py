"""Arrays in files of this process, read ahead and written behind. Scratch: what lies there ends with the process; checkpoints hold the truth."""

import concurrent.futures
import contextlib
import fcntl
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

Index = tuple[tuple[int, int], ...]
"""Which part of an array: first and last (excluded) place along each dim."""
Parts = dict[Index, np.ndarray]
"""What this process holds of an array."""
Record = dict[str, Parts]
"""Arrays that are read and written together, by name."""


class ShelfBusyError(RuntimeError):
    """Another run keeps its files in the folder."""


class ShelfError(RuntimeError):
    """The folder cannot be made, read or written."""


def parts_of(array: jax.Array) -> Parts:
    """This process's parts of an array; each once, however many devices hold it."""
    shards = {_spell(shard.index, array.shape): shard for shard in array.addressable_shards}
    return {index: np.asarray(shard.data) for index, shard in shards.items()}


def assemble(parts: Parts, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.Array:
    """The array whose parts on this process are these."""
    return jax.make_array_from_callback(shape, sharding, lambda index: parts[_spell(index, shape)])


def _spell(index, shape: tuple[int, ...]) -> Index:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


class Shelf:
    """Records in a folder, one file each."""

    def __init__(self, folder: str | Path, *, ahead: int):
        """
        Args:
          folder: of this process alone; made if missing, emptied of what an earlier process left.
          ahead: records that are read before they are asked for, and that may wait to be written.

        Raises:
          ShelfBusyError: a living process uses the folder.
          ShelfError: it cannot be made; later on, that a record cannot be read or written.
        """
        self.folder, self.ahead = Path(folder), ahead
        self._layouts: dict[str, list[tuple[str, Index, tuple[int, ...], np.dtype]]] = {}
        with self._named("made"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock_file.close()
            raise ShelfBusyError(f"another run keeps its optimizer in {self.folder}; give this one another tiers.folder.") from error
        for left in self.folder.glob("*.record"):
            left.unlink()
        self._writing: dict[str, concurrent.futures.Future] = {}
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "moejax shelf reader")
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "moejax shelf writer")
        self._seconds: dict[str, float] = dict.fromkeys(("read_s", "read_wait_s", "write_s", "write_wait_s"), 0.0)

    def write(self, name: str, arrays: Mapping[str, jax.Array | Parts]) -> None:
        """Begins to write a record, in place of one of that name; the arrays may still be in the making.

        Waits while more than `ahead` are unfinished; raises what went wrong with an earlier one.
        """
        began_s = time.perf_counter()
        while len(self._writing) > self.ahead:
            self._finish(next(iter(self._writing)))
        if name in self._writing:
            self._finish(name)
        self._seconds["write_wait_s"] += time.perf_counter() - began_s
        self._writing[name] = self._writer.submit(self._write, name, arrays)

    def read(self, names: list[str]) -> Generator[Record]:
        """The records, in this order; reading begins at once, and goes on while the caller works on those it has."""
        futures = [self._read_later(name) for name in names[: self.ahead]]

        def records() -> Generator[Record]:
            try:
                for at in range(len(names)):
                    began_s = time.perf_counter()
                    record = futures.pop(0).result()
                    self._seconds["read_wait_s"] += time.perf_counter() - began_s
                    if at + self.ahead < len(names):
                        futures.append(self._read_later(names[at + self.ahead]))
                    yield record
            finally:
                for future in futures:
                    future.cancel()

        return records()

    def drain(self) -> None:
        """Waits until all is written; raises what went wrong."""
        for name in list(self._writing):
            self._finish(name)

    def bytes(self) -> int:
        """Size of all records."""
        return sum(int(np.prod(shape)) * dtype.itemsize for layout in self._layouts.values() for _, _, shape, dtype in layout)

    def seconds(self) -> dict[str, float]:
        """Time that reading and writing took since the last call, and time that the caller waited for them: the rest was hidden."""
        taken = self._seconds
        self._seconds = dict.fromkeys(taken, 0.0)
        return taken

    def close(self) -> None:
        """Ends the threads and removes the files."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        for path in self.folder.glob("*.record"):
            path.unlink()
        self._lock_file.close()

    def _finish(self, name: str) -> None:
        self._writing.pop(name).result()

    def _read_later(self, name: str) -> concurrent.futures.Future:
        return self._reader.submit(self._read, name, self._writing.get(name))

    def _read(self, name: str, unfinished: concurrent.futures.Future | None) -> Record:
        if unfinished is not None:
            unfinished.result()
        began_s = time.perf_counter()
        record: Record = {}
        with self._named("read"), self._path(name).open("rb", buffering=0) as file:
            for array, index, shape, dtype in self._layouts[name]:
                part = np.empty(shape, dtype)
                _fill(file, part)
                record.setdefault(array, {})[index] = part
        self._seconds["read_s"] += time.perf_counter() - began_s
        return record

    def _write(self, name: str, arrays: Mapping[str, jax.Array | Parts]) -> None:
        record = {array: parts_of(value.block_until_ready()) if isinstance(value, jax.Array) else value for array, value in arrays.items()}
        began_s = time.perf_counter()
        self._layouts[name] = [(array, index, part.shape, part.dtype) for array, parts in record.items() for index, part in parts.items()]
        with self._named("written"), self._path(name).open("wb", buffering=0) as file:
            for parts in record.values():
                for part in parts.values():
                    _pour(file, part)
        self._seconds["write_s"] += time.perf_counter() - began_s

    @contextlib.contextmanager
    def _named(self, done: str):
        try:
            yield
        except OSError as error:
            raise ShelfError(
                f"tiers.folder: {self.folder} cannot be {done} ({error}); its records take {self.bytes() / 2**20:.0f} MiB so far. A folder on a "
                "file system with room fits, or tiers.optimizer='host'."
            ) from error

    def _path(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '.')}.record"


def _bytes_view(part: np.ndarray) -> memoryview:
    return memoryview(part.reshape(-1).view(np.uint8)) if part.size else memoryview(b"")


def _fill(file: Any, part: np.ndarray) -> None:
    view = _bytes_view(part)
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError(f"{file.name} ends {len(view)} bytes early: something else wrote to it.")
        view = view[count:]


def _pour(file: Any, part: np.ndarray) -> None:
    view = _bytes_view(np.ascontiguousarray(part))
    while view:
        view = view[file.write(view) :]
