"""What sharing is worth: the same prompts over one shared cache, or over caches of single hosts with random or sticky routing; and what
storing generated tokens adds."""

from __future__ import annotations

import numpy as np

from kvstore.placement import xxh3_64_u64
from kvstore.plan.accesses import I64, Accesses


def random_hosts(accesses: Accesses, hosts: int) -> I64:
    """A host for each request, whatever its prompt: a hash of its number."""
    numbers = np.arange(accesses.requests, dtype=np.uint64)
    return (xxh3_64_u64(numbers, np.zeros(1, np.uint64)) % np.uint64(hosts)).astype(np.int64)


def sticky_hosts(accesses: Accesses, hosts: int) -> I64:
    """A host for each conversation: a hash of its number."""
    numbers = conversations(accesses).astype(np.uint64)
    return (xxh3_64_u64(numbers, np.ones(1, np.uint64)) % np.uint64(hosts)).astype(np.int64)


def local_hits(accesses: Accesses, hosts: I64, count: int) -> tuple[I64, int]:
    """Leading hits of each request in its host's own infinite cache; and blocks stored on all hosts together."""
    there = np.zeros((count, accesses.unique), np.bool_)
    hits = np.zeros(accesses.requests, np.int64)
    for r, (start, blocks, host) in enumerate(zip(accesses.starts.tolist(), accesses.counts.tolist(), hosts.tolist(), strict=True)):
        ids = accesses.ids[start : start + blocks]
        known = there[host, ids]
        hits[r] = blocks if known.all() else int(known.argmin())
        there[host, ids] = True
    return hits, int(there.sum())


def conversations(accesses: Accesses) -> I64:
    """The source's own numbers, or else those that predecessors() gives."""
    if accesses.requests and accesses.sessions[0] >= 0:
        return accesses.sessions
    found = np.arange(accesses.requests)
    for r, before in enumerate(predecessors(accesses).tolist()):
        if before >= 0:
            found[r] = found[before]
    return found


def predecessors(accesses: Accesses) -> I64:
    """For each request the one whose conversation it goes on with, or -1.

    That one's whole blocks are just what is known of this one, and nobody has gone on with it yet: else a prompt of one block, which many
    others begin with, would gather them all into one conversation.
    """
    ended = np.full(accesses.unique, -1, np.int64)  # the last request whose whole blocks end with this one
    known = np.zeros(accesses.unique, np.bool_)
    taken = np.zeros(accesses.requests, np.bool_)
    whole = (accesses.input_tokens // np.uint64(accesses.block_tokens)).astype(np.int64)
    found = np.full(accesses.requests, -1, np.int64)
    for r, (start, blocks) in enumerate(zip(accesses.starts.tolist(), whole.tolist(), strict=True)):
        ids = accesses.ids[start : start + blocks]
        hits = blocks if known[ids].all() else int(known[ids].argmin())
        before = int(ended[ids[hits - 1]]) if hits else -1
        if before >= 0 and not taken[before]:
            found[r] = before
            taken[before] = True
        if blocks:
            ended[ids[-1]] = r
        known[ids] = True
    return found


def decode_gain_blocks(accesses: Accesses, hits: I64) -> I64:
    """Whole blocks that would hit besides if generated tokens were stored, too: at most, as if each answer came back word for word.

    Only where the hit ended at the end of the prompt before, as there the answer begins.
    """
    before = predecessors(accesses)
    some = before >= 0
    block = np.uint64(accesses.block_tokens)
    prompt_end = (accesses.input_tokens[before] // block).astype(np.int64)
    answer_end = ((accesses.input_tokens[before] + accesses.output_tokens[before]) // block).astype(np.int64)
    whole = (accesses.input_tokens // block).astype(np.int64)
    gain = np.clip(np.minimum(answer_end, whole) - hits, 0, None)
    gain[~(some & (hits == prompt_end))] = 0
    return gain
