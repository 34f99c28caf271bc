"""Plain reference of the rule in kernels/asking.cpp, one key at a time. The oracle of its tests."""

from __future__ import annotations

from collections.abc import Sequence


def candidates(lists: Sequence[set[int]], health: Sequence[int]) -> set[int]:
    """Nodes of the lists that nobody speaks for yet, of which the next to be asked is one: of the healthiest those of most lists."""
    nodes = set().union(*lists)
    best = min((health[node], -sum(node in one for one in lists)) for node in nodes)
    return {node for node in nodes if (health[node], -sum(node in one for one in lists)) == best}
