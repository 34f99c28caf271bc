"""Replacement policies over a real store: what each lets go first, that nodes choose alike, and that prompts lose their tails first."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_tools import NO_SPACE, OK, OWNER, Store, promise, read, record_of

from kvstore.cli.main import main
from kvstore.clustermap import POLICIES, Rules
from kvstore.entry import REUSED
from kvstore.errors import ConfigError
from kvstore.gc import EvictionPolicy, Evictor
from kvstore.record import Record, build
from kvstore.server.config import NodeConfig
from kvstore.server.local import LocalCluster

CHAT = 2
PAGE = 4096


def small(number: int, **changes: object) -> Record:
    """One page on disk."""
    return record_of(number, blocks=1, plane_bytes=(320,), **changes)


class Full:
    """A store of `pages` pages, virtual clock, that evicts by `policy` whenever a write finds no room."""

    def __init__(self, path: Path, policy: str, pages: int = 200) -> None:
        self.store = Store(str(path), virtual_clock=True, capacity_bytes=pages * PAGE)
        assert self.store.wait_started(10)
        self.evictor = Evictor(self.store, EvictionPolicy.of_classes(replacement=policy))

    def put(self, *records: Record) -> None:
        for r in records:
            if self.store.put(build(r)) == NO_SPACE:
                assert self.evictor.step(self.store.wait_pressure(0.0)) > 0
                assert self.store.put(build(r)) == OK

    def touch(self, bucket: int, *records: Record) -> None:
        promise(self.store, *records, touch=True, bucket=bucket)
        self.store.flush()

    def kept(self, records: list[Record]) -> list[Record]:
        return [r for r in records if read(self.store, r)[0] == OK]

    def close(self) -> None:
        assert self.store.check_integrity(deep=True) == []
        self.store.close()


@pytest.fixture
def full(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Full]:
    made = Full(tmp_path / "data", request.param)
    yield made
    made.close()


@pytest.mark.parametrize("full", ["lru"], indirect=True)
def test_lru_goes_by_last_use_whether_used_again_or_not(full: Full) -> None:
    rng = random.Random(2)
    records = [small(n, bucket=100 + n) for n in range(100)]
    full.put(*records)
    used = {r.extent_key: r.bucket for r in records}
    for bucket in range(200, 240):
        r = rng.choice(records)
        full.touch(bucket, r)
        used[r.extent_key] = bucket
    rows = [row for _, row, _ in full.evictor._in_order(full.store.queues(), full.store.bucket_now())]
    assert [row[25:57] for row in rows] == sorted(used, key=lambda key: (used[key], key))


@pytest.mark.parametrize("full", ["s3fifo", "sieve"], indirect=True)
def test_a_scan_does_not_push_out_what_was_used_again(full: Full) -> None:
    hot = [small(n, bucket=100) for n in range(100)]
    full.put(*hot)
    full.touch(110, *hot)
    full.put(*(small(1000 + n, bucket=120 + n // 10) for n in range(2000)))
    assert full.kept(hot) == hot


@pytest.mark.parametrize("full", ["lru"], indirect=True)
def test_under_lru_a_scan_pushes_out_everything_older(full: Full) -> None:
    hot = [small(n, bucket=100) for n in range(100)]
    full.put(*hot)
    full.touch(110, *hot)
    full.put(*(small(1000 + n, bucket=120 + n // 10) for n in range(2000)))
    assert full.kept(hot) == []


@pytest.mark.parametrize("full", ["s3fifo"], indirect=True)
def test_s3fifo_gives_a_second_chance_to_what_is_written_again(full: Full) -> None:
    first, again = small(1, bucket=100), small(1, bucket=150, write_id=77)
    full.put(first, *(small(1000 + n, bucket=101) for n in range(400)))
    assert full.kept([first]) == []
    full.put(again, small(2, bucket=150))
    reused = [row[25:57] for _, row, _ in full.store.peek(CHAT + REUSED, OWNER, 10)]
    assert reused == [first.extent_key], "and only that"
    full.put(*(small(2000 + n, bucket=160) for n in range(1000)))
    assert full.kept([again]) == [again]


@pytest.mark.parametrize("full", ["s3fifo"], indirect=True)
def test_s3fifo_takes_the_longest_unused_of_all_when_few_are_new(full: Full) -> None:
    old, kept = [small(n, bucket=100) for n in range(90)], [small(100 + n, bucket=100) for n in range(90)]
    full.put(*old, *kept)
    full.touch(110, *old)
    full.touch(120, *kept)
    full.put(*(small(1000 + n, bucket=130) for n in range(30)))
    assert len(full.kept(old)) < len(old) and full.kept(kept) == kept


@pytest.mark.parametrize("full", ["sieve"], indirect=True)
def test_sieve_lets_go_in_a_later_sweep_what_was_not_used_since(full: Full) -> None:
    stale, hot = [small(n, bucket=100) for n in range(80)], [small(100 + n, bucket=100) for n in range(80)]
    full.put(*stale, *hot)
    full.touch(101, *stale, *hot)
    for sweep in range(40):
        bucket = 110 + 10 * sweep
        full.put(*(small(1000 + 100 * sweep + n, bucket=bucket) for n in range(40)))
        full.touch(bucket + 1, *hot, *full.kept([small(1000 + 100 * sweep + n, bucket=bucket) for n in range(40)]))
    assert full.kept(hot) == hot and len(full.kept(stale)) < len(stale)


@pytest.mark.parametrize("policy", POLICIES)
def test_twelve_nodes_that_heard_the_same_in_any_order_keep_the_same(tmp_path: Path, policy: str) -> None:
    rng = random.Random(4)
    shapes = [(rng.randrange(100, 130), rng.randrange(40)) for _ in range(180)]
    touches = [(rng.randrange(131, 150), rng.randrange(180)) for _ in range(90)]
    left = set()
    for node in range(12):
        made = Full(tmp_path / str(node), policy, pages=200)
        mine = [small(n, bucket=b, start_block=s, shard=node) for n, (b, s) in enumerate(shapes)]
        made.put(*rng.sample(mine, len(mine)))
        for bucket, n in rng.sample(touches, len(touches)):
            promise(made.store, mine[n], touch=True, bucket=bucket)
        made.store.flush()
        promise(made.store, small(10**6), touch=True, bucket=150)  # moves the clock
        made.evictor.step(120 * PAGE)
        left.add(frozenset(r.extent_key for r in made.kept(mine)))
        made.close()
    assert len(left) == 1 and 20 < len(next(iter(left))) < 150


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_drops_the_head_of_a_prompt_before_its_tail(tmp_path: Path, policy: str, seed: int) -> None:
    rng = random.Random(seed)
    made = Full(tmp_path / "data", policy, pages=150)
    prompts: list[list[Record]] = []
    number = 0
    for bucket in range(100, 500):
        prompt = rng.choice(prompts[-60:]) if prompts and rng.random() < 0.6 else []
        if not prompt:
            prompts.append(prompt)
        held = made.kept(prompt)
        assert held == prompt[: len(held)], f"a hole in a prompt at bucket {bucket}"
        if held:
            made.touch(bucket, *held)
        lost = len(prompt) - len(held)
        del prompt[len(held) :]
        for start in range(len(prompt), len(prompt) + (lost or rng.randrange(1, 4))):
            number += 1
            prompt.append(small(number, bucket=bucket, start_block=start))
            made.put(prompt[-1])
    made.store.flush()
    for prompt in prompts:
        held = made.kept(prompt)
        assert held == prompt[: len(held)]
    made.close()


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="lru, s3fifo, sieve"):
        EvictionPolicy.of_classes(replacement="fifo")


def test_a_daemon_goes_by_its_map_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "map", 1, capacity_bytes=128 << 20, rules=Rules("s3fifo")) as cluster:
        assert "replacement s3fifo" in cluster.log_path(0).read_text()
    told = LocalCluster(tmp_path / "flag", 1, capacity_bytes=128 << 20, rules=Rules("s3fifo"), extra_arguments=("--policy", "sieve"))
    with told as cluster:
        assert "replacement sieve" in cluster.log_path(0).read_text()
    with pytest.raises(ConfigError, match="give one of lru"):
        NodeConfig(tmp_path, policy="fifo")


def test_rules_of_a_local_cluster_are_refused_beside_a_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    assert main(["replay", str(trace), "--map", str(tmp_path / "map.toml"), "--policy", "sieve"]) == 2
    assert "--policy with --map" in capsys.readouterr().err
