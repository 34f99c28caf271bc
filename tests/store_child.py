"""A process that owns a store, for tests that kill it. Modes: `write DIR SEED` puts and evicts until killed and says each acknowledged
record on stdout; `check DIR NUMBERS...` says for each number whether it reads back right (1), is gone (0) or is wrong (2)."""

from __future__ import annotations

import json
import os
import random
import sys
import threading

from store_tools import OK, OWNER, Store, read, record_of, withdraw

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


def check(directory: str, numbers: list[int]) -> None:
    store = Store(directory, segment_bytes=SEGMENT_BYTES)
    started = store.wait_started(30)
    answers = []
    for number in numbers:
        r = record_of(number)
        status, raw = read(store, r)
        answers.append(0 if status != OK else 1 if raw == build(r) else 2)
    problems = store.check_integrity(deep=False)
    print(json.dumps({"started": started, "answers": answers, "problems": problems, "stats": store.stats()}), flush=True)
    store.close()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], int(sys.argv[3]))
    else:
        check(sys.argv[2], [int(n) for n in sys.argv[3].split(",")])
