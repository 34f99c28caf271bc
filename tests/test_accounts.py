"""Accounting: every token of every lookup counts once, as hit or with its reason; ages; the access log."""

from __future__ import annotations

import itertools
import json
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from client_tools import NO_REUSE, SMALL, WAIT_SECONDS, bytes_of, chain, store, until
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cli.cluster import ask_nodes
from kvstore.client import Accept, Client, ClientConfig, Fidelity, access_log, accounts
from kvstore.client.access_log import AccessLog, fingerprints, schema
from kvstore.client.reasons import Gap, Ghost, Limits, Miss, Split, split
from kvstore.errors import ConfigError, MisuseError
from kvstore.kernels import hash_reference
from kvstore.keys import Keys
from kvstore.metrics import MISS_REASONS, REUSE_AGE_BOUNDS_SECONDS
from kvstore.replay.clock import TraceClock
from kvstore.server.local import LocalCluster
from kvstore.wire import Gone

GAP = st.builds(Gap, st.integers(0, 12), st.integers(0, 14), st.sampled_from([None, Miss.FIDELITY, Miss.LOST_SHARDS]))
GHOST = st.builds(Ghost, st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=64))
KEYS = np.random.default_rng(7).integers(0, 256, (10, 32), np.uint8)


@given(
    blocks=st.integers(0, 10), extra=st.integers(0, 127), recompute=st.integers(0, 400), hit=st.integers(0, 10), window=st.booleans(),
    gaps=st.lists(GAP, max_size=4), ghosts=st.lists(GHOST, max_size=4), late=st.booleans(), ages=st.lists(st.floats(0, 1e7), max_size=3),
)  # fmt: skip
def test_hit_tokens_and_all_reasons_make_the_input(
    blocks: int, extra: int, recompute: int, hit: int, window: bool, gaps: list[Gap], ghosts: list[Ghost], late: bool, ages: list[float]
) -> None:
    limits = Limits(blocks * 128 + extra, recompute, 128, blocks)
    pieces = [(min(hit, (at + 1) * 3), age) for at, age in enumerate(ages)]
    parts = split(KEYS[:blocks], limits, min(hit, blocks), window, pieces, gaps, ghosts, late, 1000, 60)
    assert parts.hit_tokens + sum(parts.missed) == parts.input_tokens == blocks * 128 + extra
    assert min(parts.hit_tokens, *parts.missed, *parts.ages) >= 0
    assert parts.hit_tokens <= sum(parts.ages) <= parts.input_tokens
    assert len(parts.missed) == len(MISS_REASONS) and len(parts.ages) == len(REUSE_AGE_BOUNDS_SECONDS) + 1


def told(hit: int = 0, gaps: tuple[Gap, ...] = (), ghosts: tuple[Ghost, ...] = (), late: bool = False) -> list[str]:
    """The reason of each of ten blocks behind `hit`."""
    names = []
    before = [0] * len(Miss)
    for blocks in range(hit, 11):
        parts = split(KEYS[:blocks], Limits(blocks * 128, 0, 128, blocks), hit, False, [(hit, 0.0)], gaps, ghosts, late, 1000, 60)
        names += [MISS_REASONS[at] for at, (a, b) in enumerate(zip(before, parts.missed, strict=True)) if b > a]
        before = list(parts.missed)
    return names


def ghost_of(start: int, blocks: int, reason: Gone = Gone.EVICTED, bucket: int = 900) -> Ghost:
    return Ghost(start, reason, bucket, KEYS[start : start + blocks, 8].tobytes())


def test_a_dropped_writing_explains_blocks_only_as_far_as_it_equals_the_prompt() -> None:
    tags = bytearray(ghost_of(2, 8).tags)
    tags[5] ^= 1
    assert told(2, ghosts=(Ghost(2, Gone.EVICTED, 900, bytes(tags)),)) == ["evicted"] * 5 + ["unknown"] * 3


def test_the_latest_of_several_dropped_writings_has_the_last_word() -> None:
    assert told(ghosts=(ghost_of(0, 10, Gone.EVICTED, 950), ghost_of(0, 4, Gone.EXPIRED, 990))) == ["expired"] * 4 + ["evicted"] * 6


def test_what_is_there_behind_a_gap_has_the_gaps_reason() -> None:
    gaps = (Gap(5, 10, None),)
    assert told(2, gaps, (ghost_of(2, 3),)) == ["evicted"] * 8
    assert told(2, gaps) == ["unknown"] * 8


