"""Plain reference of the walk in kernels/walk.hpp, which says why it is so. The oracle of its tests."""

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
