"""A cache of frozen results that outlives steps: device memory, then host memory, then files; the least recently used moves down and out.

An entry is asked for by what it was made from: `content_key` of the inputs, and the version of the parameters. Nothing else is ever given
back: an entry of another version is dropped and counted as stale, a file that is damaged or holds something else as corrupt.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.memory.entry_file import UNFINISHED, CorruptEntryError, read_entry, read_header, spell_tree, write_entry
from moejax.memory.sizing import Sizing, TierLimits
from moejax.memory.use_order import UseOrder

SUFFIX = ".entry"
MAX_GHOSTS = 1 << 15
"""Names kept of entries that were thrown away."""
NO_TIER = TierLimits(limit_bytes=0)


class StoreBusyError(RuntimeError):
    """Another store uses the folder."""


def content_key(arrays: Any, *strings: str) -> str:
    """Hash of a tree of arrays (values, dtypes, shapes and their paths) and of strings: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)

    def add(part) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        array = np.ascontiguousarray(leaf)
        add(f"{jax.tree_util.keystr(path)} {array.dtype}{list(np.shape(leaf))}".encode())
        add(array.reshape(-1).view(np.uint8).data)
    for text in strings:
        add(text.encode())
    return digest.hexdigest()


@dataclasses.dataclass(slots=True)
class _Entry:
    version: str
    value_bytes: int
    value: Any
    """None in the file tier."""
    places: list
    """Of each leaf its sharding, if it came as an array on devices."""


