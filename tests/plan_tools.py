"""Traces as arrays, read once a test process, and random small ones whose ids are prefix-chained."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvstore.placement import xxh3_64_u64
from kvstore.plan.accesses import Accesses, of_requests
from kvstore.replay.requests import Request, runs_of
from kvstore.replay.trace import open_trace

TRACES = Path(__file__).parent.parent / "traces"
CONVERSATION = TRACES / "mooncake_conversation_trace.jsonl.gz"
WEKA = TRACES / "weka_v6_dev.b128.jsonl.zst"


@lru_cache(maxsize=2)
def conversation(block_tokens: int = 512) -> Accesses:
    return of_requests(open_trace(CONVERSATION, block_tokens=block_tokens), block_tokens)


@lru_cache(maxsize=2)
def weka(variant: Literal["plain", "busy1h"] = "plain") -> Accesses:
    return of_requests(open_trace(WEKA, variant=variant), 128, has_sessions=True)


def random_prompts(rng: random.Random) -> list[list[int]]:
    """Prompts that branch off earlier ones at random places; an id names its whole prefix."""
    prompts: list[list[int]] = [[]]
    following = 0
    for _ in range(rng.randint(1, 40)):
        base = rng.choice(prompts)
        fresh = rng.randint(0, 6)
        prompts.append(base[: rng.randint(0, len(base))] + list(range(following, following + fresh)))
        following += fresh
    return prompts[1:]


def accesses_of(prompts: list[list[int]], times_ms: list[int] | None = None, block_tokens: int = 128) -> Accesses:
    times = times_ms or list(range(len(prompts)))
    requests = [Request(ms, len(ids) * block_tokens + 5, 0, runs_of(ids) if ids else ()) for ids, ms in zip(prompts, times, strict=True)]
    return of_requests(requests, block_tokens)


def dense(prompts: list[list[int]], accesses: Accesses) -> list[list[int]]:
    """The prompts under the ids that the arrays gave them."""
    place = {int(one): at for at, one in enumerate(accesses.fingerprints)}
    assert np.array_equal([place[one] for ids in prompts for one in ids], accesses.ids)
    return [[place[one] for one in ids] for ids in prompts]


def write_log(directory: Path, accesses: Accesses, *, sample: float = 1.0, files: int = 3, schema: str = "kvstore.access/1") -> None:
    """As docs/ACCESS_LOG.md says, in several files that are not in order."""
    prints = xxh3_64_u64(accesses.fingerprints, np.full(1, 99, np.uint64))[accesses.ids]  # the salt's work
    rows = np.split(prints, accesses.ends[:-1].astype(np.int64))
    lists = [row[row < sample * 2.0**64] if sample < 1 else row for row in rows]
    head = json.dumps({"schema": schema, "block_tokens": accesses.block_tokens, "sample": sample})
    for number, part in enumerate(np.array_split(np.arange(accesses.requests), files)):
        table = pa.table(
            {
                "time": pa.array(accesses.times_ms[part].astype(np.int64), pa.timestamp("ms", "UTC")),
                "input_tokens": pa.array(accesses.input_tokens[part].astype(np.uint32)),
                "blocks": pa.array([lists[at] for at in part], pa.list_(pa.uint64())),
            }
        ).replace_schema_metadata({"kvstore": head})
        pq.write_table(table, directory / f"access-{files - number}.parquet")
