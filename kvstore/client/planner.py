"""Whom to ask about which key: few nodes, each about many keys. A key is asked at one node of its list, and elsewhere when in doubt.

A key has a list of nodes in each live epoch of the map; a node of all lists is preferred, for it knows whichever epoch a writer used.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.native import I32, U8, U32
from kvstore.kernels import _native
from kvstore.placement import Placement

KEYS_PER_NODE: Final = 256  # as in kernels/asking.cpp
_Rows = npt.NDArray[np.int32]


def by_node(lists: _Rows, nodes: list[int], per_frame: int) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """(node, rows of `lists` (n, any) that it stands in), for each of `nodes`; a new pair where there would be more than `per_frame`."""
    found = []
    for node in nodes:
        mine = np.flatnonzero((lists == node).any(axis=1))
        found += [(node, mine[at : at + per_frame]) for at in range(0, len(mine), per_frame)]
    return found


class Planner:
    """The lists of some keys and what was asked of whom. One lookup's; not shared between threads."""

    def __init__(self, placements: Mapping[int, Placement], keys: U8, health: U8) -> None:
        newest_first = sorted(placements, reverse=True)
        self._position = {epoch: at for at, epoch in enumerate(newest_first)}
        self._asking = _native.Asking([placements[epoch].table() for epoch in newest_first], keys, health, random.getrandbits(30))

    def first(self) -> tuple[I32, I32]:
        """(key indices, nodes) of the first round: each key once in each epoch that no common node speaks for."""
        return self._asking.first()

    def elsewhere(self, indices: I32, times: int) -> tuple[I32, I32]:
        """(key indices, nodes): of each of these keys up to `times` nodes of each epoch's list that were not asked yet, the same nodes for
        as many lists and keys as possible."""
        return self._asking.elsewhere(indices, times)

    def nodes_of(self, indices: U32, epochs: Iterable[int]) -> I32:
        """(n, k+m) ordinals: the list of each of these keys in an epoch, which has a placement."""
        positions = np.fromiter((self._position[epoch] for epoch in epochs), np.uint32, len(indices))
        return self._asking.lists_of(indices, positions).reshape(len(indices), -1)

    def avoid(self, late: U32) -> None:
        """Later choices take these last."""
        self._asking.avoid(late)