def test_lost_shards_are_evictions_where_a_node_remembers_one() -> None:
    short = (Gap(0, 6, Miss.LOST_SHARDS),)
    assert told(gaps=short) == ["lost_shards"] * 6 + ["unknown"] * 4
    assert told(gaps=short, ghosts=(ghost_of(0, 6),)) == ["evicted"] * 6 + ["unknown"] * 4


def test_what_could_not_be_asked_in_time_is_not_called_unknown() -> None:
    assert told(2, ghosts=(ghost_of(2, 3, Gone.EXPIRED),), late=True) == ["expired"] * 3 + ["deadline"] * 5
    assert told(ghosts=(ghost_of(0, 10, Gone.WITHDRAWN),)) == ["unknown"] * 10


def test_a_prompts_end_is_tail_and_a_missing_window_costs_one_block() -> None:
    limits = Limits(1280, 134, 128, 10)
    parts = split(KEYS, limits, 10, False, [(10, 0.0)], [], [], False, 1000, 60)
    assert parts.hit_tokens == 8 * 128 and parts.missed[Miss.TAIL] == 256
    parts = split(KEYS, limits, 10, True, [(10, 0.0)], [], [], False, 1000, 60)
    assert parts.hit_tokens == 7 * 128 and parts.missed[Miss.WINDOW] == 128 and parts.missed[Miss.TAIL] == 256


def test_the_needed_age_is_the_longest_so_far_and_prices_what_was_dropped() -> None:
    hour = 60
    ghosts = [ghost_of(6, 2, Gone.EXPIRED, 1000 - 30 * hour), ghost_of(9, 1, Gone.EVICTED, 999)]
    parts = split(KEYS, Limits(1280, 0, 128, 10), 6, False, [(2, 120.0), (4, 7200.0), (6, 0.0)], [], ghosts, False, 1000, 60)
    by_name = dict(zip((60, 300, 3600, 6 * 3600, 43200, 86400, 172800), parts.ages, strict=False))
    assert by_name[300] == 2 * 128 and by_name[6 * 3600] == 4 * 128 and by_name[172800] == 2 * 128
    assert sum(parts.ages) == 8 * 128, "block 8 is unknown: no retention would reach beyond it"


# --- a real cluster ---

CLOCK = TraceClock()
_minutes = 0


