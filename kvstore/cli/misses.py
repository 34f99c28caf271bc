"""The reasons of misses (docs/ACCESS_LOG.md) as `kvstore explain REASON` tells them: what it means, why it comes, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MissReason:
    meaning: str
    causes: tuple[str, ...]
    fix: str
    commands: tuple[str, ...] = ()


MISSES: Final = {
    "unknown": MissReason(
        "the block was never stored, or so long ago that no node remembers (14 days)",
        ("the text is new: no cache has it", "two prompts that look alike differ early", "stores are dropped or declined"),
        "see what an infinite cache would hit of this traffic; where that is far more, compare two prompts that should share",
        ("kvstore plan DIR-OF-THE-LOG", "kvstore explain A.json B.json"),
    ),
    "expired": MissReason(
        "the block was stored, and dropped because the time of its retention class had passed",
        ("it is asked for again later than its class keeps it",),
        "store it under a class that keeps longer, or raise the class's keep in the map, where a longer time is worth it",
        ("kvstore report DIR",),
    ),
    "evicted": MissReason(
        "the block was stored, and dropped for room before its time",
        ("more is written than the disks hold for that long", "floors of other owners leave it little room"),
        "add space, write less under that class, or try another policy",
        ("kvstore status", "kvstore plan DIR-OF-THE-LOG --policy all"),
    ),
    "lost_shards": MissReason(
        "the block is stored, but fewer of its shards can be had than are needed to read it",
        ("more nodes are down than the code can spare", "shards are damaged"),
        "bring nodes back",
        ("kvstore status", "kvstore explain KEY"),
    ),
    "fidelity": MissReason(
        "the block is stored as an approximation that the request does not accept",
        ("an exact request behind one that stored an approximation",),
        "accept it where that is right (lookup's `accept`), or store exact blocks",
    ),
    "window": MissReason(
        "the block hits, but the window entry where the hit ends is missing, so one block is computed again",
        (
            "it was last used more than three minutes ago: window entries are kept for a shorter time than blocks",
            "the host that made it restarted, or no window directory tells this one where it is",
        ),
        "nothing, as a rule; where it is much, keep window entries longer, and name directories in the cluster map (docs/WINDOWS.md)",
        ("kvstore plan DIR-OF-THE-LOG", "kvstore status"),
    ),
    "tail": MissReason(
        "the token cannot hit by rule: it is in the last, partial block, or the engine must compute it anyway",
        ("blocks have 128 tokens; prompts end anywhere",),
        "nothing: it is a matter of short prompts",
    ),
    "deadline": MissReason(
        "whether the block is there was not told before the lookup's deadline",
        ("slow or overloaded nodes", "a deadline that is too short for this network"),
        "see which nodes are slow; or give lookups more time (ClientConfig.lookup_deadline_seconds)",
        ("kvstore status --nodes", "kvstore top"),
    ),
}
