"""Records come back as they were written, in order, however reading and writing overlap; what goes wrong in a thread is raised."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.memory import shelf as shelves
from moejax.memory.shelf import Shelf, ShelfBusyError, ShelfError, assemble
from moejax.parallel.mesh import mesh_from


@pytest.fixture
def shelf(tmp_path):
    shelf = Shelf(tmp_path, ahead=2)
    yield shelf
    shelf.close()


def test_sharded_replicated_and_empty_arrays_of_many_dtypes_come_back(shelf):
    mesh = mesh_from(fsdp=2, expert=2)
    specs = {"whole": P(), "rows": P(("fsdp", "expert")), "one": P(None, "expert")}
    arrays = {
        f"{name} {dtype}": jax.device_put(jnp.arange(32).reshape(4, 8).astype(dtype), NamedSharding(mesh, spec))
        for name, spec in specs.items()
        for dtype in ("float32", "bfloat16", "int8", "bool")
    }
    arrays["none"] = jnp.zeros((0, 4))
    shelf.write("a/b", arrays)
    (record,) = shelf.read(["a/b"])
    assert shelf.bytes() == sum(array.nbytes for array in arrays.values())  # a part that two devices hold is written once
    for name, array in arrays.items():
        got = assemble(record[name], array.shape, array.sharding)
        assert got.dtype == array.dtype and got.sharding == array.sharding and (np.asarray(got) == np.asarray(array)).all()


def test_records_come_in_order_and_no_more_than_asked_for_are_read_ahead(shelf, monkeypatch):
    begun, read = [], Shelf._read
    monkeypatch.setattr(Shelf, "_read", lambda self, name, unfinished: (begun.append(name), read(self, name, unfinished))[1])
    names = [f"record{number}" for number in range(10)]
    for number, name in enumerate(names):
        shelf.write(name, {"x": jnp.full(5, number)})
    records = shelf.read(names)
    for number in range(10):
        (part,) = next(records)["x"].values()
        assert part.tolist() == [number] * 5
        assert len(begun) <= number + 1 + shelf.ahead
    assert next(records, None) is None and begun == names


def test_a_record_is_not_read_before_it_is_written_and_writing_waits_for_the_slow_disk(shelf, monkeypatch):
    gate, pour = threading.Event(), shelves._pour
    monkeypatch.setattr(shelves, "_pour", lambda file, part: (gate.wait(20), pour(file, part)))
    for number in range(3):
        shelf.write(f"record{number}", {"x": jnp.full(3, number)})
    blocked = threading.Thread(target=shelf.write, args=("record3", {"x": jnp.zeros(3)}))  # one more than may be behind
    blocked.start()
    records = shelf.read(["record2"])
    blocked.join(0.1)
    assert blocked.is_alive()
    gate.set()
    blocked.join(20)
    (part,) = next(records)["x"].values()
    assert part.tolist() == [2, 2, 2]
    seconds = shelf.seconds()
    assert seconds["write_wait_s"] > 0 and seconds["read_wait_s"] > 0 and shelf.seconds()["write_wait_s"] == 0


def test_what_fails_in_a_thread_is_raised(shelf, monkeypatch):
    shelf.write("record", {"x": jnp.zeros(1000)})
    shelf.drain()
    os.truncate(shelf.folder / "record.record", 10)
    with pytest.raises(ShelfError, match=r"tiers\.folder: .* cannot be read .*ends 3990 bytes early"):
        list(shelf.read(["record"]))

    def full(file, part):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shelves, "_pour", full)
    shelf.write("record", {"x": jnp.zeros(1)})
    with pytest.raises(ShelfError, match=r"tiers\.folder: .* cannot be written .*No space left.*tiers\.optimizer='host'"):
        shelf.drain()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", "/proc/nowhere"):
        with pytest.raises(ShelfError, match=rf"tiers\.folder: {folder} cannot be made"):
            Shelf(folder, ahead=2)


def test_a_folder_belongs_to_one_and_what_a_dead_one_left_is_removed(shelf, tmp_path):
    with pytest.raises(ShelfBusyError, match=r"another tiers\.folder"):
        Shelf(tmp_path, ahead=2)
    shelf.close()
    (tmp_path / "old.record").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    later = Shelf(tmp_path, ahead=2)
    later.write("new", {"x": jnp.zeros(1)})
    later.drain()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "new.record", "notes.txt"]
    later.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "notes.txt"]
