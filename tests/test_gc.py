"""What goes first: one total order, the same on every node; retention, floors, caps; what is used or promised stays."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_tools import until
from store_tools import (
    NO_SPACE,
    NOT_FOUND,
    OK,
    OWNER,
    Store,
    discover,
    key_of,
    keys_of,
    promise,
    read,
    reasons,
    record_of,
    until_ahead_is_back,
    withdraw,
)

from kvstore.clustermap import RetentionClass
from kvstore.entry import REUSED
from kvstore.errors import ConfigError
from kvstore.gc import EvictionPolicy, Evictor
from kvstore.gc.policy import Usage
from kvstore.owners import OwnerLimits
from kvstore.record import Record, build, padded_bytes
from kvstore.wire import Gone

NONE, BATCH, CHAT, AGENT = 0, 1, 2, 3
POLICY = EvictionPolicy.of_classes()
PAGE = 4096
OTHER = bytes(15) + b"\7"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(str(tmp_path / "data"), virtual_clock=True)
    assert opened.wait_started(10)
    yield opened
    assert opened.check_integrity(deep=True) == []
    opened.close()


def small(number: int, **changes: object) -> Record:
    """One page on disk."""
    return record_of(number, blocks=1, plane_bytes=(320,), **changes)


def put_all(store: Store, records: list[Record]) -> None:
    assert [store.put(build(r)) for r in records] == [OK] * len(records)


def kept(store: Store, records: list[Record]) -> list[Record]:
    return [r for r in records if read(store, r)[0] == OK]


def advance(store: Store, bucket: int) -> None:
    """Moves the virtual clock: a touch of nothing carries the bucket."""
    promise(store, small(10**9), touch=True, bucket=bucket)
    assert store.bucket_now() == bucket


def rank(r: Record, bucket_now: int) -> tuple[bool, int, int, bytes]:
    keep_buckets = POLICY.retention_seconds[r.retention_class] / 60
    return r.bucket >= bucket_now - keep_buckets, r.bucket, -r.start_block, r.extent_key


def test_eviction_follows_one_order_over_all_classes_and_owners(store: Store) -> None:
    rng = random.Random(3)
    records = [
        small(
            n,
            bucket=rng.randrange(1000, 1200),
            start_block=rng.randrange(50),
            retention_class=rng.choice([NONE, BATCH, CHAT, AGENT]),
            owner=rng.choice([OWNER, OTHER]),
        )
        for n in range(400)
    ]
    put_all(store, records)
    advance(store, 1200)
    expected = sorted(records, key=lambda r: rank(r, 1200))
    evictor = Evictor(store, POLICY)
    queues = store.queues()
    ordered = [row for _, row, _ in evictor._in_order(queues, 1200)]
    assert [row[25:57] for row in ordered] == [r.extent_key for r in expected]
    store.evict(ordered[:150], Gone.EVICTED)
    assert {r.extent_key for r in kept(store, records)} == {r.extent_key for r in expected[150:]}


def test_twelve_nodes_that_saw_the_same_extents_in_any_order_keep_the_same_ones(tmp_path: Path) -> None:
    rng = random.Random(5)
    shapes = [(rng.randrange(100, 130), rng.randrange(40), rng.choice([BATCH, CHAT, AGENT])) for _ in range(150)]
    left = set()
    for node in range(12):
        store = Store(str(tmp_path / str(node)), virtual_clock=True)
        evictor = Evictor(store, POLICY)
        order = list(range(150))
        rng.shuffle(order)
        mine = [small(n, bucket=b, start_block=s, retention_class=c, shard=node) for n, (b, s, c) in enumerate(shapes)]
        put_all(store, [mine[n] for n in order])
        queues = store.queues()
        rows = [row for _, row, _ in evictor._in_order(queues, store.bucket_now())]
        store.evict(rows[:70], Gone.EVICTED)
        left.add(frozenset(r.extent_key for r in kept(store, mine)))
        store.close()
    assert len(left) == 1 and len(next(iter(left))) == 80


def test_a_full_store_drops_the_oldest_and_takes_new_writes(tmp_path: Path) -> None:
    store = Store(str(tmp_path), virtual_clock=True, capacity_bytes=200 * PAGE)
    told: list[tuple[str, str, int, float]] = []
    evictor = Evictor(store, POLICY, lambda c, why, sizes, ages: told.extend((c, why, s, a) for s, a in zip(sizes, ages, strict=True)))
    records = [small(n, bucket=100 + n) for n in range(600)]
    for r in records:
        if store.put(build(r)) == NO_SPACE:
            assert evictor.step(store.wait_pressure(0.0)) > 0
            assert store.put(build(r)) == OK
    here = kept(store, records)
    assert here == records[-len(here) :] and 150 < len(here) <= 200
    assert len(told) == 600 - len(here) and {t[:3] for t in told} == {("chat", "lru", PAGE)}
    assert all(0 < age <= 60 * 201 for *_, age in told)
    assert store.stats()["evicted_total"] == len(told)
    store.close()


def test_the_evictor_wakes_by_itself_when_a_write_finds_no_room(tmp_path: Path) -> None:
    store = Store(str(tmp_path), virtual_clock=True, capacity_bytes=64 * PAGE)
    freed = threading.Event()
    evictor = Evictor(store, POLICY, lambda *_: freed.set())
    evictor.start()
    for n in range(300):
        r = small(n, bucket=10 + n)
        for _ in range(1000):
            freed.clear()
            if store.put(build(r)) == OK:
                break
            freed.wait(1)
        else:
            pytest.fail("no room was made")
    evictor.stop()
    assert store.check_integrity(deep=True) == []
    assert store.stats()["used_bytes"] <= 64 * PAGE
    store.close()


def test_what_has_expired_goes_though_there_is_room_and_class_none_stays_until_room_is_needed(store: Store) -> None:
    records = {c: small(n, bucket=1000, retention_class=c) for n, c in enumerate([NONE, BATCH, CHAT, AGENT])}
    put_all(store, list(records.values()))
    evictor = Evictor(store, POLICY)
    for after_seconds, gone in ((3600, []), (3660, [BATCH]), (3 * 86400, []), (3 * 86400 + 60, [AGENT]), (7 * 86400 + 60, [CHAT])):
        before = kept(store, list(records.values()))
        advance(store, 1000 + after_seconds // 60)
        evictor.step()
        left = kept(store, list(records.values()))
        assert [r.retention_class for r in before if r not in left] == gone
    assert left == [records[NONE]]
    expired = keys_of(*(records[c] for c in (BATCH, CHAT, AGENT, NONE)))
    assert reasons(store, OWNER, expired) == [Gone.EXPIRED] * 3 + [Gone.UNKNOWN]


def test_owners_over_their_cap_lose_their_own_oldest_and_no_others(store: Store) -> None:
    mine = [small(n, bucket=100 + n, owner=OWNER) for n in range(40)]
    others = [small(n, bucket=1, owner=OTHER) for n in range(40)]
    put_all(store, mine + others)
    told: list[str] = []
    policy = EvictionPolicy.of_classes(owners={OWNER: OwnerLimits(cap_bytes=15 * PAGE)})
    Evictor(store, policy, lambda c, why, sizes, ages: told.append(why)).step()
    assert kept(store, mine) == mine[25:] and kept(store, others) == others
    assert set(told) == {"quota"}


def test_an_owner_at_its_floor_loses_nothing_to_others(tmp_path: Path) -> None:
    store = Store(str(tmp_path), virtual_clock=True, capacity_bytes=100 * PAGE)
    old = [small(n, bucket=1, owner=OTHER) for n in range(30)]
    put_all(store, old)
    policy = EvictionPolicy.of_classes(owners={OTHER: OwnerLimits(floor_bytes=20 * PAGE)})
    evictor = Evictor(store, policy)
    for n in range(300):
        r = small(1000 + n, bucket=100 + n)
        if store.put(build(r)) == NO_SPACE:
            evictor.step(store.wait_pressure(0.0))
            assert store.put(build(r)) == OK
    assert len(kept(store, old)) == 20
    store.close()


def test_a_touch_saves_an_extent_and_moves_it_up_only(store: Store) -> None:
    records = [small(n, bucket=100 + n) for n in range(10)]
    put_all(store, records)
    assert promise(store, records[0], touch=True, bucket=200) == [(OK, 1)]
    promise(store, records[5], touch=True, bucket=3)
    store.flush()
    rows = [row for number in (CHAT, CHAT + REUSED) for row in store.peek(number, OWNER, 100)]
    assert [bucket for bucket, _, _ in rows] == [101, 102, 103, 104, 105, 106, 107, 108, 109, 200]


def test_what_was_touched_after_the_peek_stays_before_and_after_the_touch_is_flushed(store: Store) -> None:
    a, b = small(1, bucket=10), small(2, bucket=10)
    put_all(store, [a, b])
    rows = [row for _, row, _ in store.peek(CHAT, OWNER, 10)]
    promise(store, a, touch=True, bucket=11)
    gone = store.evict(rows, Gone.EVICTED)
    assert len(gone) == 1 and kept(store, [a, b]) == [a]
    store.flush()
    assert store.evict(rows, Gone.EVICTED) == []


def test_what_is_promised_stays_until_the_promise_ends(store: Store) -> None:
    a, b = small(1, bucket=10), small(2, bucket=10)
    put_all(store, [a, b])
    promise(store, a, pin_seconds=600)
    rows = [row for _, row, _ in store.peek(CHAT, OWNER, 10)]
    assert len(store.evict(rows, Gone.EVICTED)) == 1
    assert kept(store, [a, b]) == [a] and store.stats()["evict_skipped_total"] == 1


def test_an_evictor_that_finds_everything_promised_ends_its_round(tmp_path: Path) -> None:
    store = Store(str(tmp_path), virtual_clock=True, capacity_bytes=32 * PAGE)
    records = [small(n, bucket=10 + n) for n in range(32)]
    put_all(store, records)
    promise(store, *records, pin_seconds=600)
    assert store.put(build(small(99, bucket=50))) == NO_SPACE
    assert Evictor(store, POLICY).step(store.wait_pressure(0.0)) == 0
    assert kept(store, records) == records
    store.close()


def test_the_class_becomes_the_longest_lived_that_touched_it(store: Store) -> None:
    r = small(1, bucket=10, retention_class=BATCH)
    put_all(store, [r])
    for touched_by, then in ((NONE, BATCH), (AGENT, AGENT), (CHAT, CHAT), (AGENT, CHAT), (BATCH, CHAT)):
        promise(store, r, touch=True, bucket=10, retention_class=touched_by)
        store.flush()
        assert discover(store, OWNER, r.extent_key)[0][0].retention_class == then
        assert [queue[0] for queue in store.queues()] == [then]


def test_operators_may_define_classes(store: Store) -> None:
    policy = EvictionPolicy.of_classes([RetentionClass("forever", 9, 1e9), RetentionClass("chat", 2, 60.0)])
    store.set_retentions(policy.retention_table())
    r = small(1, bucket=10)
    put_all(store, [r])
    promise(store, r, touch=True, bucket=10, retention_class=9)
    store.flush()
    assert [queue[0] for queue in store.queues()] == [9]
    advance(store, 10_000_000)
    Evictor(store, policy).step()
    assert kept(store, [r]) == [r]


def test_buckets_of_a_host_clock_are_clamped_to_its_neighbours(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    now = store.bucket_now()
    put_all(store, [small(1, bucket=0), small(2, bucket=2**32 - 1), small(3, bucket=now)])
    buckets = [bucket for bucket, _, _ in store.peek(CHAT, OWNER, 10)]
    assert all(now - 1 <= bucket <= now + 2 for bucket in buckets) and len(set(buckets)) >= 2
    store.close()


def test_a_ghost_says_why_something_is_gone(store: Store) -> None:
    evicted, taken_back, here = small(1), small(2), small(3)
    two = [small(4, write_id=1), small(4, write_id=2)]
    put_all(store, [evicted, taken_back, here, *two])
    store.evict([row for _, row, _ in store.peek(CHAT, OWNER, 10) if row[25:57] == evicted.extent_key], Gone.EVICTED)
    withdraw(store, taken_back, two[0])
    asked = keys_of(evicted, taken_back, here, two[0], key_of(77))
    # A ghost is of a writing: of the fourth key another one is still here.
    assert reasons(store, OWNER, asked) == [Gone.EVICTED, Gone.WITHDRAWN, Gone.UNKNOWN, Gone.WITHDRAWN, Gone.UNKNOWN]
    assert reasons(store, OTHER, asked) == [Gone.UNKNOWN] * 5


def test_a_ghost_tells_last_use_class_and_how_far_the_writing_went(store: Store) -> None:
    shards = [record_of(5, blocks=40, shard=s, bucket=100) for s in (3, 4)]
    old, new = record_of(6, blocks=2, bucket=90, write_id=1), record_of(6, blocks=9, bucket=95, write_id=2, retention_class=AGENT)
    put_all(store, [*shards, old, new])
    for row in [row for _, row, _ in store.peek(CHAT, OWNER, 10)] + [row for _, row, _ in store.peek(AGENT, OWNER, 10)]:
        store.evict([row], Gone.EXPIRED)
    found = store.ghosts(OWNER, keys_of(shards[0], old))
    first_bytes = [bytes(tag & 255 for tag in r.tags) for r in (shards[0], new, old)]
    assert found == [  # of two shards of one writing one ghost, of two writings the later first
        (0, Gone.EXPIRED, CHAT, 100, first_bytes[0]),
        (1, Gone.EXPIRED, AGENT, 95, first_bytes[1]),
        (1, Gone.EXPIRED, CHAT, 90, first_bytes[2]),
    ]


def test_golden_ghosts_are_what_is_written_and_read(tmp_path: Path) -> None:
    golden = Path(__file__).with_name("golden") / "ghosts-v2.ghost"
    new = record_of(6, blocks=9, bucket=95, write_id=2, retention_class=AGENT)
    gone = [record_of(5, blocks=40, shard=3, bucket=100), record_of(6, blocks=2, bucket=90, write_id=1), new]
    writer = Store(str(tmp_path / "writer"), virtual_clock=True)
    put_all(writer, gone)
    writer.evict([row for _, row, _ in writer.peek(CHAT, OWNER, 10)], Gone.EVICTED)
    writer.evict([row for _, row, _ in writer.peek(AGENT, OWNER, 10)], Gone.EXPIRED)
    want = writer.ghosts(OWNER, keys_of(gone[0], new))
    writer.close()
    assert (tmp_path / "writer" / "ghosts" / "0.ghost").read_bytes() == golden.read_bytes()
    (tmp_path / "reader" / "ghosts").mkdir(parents=True)
    shutil.copy(golden, tmp_path / "reader" / "ghosts" / "0.ghost")
    reader = Store(str(tmp_path / "reader"), virtual_clock=True)
    until(lambda: reader.ghosts(OWNER, keys_of(gone[0], new)) == want, "the file to be read")
    assert len(want) == 3 and reasons(reader, OWNER, keys_of(gone[0])) == [Gone.EVICTED]
    reader.close()


def test_thousands_of_ghosts_are_found_again_after_a_restart(tmp_path: Path) -> None:
    records = [small(n, bucket=100) for n in range(3000)]
    store = Store(str(tmp_path), virtual_clock=True)
    put_all(store, records)
    while rows := [row for _, row, _ in store.peek(CHAT, OWNER, 256)]:
        store.evict(rows, Gone.EVICTED)
    asked = keys_of(*records, *(key_of(n) for n in range(10_000, 10_500)))
    expected = [Gone.EVICTED] * 3000 + [Gone.UNKNOWN] * 500
    assert reasons(store, OWNER, asked) == expected
    store.close()
    store = Store(str(tmp_path), virtual_clock=True)
    assert store.wait_started(10)
    assert reasons(store, OWNER, asked) == expected
    store.close()


def test_of_a_key_that_came_and_went_all_day_the_latest_are_told(tmp_path: Path) -> None:
    store = Store(str(tmp_path), virtual_clock=True)
    for n in range(30):
        put_all(store, [small(1, bucket=100 + n), small(2 + n, bucket=100)])
        store.evict([row for _, row, _ in store.peek(CHAT, OWNER, 10)], Gone.EVICTED)
    expected = list(range(129, 121, -1))
    assert [bucket for *_, bucket, _ in store.ghosts(OWNER, keys_of(small(1)))] == expected
    assert reasons(store, OWNER, keys_of(*(small(2 + n) for n in range(30)))) == [Gone.EVICTED] * 30
    store.close()
    store = Store(str(tmp_path), virtual_clock=True)
    assert store.wait_started(10)
    assert [bucket for *_, bucket, _ in store.ghosts(OWNER, keys_of(small(1)))] == expected
    store.close()


def test_ghosts_outlive_restarts_and_days_and_go_after_two_weeks(tmp_path: Path) -> None:
    day = 86400 // 60
    store = Store(str(tmp_path), virtual_clock=True)
    records = [small(n, bucket=n * day) for n in range(20)]
    for r in records:
        put_all(store, [r])
        store.evict([row for _, row, _ in store.peek(CHAT, OWNER, 10)], Gone.EVICTED)
    store.close()
    store = Store(str(tmp_path), virtual_clock=True)
    assert store.wait_started(10)
    assert reasons(store, OWNER, keys_of(*records)) == [Gone.UNKNOWN] * 6 + [Gone.EVICTED] * 14
    assert store.stats()["ghost_bytes"] == 14 * (16 + 80)
    store.close()


def test_a_promise_and_an_eviction_of_one_extent_exclude_each_other(store: Store) -> None:
    """Promises race evictions; a promise that was given is kept."""
    records = [small(n, bucket=100) for n in range(300)]
    put_all(store, records)
    rows = [row for _, row, _ in store.peek(CHAT, OWNER, 1000)]
    begin = threading.Barrier(2)
    gone: list[int] = []

    def evict() -> None:
        begin.wait()
        for at in range(0, 300, 3):
            gone.append(len(store.evict(rows[at : at + 3], Gone.EVICTED)))

    thread = threading.Thread(target=evict)
    thread.start()
    begin.wait()
    promised = []
    for at in range(0, 300, 10):
        some = sorted(records, key=lambda r: r.extent_key)[at : at + 10]
        promised += [r for r, (status, _) in zip(some, promise(store, *some, pin_seconds=60), strict=True) if status == OK]
    thread.join()
    assert kept(store, promised) == promised
    assert sum(gone) + len(kept(store, records)) == 300


def test_watermarks_leave_room_for_writes_and_follow_disk_and_index() -> None:
    for capacity in (1 << 20, 1 << 26, 4 << 30, 15 << 40):
        high, low = POLICY.high_bytes(capacity), POLICY.low_bytes(capacity)
        assert 0.9 * capacity < low < high < capacity
        assert POLICY.bytes_to_free(Usage(high, 0, capacity, 1 << 50, 0)) == 0
        assert POLICY.bytes_to_free(Usage(high + 1, 0, capacity, 1 << 50, 0)) == high + 1 - low
    full = 4 << 30
    assert POLICY.bytes_to_free(Usage(full - 100, 0, full, 1 << 50, 0), wanted_bytes=10 << 20) >= (10 << 20) - 100
    assert POLICY.bytes_to_free(Usage(1 << 30, 0, 0, 0, 0)) > 0  # no capacity given, and the disk is full
    assert POLICY.bytes_to_free(Usage(1 << 30, 1 << 30, 0, 0, 0)) == 0  # enough is on its way
    assert POLICY.bytes_to_free(Usage(1 << 30, 0, 0, 1 << 40, 0.9)) > 0
    assert padded_bytes(1) == PAGE


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ConfigError):
        OwnerLimits(floor_bytes=2, cap_bytes=1)
    with pytest.raises(ConfigError):
        EvictionPolicy({16: 1.0}, {16: "x"})
    with pytest.raises(ConfigError):
        EvictionPolicy({1: 1.0}, {}, bucket_seconds=0)


def test_an_evicted_extent_is_not_found_by_anyone(store: Store) -> None:
    r = small(1)
    put_all(store, [r])
    store.evict([row for _, row, _ in store.peek(CHAT, OWNER, 1)], Gone.EVICTED)
    assert discover(store, OWNER, r.extent_key) == ([], False)
    assert promise(store, r, pin_seconds=1) == [(NOT_FOUND, 0)]
    assert store.put(build(r)) == OK  # not withdrawn: it may come again


def filled(
    tmp_path: Path, *, scan: int, chats: int, capacity: int = 200
) -> tuple[Store, list[Record], list[Record], list[tuple[str, str]]]:
    """A store of `capacity` pages: chats first, then a scan in class batch that is written into the full store, evicting as it goes."""
    store = Store(str(tmp_path), virtual_clock=True, capacity_bytes=capacity * PAGE)
    told: list[tuple[str, str]] = []
    evictor = Evictor(store, POLICY, lambda c, why, sizes, ages: told.extend([(c, why)] * len(sizes)))
    old = [small(n, bucket=100 + n) for n in range(chats)]
    new = [small(1000 + n, bucket=500, retention_class=BATCH) for n in range(scan)]
    for r in old + new:
        if store.put(build(r)) == NO_SPACE:
            evictor.step(store.wait_pressure(0.0))
            assert store.put(build(r)) == OK
    return store, old, new, told


def test_a_scan_past_its_classes_share_pushes_out_itself_and_not_the_chats(tmp_path: Path) -> None:
    store, chats, scan, told = filled(tmp_path, scan=1000, chats=185)
    assert len(kept(store, chats)) >= 170, "no more than room for the share went"
    assert len(kept(store, scan)) <= 200 * 0.02 + 200 / 16 + 1
    assert {reason for name, reason in told if name == "batch"} == {"share"}
    assert kept(store, scan)[-1] == scan[-1]
    store.close()


def test_a_class_may_fill_what_nobody_else_needs(tmp_path: Path) -> None:
    store, chats, scan, _ = filled(tmp_path, scan=100, chats=50)
    assert kept(store, chats) == chats and kept(store, scan) == scan, "a share is no cap"
    store.close()


def test_what_promises_nothing_goes_before_a_class_over_its_share(tmp_path: Path) -> None:
    store = Store(str(tmp_path), virtual_clock=True, capacity_bytes=100 * PAGE)
    batch = [small(n, bucket=100, retention_class=BATCH) for n in range(50)]
    free = [small(100 + n, bucket=101, retention_class=NONE) for n in range(40)]
    put_all(store, batch + free)
    advance(store, 102)
    Evictor(store, POLICY).step(20 * PAGE)
    assert kept(store, batch) == batch and 0 < len(kept(store, free)) <= 30
    store.close()


def test_twelve_nodes_at_one_fill_drop_the_same_extents_of_a_class_over_its_share(tmp_path: Path) -> None:
    rng = random.Random(8)
    shapes = [(rng.randrange(100, 130), rng.randrange(40), rng.choice([BATCH, CHAT])) for _ in range(150)]
    left = set()
    for node in range(12):
        store = Store(str(tmp_path / str(node)), virtual_clock=True, capacity_bytes=160 * PAGE)
        order = list(range(150))
        rng.shuffle(order)
        mine = [small(n, bucket=b, start_block=s, retention_class=c, shard=node) for n, (b, s, c) in enumerate(shapes)]
        put_all(store, [mine[n] for n in order])
        Evictor(store, POLICY).step(40 * PAGE)
        left.add(frozenset(r.extent_key for r in kept(store, mine)))
        store.close()
    assert len(left) == 1 and len(next(iter(left))) < 150


def test_bytes_that_nothing_accounts_for_are_measured_and_freed_ones_are_not_among_them(store: Store, tmp_path: Path) -> None:
    records = [small(n, bucket=100 + n) for n in range(50)]
    put_all(store, records)
    store.evict([row for _, row, _ in store.peek(CHAT, OWNER, 20)], Gone.EVICTED)
    store.flush()
    [segment] = (tmp_path / "data" / "segments").glob("*.seg")
    until_ahead_is_back(segment)
    store.flush()
    before = store.stats()["zombie_bytes"]
    assert before < 20 * PAGE
    with segment.open("r+b") as file:  # what a crash between write and commit leaves
        file.seek(0, 2)
        file.write(bytes(range(256)) * 16 * 100)
    store.flush()
    assert store.stats()["zombie_bytes"] == before + 100 * PAGE
