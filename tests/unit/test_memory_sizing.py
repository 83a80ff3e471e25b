"""How large the tiers of a store become, and by what: the order of use, what is found where, and the memory that others need."""

import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.memory.sizing import TierLimits
from moejax.memory.store import Store
from moejax.memory.use_order import UseOrder

UNKNOWN = {"host": lambda: None}
"""Free memory that nobody knows, so that other processes on this machine have no say."""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["use", "take"]), st.integers(0, 40), st.integers(0, 9)), max_size=300))
def test_bytes_used_since_a_key_are_those_of_a_plain_list(calls):
    order, plain = UseOrder(), {}
    for call, number, num_bytes in calls:
        key = str(number)
        if key not in plain:
            order.add(key, number, num_bytes)
            plain[key] = num_bytes
        elif call == "take":
            assert order.take(key) == number
            del plain[key]
        else:
            order.use(key)
            plain[key] = plain.pop(key)
        assert len(order) == len(plain) and order.total_bytes == sum(plain.values())
        keys = list(plain)
        assert not keys or order.oldest() == keys[0]
        assert [order.bytes_since(key) for key in keys] == [sum(plain[later] for later in keys[at:]) for at, key in enumerate(keys)]


def run_stream(store, keys, size=8) -> float:
    """Hit rate of a stream of keys in its second half, where a miss is followed by its result."""
    hits = []
    for key in map(str, keys):
        hits.append(store.get(key, "") is not None)
        if not hits[-1]:
            store.put(key, "", np.zeros(size // 8))
    return float(np.mean(hits[len(hits) // 2 :]))


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
def test_growth_stops_around_85_percent_of_hits_in_streams_of_zipfs_law(exponent):
    num_keys = 4000
    weights = 1.0 / np.arange(1, num_keys + 1) ** exponent
    keys = np.random.default_rng(0).choice(num_keys, size=30_000, p=weights / weights.sum())
    store = Store(host=TierLimits(limit_bytes=8 * num_keys, start_bytes=8 * 64), free_bytes=UNKNOWN)
    rate = run_stream(store, keys)
    room = store.metrics()["store_host_room_bytes"] / 8
    assert 0.78 < rate < 0.92
    assert 64 < room < 0.75 * num_keys


def test_keys_that_never_return_bring_no_growth_and_a_loop_over_all_brings_enough():
    store = Store(host=TierLimits(limit_bytes=8000, start_bytes=800), free_bytes=UNKNOWN, window=256)
    assert run_stream(store, range(5000)) == 0
    assert store.metrics()["store_host_room_bytes"] == 800
    assert run_stream(store, np.tile(np.arange(700), 8)) > 0.9  # plain LRU of less than 700 slots would never hit
    assert 5600 <= store.metrics()["store_host_room_bytes"] <= 8000


def test_what_was_thrown_away_of_another_version_brings_no_growth():
    store = Store(host=TierLimits(limit_bytes=8 * 4000, start_bytes=8 * 64), free_bytes=UNKNOWN)
    for version in map(str, range(20)):
        for key in map(str, range(500)):
            assert store.get(key, version) is None
            store.put(key, version, np.zeros(1))
    assert store.metrics()["store_host_room_bytes"] == 8 * 64


@pytest.mark.parametrize("later", [20, 200])
def test_it_lets_go_of_what_brings_no_hits_any_more(later):
    store = Store(host=TierLimits(limit_bytes=8 * 1000, start_bytes=8 * 16), free_bytes=UNKNOWN, window=512)
    assert run_stream(store, np.tile(np.arange(600), 6)) > 0.9
    assert store.metrics()["store_host_bytes"] == 8 * 600
    assert run_stream(store, np.tile(np.arange(later), 4000 // later)) > 0.99
    told = store.metrics()
    assert 8 * later <= told["store_host_room_bytes"] < 8 * later * 2
    assert told["store_host_bytes"] <= told["store_host_room_bytes"]
    assert run_stream(store, np.random.default_rng(0).permutation(np.tile(np.arange(later), 4000 // later))) > 0.99  # and stays


def test_it_shrinks_under_pressure_and_moves_down_what_it_held():
    free = {"host": 10_000}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(
            host=TierLimits(limit_bytes=8000, start_bytes=8000, reserve_bytes=1800),
            files=TierLimits(limit_bytes=16_000, start_bytes=16_000),
            folder=folder,
            free_bytes={"host": lambda: free["host"], "files": lambda: None},
        )
        for number in range(10):
            store.put(str(number), "", np.full(100, number))
        assert store.metrics()["store_host_bytes"] == 8000 and store.metrics()["store_files_bytes"] == 0
        free["host"] = 200  # someone else took memory: with the new entry 1600 bytes are missing to the reserve
        store.put("10", "", np.full(100, 10))
        told = store.metrics()
        assert told["store_host_bytes"] <= 8000 - 800 and told["store_host_room_bytes"] <= 8000 - 800
        assert told["store_host_bytes"] + told["store_files_bytes"] == 11 * 800
        free["host"] = 0
        for _ in range(12):
            store.put("10", "", np.full(100, 10))
        assert store.metrics()["store_host_bytes"] == 0
        assert all(store.get(str(number), "")[0] == number for number in range(11))
        store.close()