class _Tier:
    def __init__(self, name: str, limits: TierLimits, free_bytes: Callable[[], int | None], window: int):
        self.name, self.free_bytes, self.sizing = name, free_bytes, Sizing(limits, window=window)
        self.entries: UseOrder[_Entry] = UseOrder()

    @property
    def used_bytes(self) -> int:
        return self.entries.total_bytes

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether an entry of that size may lie here, once older ones have left."""
        if num_bytes > self.sizing.limits.limit_bytes:
            return False
        self.sizing.make_room_for(num_bytes)
        self.sizing.press(self.used_bytes + num_bytes, self.free_bytes())
        return num_bytes <= self.sizing.target_bytes


class Store:
    """Trees of arrays under keys, in up to three tiers; safe to call from several threads.

    An entry lies in one tier. Found, it moves to the first one; what no longer fits moves one tier down. A tier that is too small for an
    entry is passed by. Each tier finds its own size (`Sizing`), from where entries are found: in it, below it, or in a list of names of
    what was thrown away.
    """

    def __init__(
        self,
        *,
        host: TierLimits = NO_TIER,
        device: TierLimits = NO_TIER,
        files: TierLimits = NO_TIER,
        folder: str | Path | None = None,
        free_bytes: dict[str, Callable[[], int | None]] | None = None,
        window: int = 1024,
    ):
        """
        Args:
          host, device, files: bounds of the tiers; a limit of 0 leaves one out. With a device tier, values are given back as arrays on
            the devices where they were when put, but for those that JAX would narrow there (64 bits without jax_enable_x64), which stay in
            host memory; these, and all without a device tier, are read-only numpy arrays.
          folder: where the files lie, made if missing; entries of an earlier store are taken over. One store at a time.
          free_bytes: by tier ("device", "host", "files"), what is free now, or None if that is not known; default: the OS, the device.
          window: lookups between two decisions on size.

        Raises:
          ValueError: no tier has room, or files have no folder.
          StoreBusyError: another store, of this process or another, uses the folder.
        """
        if (files.limit_bytes > 0) != (folder is not None):
            raise ValueError(f"folder={folder!r} and files.limit_bytes={files.limit_bytes} go together: give both or neither.")
        self._folder = None if folder is None else Path(folder)
        known = {"device": _free_on_device, "host": _free_on_host, "files": self._free_on_disk} | (free_bytes or {})
        limits = {"device": device, "host": host, "files": files}
        self._tiers = [_Tier(name, limits[name], known[name], window) for name in limits if limits[name].limit_bytes > 0]
        if not self._tiers:
            raise ValueError("a store needs at least one tier with limit_bytes above 0.")
        self._ghosts: UseOrder[str] = UseOrder()
        """Versions of what was thrown away."""
        self._counts = dict.fromkeys(("hits", "misses", "stale", "corrupt", "thrown_away", "unwritten"), 0)
        self._guard = threading.RLock()
        self._lock_file = None
        if self._folder is not None:
            self._open_folder()

    def get(self, key: str, version: str) -> Any:
        """The value put under this key and version, or None. Arrays of a device tier are the store's own: not to be donated."""
        with self._guard:
            place = next((place for place, tier in enumerate(self._tiers) if key in tier.entries), None)
            if place is None:
                self._count_lookup(None, key, version)
                return self._miss()
            tier = self._tiers[place]
            entry = tier.entries[key]
            if entry.version != version:
                self._counts["stale"] += 1
                self._discard(tier, key)
                self._count_lookup(None, key, version)
                return self._miss()
            self._count_lookup(place, key, version)
            value = entry.value
            if tier.name == "files":
                try:
                    value = read_entry(self._path(key), key, version)
                except (CorruptEntryError, OSError):
                    self._counts["corrupt"] += 1
                    self._discard(tier, key)
                    return self._miss()
            self._counts["hits"] += 1
            upper = next((upper for upper in self._tiers[:place] if upper.has_room_for(entry.value_bytes)), None)
            if upper is None:
                tier.entries.use(key)
            else:
                self._discard(tier, key)
                entry.value = value
                self._lay(upper, key, entry)
                value = entry.value
            if any(tier.used_bytes > tier.sizing.target_bytes for tier in self._tiers):
                self._overflow()
            return _on_devices(value, entry.places) if self._tiers[0].name == "device" else value

    def put(self, key: str, version: str, value: Any) -> None:
        """Keeps a copy of a value, in place of one with the same key. What no tier has room for is not kept, and counted as thrown away.

        Args:
          key: of `content_key`.
          version: of the parameters that made it.
          value: arrays in dicts with string keys, lists and tuples.

        Raises:
          ValueError: the key is no plain name.
          TypeError: the value holds something else.
        """
        if not re.fullmatch(r"[\w-]+", key):
            raise ValueError(f"key={key!r} must consist of letters, digits, _ and -, as those of content_key do.")
        spell_tree(value)
        with self._guard:
            leaves = jax.tree.leaves(value)
            size, first = sum(leaf.nbytes for leaf in leaves), self._tiers[0]
            places = [leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves]
            to_device = first.name == "device" and first.has_room_for(size)
            entry = _Entry(version, size, jax.tree.map(_device_copy if to_device else _host_copy, value), places)
            for tier in self._tiers:
                if key in tier.entries:
                    self._discard(tier, key)
            self._forget(key)
            self._settle(key, entry, self._tiers)
            self._overflow()

    def metrics(self) -> dict[str, float]:
        """Counts since the store was made, and bytes of each tier now."""
        with self._guard:
            looked = self._counts["hits"] + self._counts["misses"]
            values = {f"store_{name}": float(count) for name, count in self._counts.items()}
            values["store_hit_rate"] = self._counts["hits"] / max(looked, 1)
            for tier in self._tiers:
                values |= {
                    f"store_{tier.name}_bytes": float(tier.used_bytes),
                    f"store_{tier.name}_room_bytes": float(tier.sizing.target_bytes),
                }
            return values

    def close(self) -> None:
        """Moves what lies in memory to the files, if there are any, and lets another store have the folder."""
        with self._guard:
            if self._lock_file is None:
                return
            *memory, files = self._tiers
            wanted = sum(tier.used_bytes for tier in self._tiers)
            files.sizing.target_bytes = max(files.sizing.target_bytes, min(files.sizing.limits.limit_bytes, wanted))
            for tier in reversed(memory):  # the least recently used first, so that they are the first to leave
                while tier.entries:
                    key = tier.entries.oldest()
                    self._settle(key, tier.entries.take(key), [files])
                    self._shed(files, [])
            self._lock_file.close()
            self._lock_file = None

    def _count_lookup(self, place: int | None, key: str, version: str) -> None:
        """Tells each tier how large it has to be to have the entry."""
        distance = None
        if place is not None:
            distance = self._tiers[place].entries.bytes_since(key)
        elif key in self._ghosts and self._ghosts[key] == version:
            distance = self._ghosts.bytes_since(key)
        self._forget(key)
        for number in reversed(range(len(self._tiers))):
            tier, slower = self._tiers[number], place is not None and number > place
            if distance is not None and not slower and number != place:
                distance += tier.used_bytes
            tier.sizing.saw(None if slower else distance)

    def _miss(self) -> None:
        self._counts["misses"] += 1

    def _settle(self, key: str, entry: _Entry, tiers: list[_Tier]) -> None:
        """Lays an entry that lies nowhere into the first of these tiers that has room for it."""
        tier = next((tier for tier in tiers if tier.has_room_for(entry.value_bytes)), None)
        if tier is None:
            self._throw_away(key, entry)
        else:
            self._lay(tier, key, entry)

    def _lay(self, tier: _Tier, key: str, entry: _Entry) -> None:
        if tier.name == "device":
            entry.value = _on_devices(entry.value, entry.places)
        else:
            entry.value = jax.tree.map(lambda leaf: _host_copy(leaf) if isinstance(leaf, jax.Array) else leaf, entry.value)
        if tier.name == "files":
            try:
                write_entry(self._path(key), key, entry.version, entry.value)
            except OSError:  # a full disk, or a broken one: a cache may forget, training goes on
                self._counts["unwritten"] += 1
                tier.sizing.target_bytes = max(0, tier.used_bytes - entry.value_bytes)  # so the next one finds the room of an older one
                return
            entry.value = None
        tier.entries.add(key, entry, entry.value_bytes)

    def _overflow(self) -> None:
        for place, tier in enumerate(self._tiers):
            self._shed(tier, self._tiers[place + 1 :])

    def _shed(self, tier: _Tier, lower: list[_Tier]) -> None:
        """Moves down what a tier no longer has room for, the least recently used first."""
        tier.sizing.press(tier.used_bytes, tier.free_bytes())
        while tier.used_bytes > tier.sizing.target_bytes and tier.entries:
            key = tier.entries.oldest()
            self._settle(key, self._discard(tier, key), lower)

    def _throw_away(self, key: str, entry: _Entry) -> None:
        self._counts["thrown_away"] += 1
        if any(entry.value_bytes <= tier.sizing.limits.limit_bytes for tier in self._tiers):  # else no size would have kept it
            self._ghosts.add(key, entry.version, entry.value_bytes)
        if len(self._ghosts) > MAX_GHOSTS:
            self._ghosts.take(self._ghosts.oldest())

    def _forget(self, key: str) -> None:
        if key in self._ghosts:
            self._ghosts.take(key)

    def _discard(self, tier: _Tier, key: str) -> _Entry:
        entry = tier.entries.take(key)
        if tier.name == "files":
            with contextlib.suppress(OSError):  # what stays there is no entry of this store any more
                self._path(key).unlink(missing_ok=True)
        return entry

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{key}{SUFFIX}"

    def _open_folder(self) -> None:
        """Takes the folder, removes what a killed store left unfinished, and takes over its entries, the latest first in line to stay."""
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = (self._folder / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when the process ends, however it ends
        except BlockingIOError as error:
            self._lock_file.close()
            raise StoreBusyError(f"another store uses {self._folder}; give this one a folder of its own.") from error
        for path in self._folder.glob(f"*{SUFFIX}{UNFINISHED}"):
            path.unlink()
        files = self._tiers[-1]
        for path in sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns):
            key = path.name.removesuffix(SUFFIX)
            try:
                header = read_header(path)
                if header["key"] != key:
                    raise CorruptEntryError(f"{path} holds {header['key']}.")
            except CorruptEntryError:
                self._counts["corrupt"] += 1
                path.unlink()
                continue
            size = path.stat().st_size - header["starts_at"]
            files.sizing.target_bytes = min(files.sizing.limits.limit_bytes, max(files.sizing.target_bytes, files.used_bytes + size))
            files.entries.add(key, _Entry(header["version"], size, None, []), size)
        self._overflow()

    def _free_on_disk(self) -> int | None:
        assert self._folder is not None
        try:
            return shutil.disk_usage(self._folder).free
        except OSError:  # gone: writing will tell
            return None


def _host_copy(leaf) -> np.ndarray:
    """A read-only numpy array of its own."""
    copy = np.array(leaf)
    copy.flags.writeable = False
    return copy


def _device_copy(leaf) -> jax.Array | np.ndarray:
    return _host_copy(leaf) if _narrowed(leaf) else jnp.copy(leaf)


def _on_devices(value: Any, places: list) -> Any:
    leaves, tree = jax.tree.flatten(value)
    pairs = zip(leaves, places or [None] * len(leaves), strict=True)
    return tree.unflatten(leaf if _narrowed(leaf) else jax.device_put(leaf, place) for leaf, place in pairs)


def _narrowed(leaf) -> bool:
    """Whether JAX would keep other values."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype


def _free_on_host() -> int | None:
    """What Linux says could be had without swapping; elsewhere nothing is known."""
    table = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", table.read_text()) if table.exists() else None
    return int(found[1]) * 1024 if found else None


def _free_on_device() -> int | None:
    """On the fullest device; a CPU does not say."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return min((each["bytes_limit"] - each["bytes_in_use"] for each in stats if each), default=None)
