"""The filter saved at a clean stop: there at once at the next start, and never believed but for the state of the index it belongs to."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from store_tools import OWNER, Store

from kvstore import filter as saved_filter
from kvstore.server.fsck import fsck

GOLDEN = Path(__file__).with_name("golden") / "filter-v1.json"
COUNT = 3000
Keys = np.ndarray


def keys_from(seed: int, count: int) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def add(store: Store, keys: Keys) -> None:
    assert store.bulk_index(OWNER, keys, np.arange(len(keys), dtype=np.uint64), block_count=1) == len(keys)


def found(store: Store, keys: Keys) -> int:
    writings, busy = struct.unpack_from("<II", store.discover(OWNER, keys))
    assert not busy
    return int(writings)


def stored(directory: Path, seed: int = 1) -> Keys:
    """A store of COUNT keys, stopped cleanly."""
    store = Store(str(directory))
    keys = keys_from(seed, COUNT)
    add(store, keys)
    store.close()
    assert (directory / "filter").exists()
    return keys


def load(directory: Path) -> saved_filter.Filter:
    read = saved_filter.load(directory / "filter")
    assert read is not None
    return read


def assert_ignored(directory: Path, keys: Keys, why: str) -> None:
    """Nothing is hidden, not at first and not later; and the next stop saves a sound one again."""
    store = Store(str(directory))
    assert store.stats()["filter_start"] == why
    assert found(store, keys) == len(keys)
    assert not (directory / "filter").exists()
    assert store.wait_started(30) and store.check_integrity() == []
    assert found(store, keys) == len(keys) and store.stats()["filter_keys"] == len(keys)
    store.close()
    store = Store(str(directory))
    assert store.stats()["filter_start"] == "loaded" and found(store, keys) == len(keys)
    store.close()


def test_absent_keys_need_no_index_from_the_first_lookup_after_a_clean_stop(tmp_path: Path) -> None:
    keys = stored(tmp_path)
    store = Store(str(tmp_path))
    stats = store.stats()
    assert (stats["filter_start"], stats["filter_keys"]) == ("loaded", COUNT)
    assert found(store, keys) == COUNT and found(store, keys_from(2, COUNT)) == 0
    assert store.stats()["discover_filtered_total"] > 0.98 * COUNT
    store.close()


def test_the_file_is_gone_while_the_store_is_open_and_no_state_names_it(tmp_path: Path) -> None:
    stored(tmp_path)
    assert "\nfilter " in (tmp_path / "state").read_text()
    store = Store(str(tmp_path))
    assert not (tmp_path / "filter").exists() and "filter" not in (tmp_path / "state").read_text()
    store.close(clean=False)
    assert not (tmp_path / "filter").exists()


def test_restarts_hide_nothing_and_bring_nothing_back(tmp_path: Path) -> None:
    rng, alive, gone = random.Random(3), dict[bytes, int](), set[bytes]()
    for round_ in range(12):
        store = Store(str(tmp_path))
        assert store.stats()["filter_start"] == ("loaded" if round_ else "")
        if alive:
            assert found(store, np.frombuffer(b"".join(alive), np.uint8).reshape(-1, 32)) == len(alive)
        if gone:
            assert found(store, np.frombuffer(b"".join(gone), np.uint8).reshape(-1, 32)) == 0
        fresh = keys_from(100 + round_, rng.randrange(1, 2000))
        if round_ % 4 != 3:  # also a start after which nothing changes
            add(store, fresh)
            alive.update((bytes(key), n) for n, key in enumerate(fresh))
            assert store.wait_started(30)
            rows = [row for _, row, _ in store.peek(2, OWNER, rng.randrange(1, len(alive)))]
            store.evict(rows, 2)
            for row in rows:
                gone.add(row[25:57])
                del alive[row[25:57]]
        store.close()
        assert fsck(tmp_path).ok


def flipped(at: int) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        place = at % len(raw)
        return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: b"", "cut short"),
        (lambda raw: raw[:63], "cut short"),
        (lambda raw: raw[:-1], "cut short, or longer than it says"),
        (lambda raw: raw[: len(raw) // 2], "cut short, or longer than it says"),
        (lambda raw: raw + b"\0", "cut short, or longer than it says"),
        (lambda raw: raw[:64] + bytes(len(raw) - 64), "damaged"),
        (lambda raw: bytes(len(raw)), "not a filter"),
        (flipped(0), "not a filter"),
        (flipped(8), "of another version"),
        (flipped(16), "of another state of the index"),
        (flipped(24), "of another state of the index"),
        (flipped(32), "cut short, or longer than it says"),
        (flipped(40), "damaged"),
        (flipped(48), "damaged"),
        (flipped(56), "damaged"),
        (flipped(5000), "damaged"),
        (flipped(-1), "damaged"),
    ],
)
def test_a_damaged_file_is_ignored(tmp_path: Path, change: Callable[[bytes], bytes], why: str) -> None:
    keys = stored(tmp_path)
    path = tmp_path / "filter"
    path.write_bytes(change(path.read_bytes()))
    assert_ignored(tmp_path, keys, why)


def test_every_single_flipped_bit_of_the_head_is_noticed(tmp_path: Path) -> None:
    stored(tmp_path)
    raw = (tmp_path / "filter").read_bytes()
    assert saved_filter.parse(raw) is not None
    for bit in range(64 * 8):
        hurt = bytearray(raw)
        hurt[bit // 8] ^= 1 << bit % 8
        read = saved_filter.parse(bytes(hurt))
        assert read is None, f"bit {bit}"


def test_a_missing_file_is_built_again(tmp_path: Path) -> None:
    keys = stored(tmp_path)
    (tmp_path / "filter").unlink()
    assert_ignored(tmp_path, keys, "missing")


def test_the_filter_of_another_store_is_ignored(tmp_path: Path) -> None:
    keys = stored(tmp_path / "one")
    stored(tmp_path / "two", seed=2)
    shutil.copyfile(tmp_path / "two" / "filter", tmp_path / "one" / "filter")
    assert_ignored(tmp_path / "one", keys, "of another state of the index")


def test_the_filter_of_an_earlier_stop_is_ignored(tmp_path: Path) -> None:
    keys = stored(tmp_path)
    shutil.copyfile(tmp_path / "filter", tmp_path / "old")
    store = Store(str(tmp_path))
    more = keys_from(7, 50)
    add(store, more)
    store.close()
    shutil.move(tmp_path / "old", tmp_path / "filter")
    assert_ignored(tmp_path, np.concatenate([keys, more]), "of another state of the index")


def test_the_index_of_another_moment_or_store_takes_no_filter(tmp_path: Path) -> None:
    """As many commits and as many keys, and still not the same."""
    keys = stored(tmp_path / "one")
    others = stored(tmp_path / "two", seed=2)
    assert load(tmp_path / "one").last_txn == load(tmp_path / "two").last_txn
    shutil.rmtree(tmp_path / "one" / "index")
    shutil.copytree(tmp_path / "two" / "index", tmp_path / "one" / "index")
    store = Store(str(tmp_path / "one"))
    assert store.stats()["filter_start"] == "of another state of the index"
    assert found(store, others) == COUNT and found(store, keys) == 0
    store.close()


def test_a_file_that_was_put_back_after_a_kill_or_a_rebuild_is_not_used(tmp_path: Path) -> None:
    keys = stored(tmp_path)
    shutil.copyfile(tmp_path / "filter", tmp_path / "old")
    store = Store(str(tmp_path))
    more = keys_from(8, 50)
    add(store, more)
    store.close(clean=False)
    shutil.copyfile(tmp_path / "old", tmp_path / "filter")
    store = Store(str(tmp_path))
    assert (store.stats()["start_mode"], store.stats()["filter_start"]) == ("killed", "")
    assert not (tmp_path / "filter").exists()
    assert found(store, np.concatenate([keys, more])) == COUNT + 50
    store.close()
    shutil.rmtree(tmp_path / "index")
    shutil.copyfile(tmp_path / "old", tmp_path / "filter")
    store = Store(str(tmp_path))
    assert store.wait_started(30)
    assert (store.stats()["start_mode"], store.stats()["filter_start"]) == ("rebuild", "")
    add(store, keys)
    assert found(store, keys) == COUNT
    store.close()


def test_what_is_committed_after_the_filter_was_saved_makes_it_one_of_another_state(tmp_path: Path) -> None:
    keys = stored(tmp_path)
    import lmdb

    with lmdb.open(str(tmp_path / "index"), max_dbs=8) as env, env.begin(write=True) as txn:
        txn.put(b"later", b"1")
    assert_ignored(tmp_path, keys, "of another state of the index")


def test_a_filter_with_homeless_fingerprints_is_read_with_them(tmp_path: Path) -> None:
    keys = stored(tmp_path)
    saved = load(tmp_path)
    bucket = next(b for b in range(saved.buckets) if any(saved.slots(b)))
    prints = [print_ for print_ in saved.slots(bucket) if print_]
    at = bucket * saved_filter.BUCKET_BYTES
    table = saved.table[:at] + bytes(saved_filter.BUCKET_BYTES) + saved.table[at + saved_filter.BUCKET_BYTES :]
    moved = replace(saved, table=table, stash=tuple((bucket, print_) for print_ in prints))
    (tmp_path / "filter").write_bytes(saved_filter.build(moved))
    store = Store(str(tmp_path))
    assert store.stats()["filter_start"] == "loaded" and found(store, keys) == COUNT
    store.close()


def test_counts_that_do_not_fit_the_table_are_not_believed(tmp_path: Path) -> None:
    keys = stored(tmp_path)
    (tmp_path / "filter").write_bytes(saved_filter.build(replace(load(tmp_path), keys=COUNT + 1)))
    assert_ignored(tmp_path, keys, "at odds with its own counts")


def test_an_overfull_filter_is_not_saved_or_not_wrong(tmp_path: Path) -> None:
    for count in (64_000, 66_000, 80_000):
        directory = tmp_path / str(count)
        store = Store(str(directory))
        keys = keys_from(count, count)
        add(store, keys)
        store.close()
        store = Store(str(directory))
        assert store.stats()["filter_start"] in ("loaded", "")
        assert sum(found(store, keys[at : at + 4000]) for at in range(0, count, 4000)) == count
        store.close()


def test_fsck_knows_the_file(tmp_path: Path) -> None:
    keys = stored(tmp_path)
    assert fsck(tmp_path).ok
    raw = (tmp_path / "filter").read_bytes()
    for hurt, text in (
        (raw[:-1], "missing or damaged"),
        (saved_filter.build(replace(load(tmp_path), last_txn=1)), "another state"),
        (saved_filter.build(replace(load(tmp_path), table=bytes(len(load(tmp_path).table)), keys=0)), f"denies {COUNT} entries"),
    ):
        shutil.rmtree(tmp_path / "hurt", ignore_errors=True)
        shutil.copytree(tmp_path, tmp_path / "hurt", ignore=shutil.ignore_patterns("hurt"))
        (tmp_path / "hurt" / "filter").write_bytes(hurt)
        report = fsck(tmp_path / "hurt", repair=True)
        assert [finding.kind for finding in report.findings] == ["filter"] and text in report.findings[0].text
        assert report.repaired == ["the filter was built again"]
        assert fsck(tmp_path / "hurt").ok
        store = Store(str(tmp_path / "hurt"))
        assert store.stats()["filter_start"] == "loaded" and found(store, keys) == COUNT
        store.close()


def golden_keys() -> Keys:
    """No randomness from a library: the bytes must be the same in ten years."""
    return np.array([[(number * 97 + at * 31 + number * at) % 256 for at in range(32)] for number in range(40)], np.uint8)


def golden() -> tuple[bytes, dict[str, Any]]:
    """The file from its vector: the head, and the buckets that are not empty."""
    vector = json.loads(GOLDEN.read_text())
    table = bytearray(vector["buckets"] * saved_filter.BUCKET_BYTES)
    for bucket, raw in vector["filled"].items():
        at = int(bucket) * saved_filter.BUCKET_BYTES
        table[at : at + saved_filter.BUCKET_BYTES] = bytes.fromhex(raw)
    return bytes.fromhex(vector["head"]) + bytes(table) + bytes.fromhex(vector["stash"]), vector


def test_the_golden_filter_is_what_both_write_and_read(tmp_path: Path) -> None:
    raw, vector = golden()
    assert f"{xxhash.xxh3_64_intdigest(raw):016x}" == vector["xxh3"]
    held = saved_filter.parse(raw)
    assert held is not None and saved_filter.build(held) == raw and held.keys == 40
    keys = golden_keys()
    assert all(held.maybe(OWNER + bytes(key)) for key in keys)
    assert not any(held.maybe(OWNER + bytes(key)) for key in keys_from(9, 200))
    store = Store(str(tmp_path))
    add(store, keys)
    store.close()
    written = load(tmp_path)
    assert replace(written, stop=held.stop, last_txn=held.last_txn) == held
    (tmp_path / "filter").write_bytes(saved_filter.build(replace(held, stop=written.stop, last_txn=written.last_txn)))
    store = Store(str(tmp_path))
    assert store.stats()["filter_start"] == "loaded" and found(store, keys) == len(keys)
    store.close()
