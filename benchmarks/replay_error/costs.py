"""Seconds of each way to resume, and what a window entry in RAM is worth."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from benchmarks.harness import ROOT
from benchmarks.replay_error.probe import begin
from benchmarks.replay_error.study import PASSAGE_BLOCKS, Study
from kvstore.client.agent.frames import PeerConfig
from kvstore.client.agent.peer_server import PeerServer
from kvstore.client.agent.peers import Peers
from kvstore.engine_integration.model.layout import entry_bytes
from kvstore.plan.accesses import Accesses, of_requests
from kvstore.plan.reuse import reuse_of
from kvstore.plan.windows import BOTH, ENTRY_BYTES, capped_hits
from kvstore.replay.trace import open_trace

KEEPS_SECONDS: Final = (10, 30, 60, 180, 600, 3600)
TRUE_LAYERS: Final = 20  # of the original's encoder; W = 128
TRUE_WINDOW: Final = 128


def time_sample(study: Study, number: int) -> None:
    """Processor seconds of one thread from blocks in hand to the first token's logits. A prompt that ends 134 tokens behind its hit."""
    model, config = study.model, study.model.config
    passage = study.passage("code", number)
    size = config.block
    context = (8, 16, PASSAGE_BLOCKS - 4)[number % 3]
    hit = context * size
    prompt = hit + config.slots
    ways: dict[str, tuple[int, bool]] = {"window hit": (hit, True)}
    ways |= {f"older window, {back} back": (hit - back * size, True) for back in (1, 2, 4)}
    ways |= {f"bounded, {windows} windows": (hit - windows * size, False) for windows in (0, 1, 2)}
    ways |= {"exact replay": (hit - config.replay_blocks_tokens, False)}
    if number % 2 == 0:
        ways["cold"] = (0, False)
    for name, (start, entry) in sorted(ways.items(), key=lambda way: way[0], reverse=bool(number % 2)):
        began = time.thread_time()
        state = begin(model, passage if start else None, prompt, hit if start else 0, start, entry=entry)
        model.feed(state, passage.tokens[start:prompt])
        study.seconds.setdefault(f"{name}/{hit}", []).append(round(time.thread_time() - began, 5))
    for entry_size in (entry_bytes(config, model.codec), ENTRY_BYTES):
        study.seconds.setdefault(f"fetch/{entry_size}", []).append(round(fetch_seconds(entry_size), 6))


def fetch_seconds(entry_size: int) -> float:
    """Wall seconds until a window entry of another agent is here, over loopback and a connection that is open; median of nine."""
    entry, key = bytes(entry_size), bytes(32)
    serving = closing(PeerServer("127.0.0.1", 0, windows=lambda owner, asked: entry))
    with serving as server, Peers(config=PeerConfig(silence_seconds=5.0)) as peers:
        taken = []
        for _ in range(10):
            began = time.perf_counter()
            if peers.fetch_window(server.address, key, deadline_seconds=10.0) is None:
                raise RuntimeError(f"a fetch over loopback failed: {peers.stats()}")
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


@dataclass(frozen=True)
class Keep:
    """Window entries of a trace, each kept so long after its last use."""

    seconds: int
    hit_ratio: float  # of the requests that need one
    needing: float  # share of requests that need one
    entry_seconds: float  # an entry in RAM for a second, a request
    older_ratio: float  # of the requests that miss theirs: an older one of the same text is at most ten blocks back


def trace_facts(request_limit: int | None = None) -> dict[str, Any]:
    """Of the agents' trace (weka), or its first requests, under an infinite cache of blocks."""
    trace = open_trace(ROOT / "traces" / "weka_v6_dev.b128.jsonl.zst", request_limit=request_limit)
    accesses = of_requests(trace, 128, has_sessions=True)
    return {"requests": accesses.requests, "keeps": [asdict(one) for one in keeps(accesses, reuse_of(accesses).hit_blocks())]}


def keeps(accesses: Accesses, hits: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Keep]:
    """Plays the trace's entries: left at floor(L/128) and floor((L-134)/128), touched when used."""
    return [_keep(accesses, capped_hits(accesses, hits).tolist(), seconds) for seconds in KEEPS_SECONDS]


def _keep(accesses: Accesses, boundaries: list[int], seconds: int) -> Keep:
    until = np.full(accesses.unique, -1, np.int64)  # ms an entry is kept to
    ids, starts, counts = accesses.ids, accesses.starts.tolist(), accesses.counts.tolist()
    needing = found = older = held_ms = 0
    for r, (now, tokens) in enumerate(zip(accesses.times_ms.tolist(), accesses.input_tokens.tolist(), strict=True)):
        places = {place for back in BOTH if 0 < (place := (tokens - back) // accesses.block_tokens) <= counts[r]}
        if boundaries[r] > 0:
            needing += 1
            behind = ids[starts[r] + max(0, boundaries[r] - 11) : starts[r] + boundaries[r]]
            alive = until[behind] >= now
            found += bool(alive[-1])
            older += bool(not alive[-1] and alive.any())
            if alive[-1]:
                places.add(boundaries[r])
        for place in places:
            key = ids[starts[r] + place - 1]
            held_ms += now + seconds * 1000 - max(now, int(until[key]))
            until[key] = now + seconds * 1000
    missed = max(1, needing - found)
    requests = max(1, len(boundaries))
    return Keep(seconds, found / max(1, needing), needing / requests, held_ms / 1000 / requests, older / missed)


def entry_megabyte_seconds(keep: Keep) -> float:
    """RAM x time a request's entries take, at true sizes."""
    return keep.entry_seconds * ENTRY_BYTES / 1e6
