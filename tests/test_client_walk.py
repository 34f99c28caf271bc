"""The walk finds the longest prefix that any choice of extents covers, and names every block once; the native one is the same."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.native import PIECE
from kvstore.kernels import _native
from kvstore.kernels.walk_reference import Candidate, cover

extents = st.lists(st.tuples(st.integers(0, 24), st.integers(1, 8)), max_size=14).map(
    lambda drawn: [Candidate(start, start + length, row) for row, (start, length) in enumerate(drawn)]
)


def longest_by_exhaustive_search(candidates: list[Candidate]) -> int:
    """Tries every order of extents: from each reach, every extent that can be read there."""

    @cache
    def from_reach(reach: int) -> int:
        return max([reach, *(from_reach(c.end) for c in candidates if c.start <= reach < c.end)])

    return from_reach(0)


@given(extents)
def test_no_choice_of_extents_reaches_further(candidates: list[Candidate]) -> None:
    pieces = cover(candidates)
    assert (pieces[-1].end if pieces else 0) == longest_by_exhaustive_search(candidates)


@given(extents)
def test_pieces_follow_each_other_inside_their_extents(candidates: list[Candidate]) -> None:
    reach = 0
    for piece in cover(candidates):
        assert piece.start == reach < piece.end == piece.candidate.end
        assert piece.candidate.start <= piece.start and piece.candidate in candidates
        reach = piece.end


@given(extents)
def test_no_piece_could_be_left_out(candidates: list[Candidate]) -> None:
    pieces = cover(candidates)
    for i in range(1, len(pieces)):
        assert pieces[i].candidate.start > (pieces[i - 2].end if i > 1 else 0), "the one before it was not needed"


def test_an_extent_that_starts_earlier_may_reach_further() -> None:
    candidates = [Candidate(0, 4, 0), Candidate(4, 6, 1), Candidate(3, 9, 2)]
    assert [piece.candidate.row for piece in cover(candidates)] == [0, 2]


def test_nothing_that_starts_at_zero_is_no_prefix() -> None:
    assert cover([Candidate(1, 9, 0)]) == [] and cover([]) == []


@given(extents)
def test_the_native_walk_takes_the_same_pieces(candidates: list[Candidate]) -> None:
    found = _native.cover(np.array(candidates, np.uint32).reshape(-1, 3)).view(PIECE)
    wanted = [(p.start, p.end, p.candidate.start, p.candidate.row) for p in cover(candidates)]
    assert found.tolist() == wanted
