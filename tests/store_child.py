"""A process that owns a store, for tests that kill it. Modes: `write DIR SEED` puts and evicts until killed and says each acknowledged
record on stdout; `check DIR NUMBERS` says for each number whether it reads back right (1), is gone (0) or wrong (2);
`flip DIR NUMBERS POSITIONS` flips one bit of the index at a time, looks each number up, and says what came of it, until done or dead."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from pathlib import Path

from store_tools import OK, OWNER, Store, discover, promise, read, record_of, withdraw

from kvstore.record import build

SEGMENT_BYTES = 1 << 18


def write(directory: str, seed: int) -> None:
    store = Store(directory, segment_bytes=SEGMENT_BYTES, capacity_bytes=8 << 20)

    def say(word: str, number: int) -> None:
        os.write(1, f"{word} {number}\n".encode())  # one short write to a pipe is never torn

    def put_all(first: int) -> None:
        rng = random.Random(seed + first)
        mine: list[int] = []
        for number in range(seed * 1_000_000 + first, (seed + 1) * 1_000_000, 3):
            status = store.put(build(record_of(number)))
            if status == OK:
                say("put", number)
                mine.append(number)
            elif rows := [row for _, row, _ in store.peek(2, OWNER, 20)]:
                say("evicting", 0)
                store.evict(rows, 2)
            if mine and rng.random() < 0.1:
                gone = mine.pop(rng.randrange(len(mine)))
                say("withdrawing", gone)
                withdraw(store, record_of(gone))

    threads = [threading.Thread(target=put_all, args=(first,), daemon=True) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def look(directory: str, numbers: list[int]) -> dict[str, object]:
    store = Store(directory, segment_bytes=SEGMENT_BYTES)
    records = [record_of(number) for number in numbers]
    answers = []
    for _ in range(2):  # the second time after whatever the first one found
        answers = []
        for r in records:
            status, raw = read(store, r)
            answers.append(0 if status != OK else 1 if raw == build(r) else 2)
        discover(store, OWNER, *(r.extent_key for r in records))
        promise(store, *records, touch=True, bucket=store.bucket_now())
        store.flush()
    store.put(build(record_of(10**6)))
    started = store.wait_started(30)
    problems = store.check_integrity(deep=False)
    if problems:  # looking at everything found it: then it is mended, too
        started = store.wait_started(30)
        problems = store.check_integrity(deep=False)
    stats = store.stats()
    store.close()
    return {"started": started, "answers": answers, "problems": problems, "stats": stats}


def flip(directory: str, numbers: list[int], positions: list[int]) -> None:
    data = Path(directory) / "index" / "data.mdb"
    sound = data.read_bytes()
    state = (Path(directory) / "state").read_bytes()
    for position in positions:
        damaged = bytearray(sound)
        damaged[position // 8 % len(sound)] ^= 1 << (position % 8)
        data.write_bytes(damaged)
        (Path(directory) / "state").write_bytes(state)
        print(json.dumps({"at": position}), flush=True)
        print(json.dumps(look(directory, numbers)), flush=True)


if __name__ == "__main__":
    numbers = [int(n) for n in sys.argv[3].split(",")]
    if sys.argv[1] == "write":
        write(sys.argv[2], numbers[0])
    elif sys.argv[1] == "flip":
        flip(sys.argv[2], numbers, [int(n) for n in sys.argv[4].split(",")])
    else:
        print(json.dumps(look(sys.argv[2], numbers)), flush=True)
