"""Whom to ask about which key: few nodes, each about many keys. A key is asked at one node of its list, and elsewhere when in doubt.

A key has a list of nodes in each live epoch of the map; a node of all lists is preferred, for it knows whichever epoch a writer used.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.native import DOWN, HEALTHY, I32, LATE, U8, U32
from kvstore.placement import Placement

KEYS_PER_NODE: Final = 256  # about 50 us of a daemon's time: more nodes would cost more in messages than they save
_GREEDY_ROUNDS: Final = 8
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
        newest = placements[max(placements)]
        self._views: list[_Rows] = [newest.table()[newest.pg_of(keys)]]
        self._views += [p.table()[p.pg_of(keys)] for epoch, p in placements.items() if p is not newest]
        self._health = health
        self._asked: dict[int, set[int]] = {}  # key: nodes, where not the first round's
        self._first: I32 = np.full(len(keys), -1, np.int32)

    def first(self) -> tuple[I32, I32]:
        """(key indices, nodes) of the first round: each key once in each epoch that no common node speaks for."""
        rows = self._views[0]
        if len(self._views) > 1:
            return self._first_of_epochs()
        self._first = self._choose(rows)
        return np.arange(len(rows), dtype=np.int32), self._first

    def elsewhere(self, indices: I32, times: int) -> tuple[I32, I32]:
        """(key indices, nodes): each of these keys at up to `times` nodes not asked yet, the same nodes for as many as possible."""
        keys: list[int] = []
        nodes: list[int] = []
        tally: dict[int, int] = {}
        for index in indices.tolist():
            asked = self._asked.setdefault(index, set())
            if self._first[index] >= 0:
                asked.add(int(self._first[index]))
            for view in self._views:
                left = [n for n in dict.fromkeys(view[index].tolist()) if n not in asked and self._health[n] != DOWN]
                left.sort(key=lambda n: (self._health[n], -tally.get(n, 0)))
                for node in left[:times]:
                    asked.add(node)
                    tally[node] = tally.get(node, 0) + 1
                    keys.append(index)
                    nodes.append(node)
        return np.array(keys, np.int32), np.array(nodes, np.int32)

    def avoid(self, late: U32) -> None:
        """Later choices take these last."""
        self._health = self._health.copy()
        self._health[late] = np.maximum(self._health[late], LATE)

    def _choose(self, rows: _Rows) -> I32:
        """One node of each row, few in all, none of them with much more than KEYS_PER_NODE."""
        chosen: I32 = np.full(len(rows), -1, np.int32)
        open_rows = np.arange(len(rows))
        usable = self._health == HEALTHY
        if not usable.any():
            usable = self._health != DOWN
        shift = random.getrandbits(30)
        rounds = 0
        while len(open_rows) and rounds < _GREEDY_ROUNDS:
            counts = np.bincount(rows[open_rows].ravel(), minlength=len(usable)) * usable
            # The fullest node first; equals in a different order each time, so that lookups spread over the nodes.
            node = int((counts * len(usable) + (np.arange(len(usable)) + shift) % len(usable)).argmax())
            if counts[node] < KEYS_PER_NODE / 8 and rounds:
                break
            mine = (rows[open_rows] == node).any(axis=1)
            take = open_rows[mine][:KEYS_PER_NODE]
            chosen[take] = node
            open_rows = np.flatnonzero(chosen < 0)
            usable[node] = False
            rounds += 1
            if not usable.any():
                usable = self._health != DOWN
        if len(open_rows):
            counts = np.bincount(rows[open_rows].ravel(), minlength=len(usable))
            counts += rounds * np.bincount(chosen[chosen >= 0], minlength=len(usable))
            weight = np.where(self._health == HEALTHY, counts + 1, 0)[rows[open_rows]]
            chosen[open_rows] = rows[open_rows, weight.argmax(axis=1)]
        return chosen

    def _first_of_epochs(self) -> tuple[I32, I32]:
        keys: list[int] = []
        nodes: list[int] = []
        tally: dict[int, int] = {}
        for index in range(len(self._first)):
            lists = [view[index].tolist() for view in self._views]
            missing = [set(one) for one in lists]
            asked = self._asked.setdefault(index, set())
            while missing:
                left = sorted(
                    {n for one in missing for n in one},
                    key=lambda n: (self._health[n], -sum(n in one for one in missing), -tally.get(n, 0)),
                )
                node = left[0]
                asked.add(node)
                tally[node] = tally.get(node, 0) + 1
                keys.append(index)
                nodes.append(node)
                missing = [one for one in missing if node not in one]
        return np.array(keys, np.int32), np.array(nodes, np.int32)
