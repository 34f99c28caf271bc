"""The filter in RAM: never a wrong "no", seldom a needless "maybe", while it grows, shrinks and is built again."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from store_tools import OWNER, Store

Keys = np.ndarray


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(str(tmp_path), virtual_clock=True)
    assert opened.wait_started(10)
    yield opened
    opened.close()


def keys_from(seed: int, count: int) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def add(store: Store, keys: Keys) -> None:
    assert store.bulk_index(OWNER, keys, np.arange(len(keys), dtype=np.uint64), block_count=1) == len(keys)


def found(store: Store, keys: Keys) -> int:
    """Writings found of `keys`; each has one."""
    total = 0
    for at in range(0, len(keys), 4000):
        writings, busy = struct.unpack_from("<II", store.discover(OWNER, keys[at : at + 4000]))
        assert not busy
        total += writings
    return total


def maybe_share(store: Store, keys: Keys) -> float:
    """Share of `keys` for which the index had to be asked."""
    before = store.stats()
    found(store, keys)
    after = store.stats()
    return 1 - (after["discover_filtered_total"] - before["discover_filtered_total"]) / len(keys)


def wait_for(store: Store, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        store.wait_pressure(0.02)


def test_there_is_no_wrong_no_while_it_grows_and_few_needless_lookups_after(store: Store) -> None:
    first_bytes = store.stats()["filter_bytes"]
    stored = keys_from(1, 0)
    for part in range(6):
        more = keys_from(10 + part, 25_000)
        add(store, more)
        stored = np.concatenate([stored, more])
        assert found(store, stored) == len(stored)
    wait_for(store, lambda: store.stats()["filter_bytes"] > first_bytes and maybe_share(store, keys_from(99, 20_000)) < 0.005)
    assert found(store, stored) == len(stored)
    assert store.stats()["filter_keys"] == len(stored)
    assert store.stats()["filter_bytes"] * 8 / len(stored) < 30


def test_what_is_deleted_is_forgotten_and_nothing_else(store: Store) -> None:
    stored = keys_from(2, 40_000)
    add(store, stored)
    rows = [row for _, row, _ in store.peek(2, OWNER, 20_000)]
    assert len(store.evict(rows, 2)) == 20_000
    gone = np.frombuffer(b"".join(row[25:57] for row in rows), np.uint8).reshape(-1, 32).copy()
    assert found(store, gone) == 0 and found(store, stored) == 20_000
    assert maybe_share(store, gone) < 0.01
    assert store.stats()["filter_keys"] == 20_000
    assert store.check_integrity() == []


def test_several_writings_of_a_key_count_once(store: Store) -> None:
    key = keys_from(3, 1)
    for number in range(8):
        store.bulk_index(OWNER, key, np.array([number], np.uint64), shard=number)
    assert store.stats()["filter_keys"] == 1 and found(store, key) == 8
    rows = [row for _, row, _ in store.peek(2, OWNER, 10)]
    store.evict(rows[:7], 2)
    assert store.stats()["filter_keys"] == 1 and found(store, key) == 1
    store.evict(rows[7:], 2)
    assert store.stats()["filter_keys"] == 0 and maybe_share(store, key) == 0


def test_it_is_built_again_at_the_next_start(tmp_path: Path) -> None:
    stored = keys_from(4, 30_000)
    store = Store(str(tmp_path))
    add(store, stored)
    store.close()
    store = Store(str(tmp_path))
    assert found(store, stored) == len(stored)  # also before the scan is over
    assert store.wait_started(30)
    assert store.stats()["filter_keys"] == len(stored) and maybe_share(store, keys_from(98, 20_000)) < 0.005
    store.close()
