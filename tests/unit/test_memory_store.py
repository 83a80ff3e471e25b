"""The store gives back what was put under a key and a version, or nothing, whatever happens to its memory and its files."""

import collections
import errno
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.memory.entry_file import UNFINISHED, write_entry
from moejax.memory.sizing import TierLimits
from moejax.memory.store import Store, StoreBusyError, content_key

UNKNOWN = {"device": lambda: None, "host": lambda: None, "files": lambda: None}
"""Free memory that nobody knows, so that other processes on this machine have no say."""


def fixed(num_bytes: int) -> TierLimits:
    """A tier that neither grows nor shrinks."""
    return TierLimits(limit_bytes=num_bytes, start_bytes=num_bytes)


def value(number: int) -> dict:
    """40 bytes of arrays that tell which they are."""
    return {"x": np.full(4, number, np.float64), "pair": (np.array([number], np.int32), None, [np.array(True), jnp.bfloat16(number)])}


SIZE = sum(leaf.nbytes for leaf in jax.tree.leaves(value(0)))


def same(got, number) -> bool:
    want = value(number)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    return all(
        np.array_equal(a, b) and a.dtype == b.dtype and a.shape == b.shape
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("gp"), st.integers(0, 9), st.integers(0, 2)), max_size=60),
    st.sampled_from([(0, 3, 0), (0, 0, 3), (0, 2, 3), (3, 0, 0), (2, 2, 0), (1, 2, 4), (2, 0, 3)]),
)
def test_it_does_what_a_plain_lru_list_does(calls, slots):
    device, host, files = slots
    plain, plain_counts = collections.OrderedDict(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        limits = {"device": fixed(device * SIZE), "host": fixed(host * SIZE), "files": fixed(files * SIZE)}
        store = Store(**limits, folder=folder if files else None, free_bytes=UNKNOWN)
        for call, number, version in calls:
            key = f"key{number}"
            if call == "p":
                store.put(key, str(version), value(10 * number + version))
                plain[key] = version
                plain.move_to_end(key)
                while len(plain) > device + host + files:
                    plain.popitem(last=False)
                    plain_counts["thrown_away"] += 1
                continue
            got = store.get(key, str(version))
            if plain.get(key) == version:
                plain.move_to_end(key)
                plain_counts["hits"] += 1
                assert same(got, 10 * number + version)
            else:
                assert got is None
                plain_counts["misses"] += 1
                plain_counts["stale"] += plain.pop(key, None) is not None
        told = store.metrics()
        assert {name: told[f"store_{name}"] for name in ("hits", "misses", "stale", "thrown_away", "corrupt")} == {
            name: plain_counts[name] for name in ("hits", "misses", "stale", "thrown_away", "corrupt")
        }
        assert sum(told.get(f"store_{tier}_bytes", 0) for tier in limits) == len(plain) * SIZE
        store.close()
        latest = sorted(list(plain)[-files:]) if files else []
        assert sorted(path.stem for path in pathlib.Path(folder).glob("*.entry")) == latest


def test_keys_tell_values_dtypes_shapes_places_and_strings_apart():
    tokens = np.arange(6, dtype=np.int32)
    others = [
        content_key([tokens + 1]),
        content_key([tokens.astype(np.int64)]),
        content_key([tokens.view(np.float32)]),
        content_key([tokens.reshape(2, 3)]),
        content_key([tokens[:3], tokens[3:]]),
        content_key({"tokens": tokens}),
        content_key([tokens], "layer 0"),
        content_key([tokens], "layer", " 0"),
        content_key([], "layer 0"),
    ]
    assert len({content_key([tokens]), *others}) == 1 + len(others)
    assert content_key([tokens]) == content_key([jnp.asarray(tokens)]) == content_key([np.repeat(tokens, 2)[::2]])


def test_what_the_caller_does_to_its_arrays_later_changes_nothing():
    store, mine = Store(host=fixed(1000), free_bytes=UNKNOWN), np.zeros(4)
    store.put("a", "1", mine)
    mine += 1
    got = store.get("a", "1")
    assert not got.any()
    with pytest.raises(ValueError, match="read-only"):
        got += 1


def test_a_device_tier_gives_arrays_back_where_they_were():
    store = Store(device=fixed(16), host=fixed(16), free_bytes=UNKNOWN)
    device = jax.devices()[-1]
    for key in "ab":
        store.put(key, "1", jax.device_put(jnp.arange(4), device))
    assert store.metrics()["store_host_bytes"] == 16
    for key in "abab":
        got = store.get(key, "1")
        assert isinstance(got, jax.Array) and got.devices() == {device} and got.tolist() == [0, 1, 2, 3]


def test_a_device_tier_keeps_every_bit_of_what_jax_would_narrow(tmp_path):
    wide = {"x": np.arange(4, dtype=np.float64) + 1e-12, "i": np.array([2**40]), "narrow": jnp.arange(3)}
    size = sum(leaf.nbytes for leaf in wide.values())
    store = Store(device=fixed(size), host=fixed(size), files=fixed(size), folder=tmp_path, free_bytes=UNKNOWN)
    for key in ("a", "b", "c", "a", "b", "c"):  # up and down through all tiers
        if store.get(key, "1") is None:
            store.put(key, "1", wide)
        got = store.get(key, "1")
        assert all(got[name].dtype == leaf.dtype and np.array_equal(got[name], leaf) for name, leaf in wide.items())
        assert isinstance(got["narrow"], jax.Array) and not got["x"].flags.writeable
    assert [store.metrics()[f"store_{tier}_bytes"] for tier in ("device", "host", "files")] == [size] * 3
    store.close()


def test_a_tier_that_is_too_small_for_an_entry_is_passed_by_and_keeps_what_it_has(tmp_path):
    store = Store(device=fixed(2 * SIZE), host=fixed(4 * SIZE), files=fixed(20 * SIZE), folder=tmp_path, free_bytes=UNKNOWN)
    for number in range(6):
        store.put(f"key{number}", "", value(number))
    before = store.metrics()
    large, larger = np.zeros(10 * SIZE, np.uint8), np.zeros(21 * SIZE, np.uint8)
    store.put("large", "", large)
    assert np.array_equal(store.get("large", ""), large)  # and found, it stays where it is
    store.put("larger", "", larger)
    assert store.get("larger", "") is None
    told = store.metrics()
    for tier in ("device", "host"):
        assert told[f"store_{tier}_bytes"] == before[f"store_{tier}_bytes"]
        assert told[f"store_{tier}_room_bytes"] == before[f"store_{tier}_room_bytes"]
    assert told["store_files_bytes"] == 10 * SIZE and told["store_thrown_away"] == 1
    assert all(same(store.get(f"key{number}", ""), number) for number in range(6))
    store.close()


def test_a_disk_that_takes_nothing_more_costs_entries_and_no_step(tmp_path, monkeypatch):
    store = Store(host=fixed(2 * SIZE), files=fixed(10 * SIZE), folder=tmp_path, free_bytes=UNKNOWN)
    for number in range(6):
        store.put(f"key{number}", "", value(number))
    assert store.metrics()["store_files_bytes"] == 4 * SIZE

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        store.put("key6", "", value(6))  # moves key4 down, which is lost, and makes room by key0
        told = store.metrics()
        assert (told["store_unwritten"], told["store_thrown_away"]) == (1, 1)
        assert told["store_files_bytes"] == told["store_files_room_bytes"] == 3 * SIZE
    assert [number for number in range(7) if store.get(f"key{number}", "") is not None] == [1, 2, 3, 5, 6]
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        store.close()
    assert not list(tmp_path.glob(f"*{UNFINISHED}"))


def test_a_file_that_cannot_be_read_is_dropped_and_counted(one_file, monkeypatch):
    store, _ = one_file

    def broken(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr("moejax.memory.store.read_entry", broken)
        assert store.get("key1", "v") is None
    assert store.metrics()["store_corrupt"] == 1 and same(store.get("key2", "v"), 2)


@pytest.fixture
def one_file(tmp_path):
    store = Store(files=fixed(10 * SIZE), folder=tmp_path, free_bytes=UNKNOWN)
    for number in range(3):
        store.put(f"key{number}", "v", value(number))
    yield store, tmp_path
    store.close()


def damage_by_cut(path):
    os.truncate(path, path.stat().st_size - 1)


def damage_in_header(path):
    os.truncate(path, 20)


def damage_by_flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def damage_by_swap(path):
    path.write_bytes(path.with_name("key2.entry").read_bytes())


def damage_by_another_version(path):
    write_entry(path, "key1", "older", value(1))


def damage_by_garbage(path):
    path.write_bytes(b"what is this" * 100)


DAMAGES = [damage_by_cut, damage_in_header, damage_by_flip, damage_by_swap, damage_by_another_version, damage_by_garbage, os.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_or_foreign_file_is_dropped_and_counted(one_file, damage):
    store, folder = one_file
    damage(folder / "key1.entry")
    assert store.get("key1", "v") is None
    told = store.metrics()
    assert (told["store_corrupt"], told["store_misses"], told["store_files_bytes"]) == (1, 1, 2 * SIZE)
    assert not (folder / "key1.entry").exists()
    assert same(store.get("key2", "v"), 2)
    store.put("key1", "v", value(1))
    assert same(store.get("key1", "v"), 1)


def test_every_flipped_byte_is_found(tmp_path):
    store = Store(files=fixed(10 * SIZE), folder=tmp_path, free_bytes=UNKNOWN)
    store.put("key1", "v", value(1))
    path = tmp_path / "key1.entry"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        assert store.get("key1", "v") is None, at
        store.put("key1", "v", value(1))
    assert store.metrics()["store_corrupt"] == len(whole)
    store.close()


def test_two_stores_do_not_share_a_folder_and_one_follows_the_other(one_file):
    store, folder = one_file
    with pytest.raises(StoreBusyError, match="another store uses"):
        Store(files=fixed(100), folder=folder)
    store.close()
    (folder / f"key9.entry{UNFINISHED}").write_bytes(b"half")
    (folder / "notes.txt").write_text("not ours")
    damage_in_header(folder / "key1.entry")
    later = Store(host=fixed(SIZE), files=fixed(10 * SIZE), folder=folder, free_bytes=UNKNOWN)
    assert later.metrics()["store_corrupt"] == 1
    assert same(later.get("key0", "v"), 0) and later.get("key1", "v") is None and later.get("key2", "other") is None
    assert later.metrics()["store_stale"] == 1
    later.close()
    assert sorted(path.name for path in folder.iterdir()) == ["key0.entry", "lock", "notes.txt"]


KILLED = """
import sys
import numpy as np
from moejax.memory.sizing import TierLimits
from moejax.memory.store import Store
limits = TierLimits(limit_bytes=1 << 26, start_bytes=1 << 26)
store = Store(files=limits, folder=sys.argv[1])
for number in range(100000):
    store.put(f"key{number % 50}", "v", np.full(100_000, number % 50, np.int64))
    if number == 60:
        sys.stdout.write("on"), sys.stdout.flush()
"""


def test_a_kill_in_the_middle_of_a_write_leaves_whole_entries(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.read(2) == b"on"
        writer.send_signal(signal.SIGKILL)
    limits = TierLimits(limit_bytes=1 << 26, start_bytes=1 << 26)
    store = Store(files=limits, folder=tmp_path, free_bytes=UNKNOWN)
    assert not list(tmp_path.glob(f"*{UNFINISHED}"))
    found = [store.get(f"key{number}", "v") for number in range(50)]
    assert all(np.array_equal(array, np.full(100_000, number)) for number, array in enumerate(found) if array is not None)
    assert sum(array is not None for array in found) >= 49  # all but the one in the making
    assert store.metrics()["store_corrupt"] == 0
    store.close()


def test_nothing_grows_without_bound():
    with tempfile.TemporaryDirectory() as folder:
        store = Store(host=fixed(800), files=fixed(800), folder=folder, free_bytes=UNKNOWN, window=10_000)
        for number in range(200):
            store.put(str(number), str(number), np.zeros(10))
            store.get(str(number - 25), "")
        assert store.metrics()["store_host_bytes"] <= 800 and store.metrics()["store_files_bytes"] <= 800
        assert len(list(pathlib.Path(folder).iterdir())) == 11  # ten entries and the lock
        assert len(store._ghosts) <= 1 << 15
        store.close()


def test_what_it_cannot_keep_is_refused_by_name():
    store = Store(host=fixed(100), free_bytes=UNKNOWN)
    with pytest.raises(TypeError, match="set is none of them"):
        store.put("a", "", {"x": {1, 2}})
    with pytest.raises(ValueError, match="must consist of letters"):
        store.put("../a", "", np.zeros(1))
    with pytest.raises(ValueError, match="at least one tier"):
        Store()
    with pytest.raises(ValueError, match="go together"):
        Store(files=fixed(100))
    store.put("large", "", np.zeros(100))
    assert store.get("large", "") is None and store.metrics()["store_host_bytes"] == 0
