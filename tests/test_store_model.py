"""Random operations on a store and on a plain dict: after every one of them both say the same.

Not covered here: capacity (test_gc.py), threads and kill -9 (test_store_restart.py), damaged bytes (test_store_damage.py).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_model import NodeModel
from store_tools import NOT_FOUND, OK, OWNER, Store, discover, key_of, keys_of, promise, read, reasons, record_of, withdraw

from kvstore.record import Record, build

FULL = os.environ.get("SIZE", "") == "full"
RETENTION = [0, 3600, 7 * 86400, 3 * 86400] + [0] * 12
OWNERS = (OWNER, bytes(15) + b"\7")
KEYS = [key_of(n) for n in range(4)]

numbers = st.integers(0, 2**20)


@st.composite
def records(draw: st.DrawFn) -> Record:
    return record_of(
        draw(numbers),
        extent_key=draw(st.sampled_from(KEYS)),
        owner=draw(st.sampled_from(OWNERS)),
        write_id=draw(st.integers(0, 9)),
        shard=draw(st.integers(0, 2)),
        bucket=draw(st.integers(0, 30)),
        start_block=draw(st.integers(0, 5)),
        retention_class=draw(st.integers(0, 3)),
    )


class StoreAgainstModel(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-model-"))
        self.model = NodeModel(RETENTION)
        self.store = self.open()

    def open(self) -> Store:
        store = Store(str(self.directory), segment_bytes=1 << 16, virtual_clock=True, retention_seconds=RETENTION)
        assert store.wait_started(30)
        return store

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert self.store.check_integrity(deep=True) == []
            self.store.close()
            shutil.rmtree(self.directory)

    @rule(record=records())
    def put(self, record: Record) -> None:
        assert self.store.put(build(record)) == self.model.put(record)

    @rule(record=records())
    def read_one(self, record: Record) -> None:
        held = self.model.held.get(((record.owner, record.extent_key, record.write_id), record.shard))
        assert read(self.store, record) == ((OK, held.raw) if held else (NOT_FOUND, b""))

    @rule(record=records(), pin=st.booleans(), touch=st.none() | st.tuples(st.integers(0, 40), st.integers(0, 3)))
    def promise_one(self, record: Record, pin: bool, touch: tuple[int, int] | None) -> None:
        name = record.owner, record.extent_key, record.write_id
        how = {"touch": True, "bucket": touch[0], "retention_class": touch[1]} if touch else {}
        assert promise(self.store, record, pin_seconds=600 if pin else 0, **how) == [self.model.promise(name, pin=pin, touch=touch)]

    @rule(record=records())
    def withdraw_one(self, record: Record) -> None:
        name = record.owner, record.extent_key, record.write_id
        assert withdraw(self.store, record) == [self.model.withdraw(name)]

    @rule(count=st.integers(1, 6), which=st.integers(0, 7), reason=st.integers(1, 2))
    def evict(self, count: int, which: int, reason: int) -> None:
        self.store.flush()
        queues = self.store.queues()
        if not queues:
            return
        retention_class, owner, _, _ = queues[which % len(queues)]
        rows = [row for _, row, _ in self.store.peek(retention_class, owner, count)]
        expected = [
            at
            for at, row in enumerate(rows)
            if self.model.evict(row[1:17], row[25:57], int.from_bytes(row[57:65], "little"), row[65], reason)
        ]
        assert [at for at, *_ in self.store.evict(rows, reason)] == expected

    @rule(clean=st.booleans(), index_lost=st.booleans())
    def restart(self, clean: bool, index_lost: bool) -> None:
        self.store.flush()
        before = self.store.stats()["start_mode"]
        self.store.close(clean)
        if index_lost:
            shutil.rmtree(self.directory / "index")
        self.store = self.open()
        mode = self.store.stats()["start_mode"]
        assert mode in (("rebuild",) if index_lost else ("clean",) if clean else ("killed", "rebuild")), (before, mode)
        self.model.restart(index_lost=mode == "rebuild")

    @invariant()
    def both_say_the_same(self) -> None:
        if not hasattr(self, "store"):
            return
        for owner in OWNERS:
            found, busy = discover(self.store, owner, *KEYS)
            expected = {
                (name[1], name[2]): self.model.mask(name) for name, _ in self.model.held if name[0] == owner
            }  # one row for each writing
            assert not busy and {(KEYS[f.key_ordinal], f.write_id): f.shard_mask for f in found} == expected
        assert self.store.stats()["used_bytes"] == self.model.used_bytes()

    @rule()
    def the_order_is_the_same(self) -> None:
        self.store.flush()
        rows = []
        for retention_class, owner, count, _ in self.store.queues():
            queue = [row for _, row, _ in self.store.peek(retention_class, owner, 10_000)]
            assert len(queue) == count
            for row in queue:
                bucket, start = int.from_bytes(row[17:21], "big"), 2**32 - 1 - int.from_bytes(row[21:25], "big")
                rows.append((row[0], row[1:17], bucket, -start, row[25:57], row[57:65], row[65]))
        assert rows == self.model.order()

    @rule()
    def the_ghosts_are_the_same(self) -> None:
        for owner in OWNERS:
            assert reasons(self.store, owner, keys_of(*KEYS)) == [self.model.ghosts.get((owner, key), 0) for key in KEYS]


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(
    max_examples=2000 if FULL else 60, stateful_step_count=100, deadline=None, print_blob=True
)  # 10^4 operations in CI
TestStoreAgainstModel = pytest.mark.timeout(400)(
    TestStoreAgainstModel
)  # each of the examples opens and closes stores, whose threads give way
