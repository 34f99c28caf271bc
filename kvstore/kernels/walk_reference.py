"""Which extents to read: interval cover over what discovery found.

Chains cross writers, extents overlap, and any block range inside an extent can be read. So the longest prefix is found by reach: of all
extents that start at or before it, the one whose match ends furthest moves it on. (Taking the longest extent that starts exactly where the
last one ended is wrong: one that starts a little earlier may reach further. tests/test_client_walk.py compares with exhaustive search.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Candidate(NamedTuple):
    """One writing of one extent whose blocks [start, end) equal the caller's. `row` is the caller's own reference to it."""

    start: int
    end: int
    row: int


class Piece(NamedTuple):
    """Blocks [start, end) of the chain are read from this candidate."""

    start: int
    end: int
    candidate: Candidate


def cover(candidates: Iterable[Candidate]) -> list[Piece]:
    """The pieces of the longest prefix that the candidates cover, in order, as few as possible."""
    ordered = sorted(candidates)
    pieces: list[Piece] = []
    reach, at, best = 0, 0, Candidate(0, 0, -1)
    while True:
        while at < len(ordered) and ordered[at].start <= reach:
            if ordered[at].end >= best.end:  # among equals the latest start: fewer blocks of it go unread
                best = ordered[at]
            at += 1
        if best.end <= reach:
            return pieces
        pieces.append(Piece(reach, best.end, best))
        reach = best.end