def later(minutes: int) -> None:
    global _minutes
    _minutes += minutes
    CLOCK.advance_to(_minutes * 60_000)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Twelve nodes of 16 MB: some 500 extents of 64 blocks of SMALL fit."""
    directory = tmp_path_factory.mktemp("accounts")
    with LocalCluster(directory, capacity_bytes=16 << 20, extra_arguments=["--virtual-clock"]) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.map, layout=SMALL, config=NO_REUSE, clock=CLOCK) as found:
        yield found


def missed(client: Client, keys: Keys, **how: Any) -> dict[str, int]:
    """Looks up; the blocks that did not hit, by reason."""
    assert client.accounts.flush(20)
    before = client.stats()
    client.lookup(keys, **how)
    assert client.accounts.flush(20)
    stats = client.stats()
    assert stats["lookup_tokens"] == stats["hit_tokens"] + sum(stats[f"missed_{reason}_tokens"] for reason in MISS_REASONS)
    by_reason = {reason: int(stats[f"missed_{reason}_tokens"] - before[f"missed_{reason}_tokens"]) // 128 for reason in MISS_REASONS}
    return {reason: blocks for reason, blocks in by_reason.items() if blocks}


def gone(cluster: LocalCluster, reason: str) -> int:
    """Shards of extents evicted for this reason, all nodes together."""
    name = "kvstore_evicted_extents_total"
    return int(sum(v for r in ask_nodes(cluster.map, 5.0) for k, v in r.values.items() if k.startswith(name) and f'reason="{reason}"' in k))


def test_what_was_never_stored_is_unknown(client: Client) -> None:
    keys = chain(30, SMALL)
    store(client, keys[:20])
    assert missed(client, keys) == {"unknown": 10}
    assert client.stats()["unexplained_lookups"] == 0


def test_what_outlived_its_class_is_expired_also_where_another_prompt_shares_its_start(cluster: LocalCluster, client: Client) -> None:
    keys = chain(70, SMALL)
    client.store(keys, bytes_of(keys, SMALL), first_block=0, retention_class="batch").result(WAIT_SECONDS)
    later(90)
    store(client, chain(3, SMALL))  # tells the nodes what time it is
    until(lambda: gone(cluster, "expired") == 24, "two extents to expire on twelve nodes")
    longer = np.concatenate([keys, chain(5, SMALL)])
    assert missed(client, longer) == {"expired": 70, "unknown": 5}
    parted = np.concatenate([keys[:40], chain(30, SMALL)])
    assert missed(client, parted) == {"expired": 40, "unknown": 30}


def test_what_was_dropped_for_room_is_evicted(cluster: LocalCluster, client: Client) -> None:
    keys = chain(40, SMALL)
    store(client, keys)
    later(5)
    many = chain(64 * 700, SMALL)
    data = bytes_of(many[:64], SMALL)

    def store_burst(at: int) -> int:
        stores = [client.store(many[: first + 64], data, first_block=first) for first in range(at, at + 64 * 50, 64)]
        return sum(each.result(WAIT_SECONDS).blocks for each in stores)

    for at in range(0, len(many), 64 * 50):  # a burst beyond the room may lose some, and all of it before a node has made room
        until(lambda: store_burst(at) > 0, "room for some of a burst")  # noqa: B023  it is called before the next round
    assert gone(cluster, "lru")
    assert missed(client, keys) == {"evicted": 40}


def test_approximations_that_are_not_wanted_are_told_apart(client: Client) -> None:
    keys = chain(20, SMALL)
    store(client, keys[:8])
    client.store(keys, bytes_of(keys[8:], SMALL), first_block=8, fidelity=Fidelity.approx(2)).result(WAIT_SECONDS)
    assert missed(client, keys) == {"fidelity": 12}
    assert missed(client, keys, accept=Accept.ANY) == {}


def test_a_lookup_without_time_says_deadline(client: Client) -> None:
    keys = chain(6, SMALL)
    store(client, keys)
    assert missed(client, keys, deadline_seconds=0.0) == {"deadline": 6}


def test_blocks_whose_nodes_are_down_have_lost_their_shards(cluster: LocalCluster, client: Client) -> None:
    keys = chain(20, SMALL)
    store(client, keys)
    for node in (2, 5, 7):
        cluster.kill(node)
    try:
        assert missed(client, np.concatenate([keys, chain(4, SMALL)])) == {"lost_shards": 20, "unknown": 4}
    finally:
        for node in (2, 5, 7):
            cluster.restart(node)


def test_tail_and_window_come_from_the_caller(client: Client) -> None:
    keys = chain(10, SMALL)
    store(client, keys)
    asked: list[int] = []
    before = client.stats()
    client.lookup(keys, input_tokens=1300, recompute_tokens=134, window=lambda blocks: bool(asked.append(blocks)))
    assert client.accounts.flush(20)
    stats = client.stats()
    assert asked == [9] and stats["hit_tokens"] - before["hit_tokens"] == 8 * 128
    assert stats["missed_window_tokens"] == 128 and stats["missed_tail_tokens"] == 1300 - 9 * 128
    for wrong in ({"input_tokens": 1152}, {"input_tokens": -1}, {"recompute_tokens": -1}):
        with pytest.raises(MisuseError):
            client.lookup(keys, **wrong)


def test_ages_are_those_of_the_last_use_before_the_lookup(client: Client) -> None:
    keys = chain(10, SMALL)
    store(client, keys)
    later(50)
    for expected in (3600, 60):
        before = {**client.counters.reuse_ages}.get("chat", ([0] * 12, 0.0))[0]
        assert missed(client, keys) == {}
        grown = [a - b for a, b in zip(client.counters.reuse_ages["chat"][0], before, strict=True)]
        assert {bound: tokens for bound, tokens in zip(REUSE_AGE_BOUNDS_SECONDS, grown, strict=False) if tokens} == {expected: 1280}
        # The touch is on its way to the index for a second at most; a promise meanwhile is answered from its pin.


# --- the access log ---


def logged(cluster: LocalCluster, directory: Path, **config: Any) -> list[dict[str, Any]]:
    """Three lookups by a client that logs to `directory`; the rows found there."""
    settings = ClientConfig(access_log=directory, tenant="acme", model_name="m/7b", **config)
    with Client(cluster.map, layout=SMALL, config=settings, clock=CLOCK) as client:
        keys = chain(12, SMALL)
        client.lookup(keys, input_tokens=1540)
        store(client, keys)
        client.lookup(keys, input_tokens=1540)
        client.lookup(np.empty((0, 32), np.uint8), input_tokens=100)
    return [row for path in sorted(directory.glob("access-*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_each_lookup_is_a_row_whose_parts_add_up(cluster: LocalCluster, tmp_path: Path) -> None:
    rows = logged(cluster, tmp_path / "log")
    assert [(r["input_tokens"], r["hit_tokens"], r["miss_unknown"], r["miss_tail"]) for r in rows] == [
        (1540, 0, 1536, 4), (1540, 1536, 0, 4), (100, 0, 0, 100),
    ]  # fmt: skip
    for row in rows:
        assert row["input_tokens"] == row["hit_tokens"] + sum(row[f"miss_{reason}"] for reason in MISS_REASONS)
        assert (row["tenant"], row["model"], row["retention_class"]) == ("acme", "m/7b", "chat")
    assert [len(row["blocks"]) for row in rows] == [12, 12, 0] and rows[0]["blocks"] == rows[1]["blocks"]
    (path,) = (tmp_path / "log").glob("access-*.parquet")
    found = pq.read_schema(path)
    assert found.equals(schema()), "columns are as documented"
    about = json.loads(found.metadata[b"kvstore"])
    assert about["schema"] == "kvstore.access/1" and about["block_tokens"] == 128 and about["sample"] == 1.0
    document = (Path(__file__).parent.parent / "docs" / "ACCESS_LOG.md").read_text()
    assert all(f"`{name}`" in document for name in found.names)


def test_fingerprints_say_nothing_without_the_salt(cluster: LocalCluster, tmp_path: Path) -> None:
    keys = chain(12, SMALL, seed=5)
    first, second = fingerprints(keys, b"a" * 16), fingerprints(keys, b"b" * 16)
    assert len({*first.tolist(), *second.tolist()}) == 24 and first.tolist() == [
        hash_reference.fingerprint(b"a" * 16, key.tobytes()) for key in keys
    ]
    rows = logged(cluster, tmp_path / "log")
    salt = tmp_path / "log" / "salt"
    assert stat.S_IMODE(salt.stat().st_mode) == 0o600 and len(salt.read_bytes()) == 16
    again = logged(cluster, tmp_path / "log")
    assert len(again) == 6 and again[:3] == rows
    logs = b"".join(path.read_bytes() for path in (tmp_path / "log").glob("*.parquet"))
    assert salt.read_bytes() not in logs


def test_a_sample_logs_the_same_blocks_at_every_lookup(cluster: LocalCluster, tmp_path: Path) -> None:
    rows = logged(cluster, tmp_path / "log", access_log_sample=0.5)
    assert rows[0]["blocks"] == rows[1]["blocks"] and len(rows[0]["blocks"]) < 12
    assert all(each < 2**63 for each in rows[0]["blocks"])


def test_the_oldest_files_go_when_the_log_is_full(tmp_path: Path) -> None:
    log = AccessLog(tmp_path, tenant="t", model="m", block_tokens=128, sample=1.0, bytes_max=1 << 20, file_seconds=60)
    keys = np.random.default_rng(1).integers(0, 256, (60_000, 32), np.uint8)  # 480 kB each that no codec makes smaller
    parts = Split(1, 1, (0,) * len(MISS_REASONS), (0,) * (len(REUSE_AGE_BOUNDS_SECONDS) + 1))
    for number in range(5):
        log.append(number, "chat", parts, 0.0, np.roll(keys, number, axis=1))
        assert log.due_seconds() is not None
        log.roll()
    left = [pq.read_table(path)["time"][0].as_py().microsecond // 1000 for path in tmp_path.glob("access-*.parquet")]
    assert sorted(left) == [3, 4] and log.written == 5
    assert sum(path.stat().st_size for path in tmp_path.glob("*.parquet")) <= 1 << 20


def test_the_folder_of_the_log_may_be_named_by_a_string(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster.map, layout=SMALL, config=ClientConfig(access_log=str(tmp_path / "log")), clock=CLOCK) as client:
        client.lookup(chain(3, SMALL))
    assert len(list((tmp_path / "log").glob("access-*.parquet"))) == 1


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="E152"):
        Client(cluster.map, layout=SMALL, config=ClientConfig(access_log=tmp_path / "file" / "log"))
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "salt").write_bytes(b"short")
    with pytest.raises(ConfigError, match="remove it"):
        Client(cluster.map, layout=SMALL, config=ClientConfig(access_log=tmp_path / "log"))
    with pytest.raises(ConfigError, match="tenant"):
        ClientConfig(tenant='a"b')


def test_a_log_that_can_no_longer_be_written_loses_rows_and_nothing_else(cluster: LocalCluster, tmp_path: Path) -> None:
    directory = tmp_path / "log"
    with Client(cluster.map, layout=SMALL, config=ClientConfig(access_log=directory), clock=CLOCK) as client:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        assert not client.lookup(chain(3, SMALL)).hit_blocks
        assert client.accounts.flush(20)
        assert client.access_log is not None and client.access_log.dropped == 1


def empty_log(directory: Path) -> AccessLog:
    return AccessLog(directory, tenant="t", model="m", block_tokens=128, sample=1.0, bytes_max=1 << 20, file_seconds=60)


def parts_of(tokens: int) -> Split:
    return Split(tokens, tokens, (0,) * len(MISS_REASONS), (0,) * (len(REUSE_AGE_BOUNDS_SECONDS) + 1))


def test_more_tokens_than_a_column_holds_are_refused_and_cost_no_other_row(client: Client, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="E569"):
        client.lookup(chain(1, SMALL), input_tokens=2**32)
    client.lookup(chain(1, SMALL), input_tokens=2**32 - 1)
    log = empty_log(tmp_path)
    log.append(1, "chat", parts_of(2**32 - 1), 0.0, KEYS)
    with pytest.raises(ValueError, match="tokens"):
        log.append(2, "chat", parts_of(2**32), 0.0, KEYS)
    log.roll()
    assert (log.written, log.dropped) == (1, 0)


def test_what_comes_after_the_log_is_closed_is_counted_as_lost(tmp_path: Path) -> None:
    log = empty_log(tmp_path)
    log.append(1, "chat", parts_of(1), 0.0, KEYS)
    log.close()
    log.append(2, "chat", parts_of(1), 0.0, KEYS)
    assert (log.written, log.dropped) == (1, 1)


def test_lookups_that_wait_are_bounded_in_keys_and_the_rest_is_counted_at_once(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "QUEUE_KEYS_MAX", 10)
    with Client(cluster.map, layout=SMALL, config=ClientConfig(access_log=tmp_path / "log"), clock=CLOCK) as client:
        client.lookup(chain(11, SMALL))
        client.lookup(chain(10, SMALL))
        assert client.accounts.flush(WAIT_SECONDS)
        client.lookup(chain(10, SMALL))
        assert client.accounts.flush(WAIT_SECONDS)
        assert client.stats()["unexplained_lookups"] == 1
        assert client.access_log is not None and client.access_log.written == 3


def test_rows_that_no_file_can_hold_are_lost_and_the_next_ones_are_not(tmp_path: Path) -> None:
    log = empty_log(tmp_path)
    log.append(2**70, "chat", parts_of(1), 0.0, KEYS)
    log.roll()
    log.append(1, "chat", parts_of(1), 0.0, KEYS)
    log.roll()
    assert (log.written, log.dropped) == (1, 1)


def test_a_disk_that_stands_still_delays_no_row_and_memory_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "PRINTS_MAX", 100)
    log = empty_log(tmp_path)
    writes, writing, goes_on = log._write, threading.Event(), threading.Event()

    def stands_still(rows: Any) -> None:
        writing.set()
        assert goes_on.wait(WAIT_SECONDS)
        writes(rows)

    monkeypatch.setattr(log, "_write", stands_still)
    log.append(1, "chat", parts_of(1), 0.0, KEYS)
    thread = threading.Thread(target=log.roll, daemon=True)
    thread.start()
    assert writing.wait(WAIT_SECONDS)
    row = (2, "chat", parts_of(1), 0.0, KEYS)
    appends = threading.Thread(target=lambda: list(itertools.starmap(log.append, [row] * 25)), daemon=True)
    appends.start()
    appends.join(WAIT_SECONDS)
    assert not appends.is_alive(), "a row waited for the disk"
    assert log.due_seconds() == 0 and log.dropped == 5, "20 rows of ten fingerprints wait"
    goes_on.set()
    thread.join(WAIT_SECONDS)
    log.roll()
    assert (log.written, log.dropped) == (21, 5)


def test_nobody_who_waits_for_accounts_waits_for_their_rests(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between accounts the interpreter is left to lookups. Where it comes back late, as beside threads that compute, a close would take
    as many times that as there are accounts."""
    monkeypatch.setattr(accounts, "REST_SECONDS", 5.0)
    monkeypatch.setattr(accounts, "WORK_SECONDS", 0.0)
    client = Client(cluster.map, layout=SMALL, config=NO_REUSE)
    for _ in range(40):
        client.lookup(chain(3, SMALL))
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 20, "the rest that it was in, and no other"
    assert client.stats()["missed_unknown_tokens"] == 40 * 3 * 128
