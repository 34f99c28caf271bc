"""Plain reference of kernels/plan_curve.cpp and plan_policy.cpp: the same rules with dicts and lists, slow and easy to read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

Prompts = Sequence[Sequence[int]]


def reuse_depths(prompts: Prompts) -> list[int | None]:
    """For each access the number of distinct blocks since its last touch, itself included; None for the first."""
    order: list[int] = []  # the most recent last
    depths: list[int | None] = []
    for prompt in prompts:
        for one in prompt:
            if one in order:
                depths.append(len(order) - order.index(one))
                order.remove(one)
            else:
                depths.append(None)
            order.append(one)
    return depths


class Cache(Protocol):
    def has(self, one: int) -> bool: ...
    def touch(self, one: int) -> None: ...
    def insert(self, one: int) -> None: ...


class Lru:
    """The least recently touched goes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: OrderedDict[int, None] = OrderedDict()

    def has(self, one: int) -> bool:
        return one in self.order

    def touch(self, one: int) -> None:
        self.order.move_to_end(one)

    def insert(self, one: int) -> None:
        if len(self.order) == self.capacity:
            self.order.popitem(last=False)
        self.order[one] = None


class Sieve:
    """A hand goes from the oldest to the newest: takes the first that was not used since it last came by."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: list[int] = []  # the newest last
        self.visited: set[int] = set()
        self.hand: int | None = None  # an id

    def has(self, one: int) -> bool:
        return one in self.queue

    def touch(self, one: int) -> None:
        self.visited.add(one)

    def insert(self, one: int) -> None:
        if len(self.queue) == self.capacity:
            at = 0 if self.hand is None else self.queue.index(self.hand)
            while self.queue[at] in self.visited:
                self.visited.remove(self.queue[at])
                at = (at + 1) % len(self.queue)
            self.hand = self.queue[at + 1] if at + 1 < len(self.queue) else None
            del self.queue[at]
        self.queue.append(one)


class S3Fifo:
    """Small queue (a tenth), main queue, ghost. Used twice in small: to main. Used in main: once more round."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small_capacity = max(1, capacity // 10)
        self.small: list[int] = []
        self.main: list[int] = []
        self.uses: dict[int, int] = {}
        self.ghosts: list[int | None] = []  # in order of eviction; None: came back
        self.ghost_capacity = capacity - self.small_capacity

    def has(self, one: int) -> bool:
        return one in self.uses

    def touch(self, one: int) -> None:
        self.uses[one] = min(3, self.uses[one] + 1)

    def insert(self, one: int) -> None:
        while len(self.uses) >= self.capacity:
            self._evict()
        remembered = self.ghosts[-self.ghost_capacity :] if self.ghost_capacity else []
        (self.main if one in remembered else self.small).append(one)
        self.ghosts = [None if ghost == one else ghost for ghost in self.ghosts]
        self.uses[one] = 0

    def _evict(self) -> None:
        if len(self.small) >= self.small_capacity or not self.main:
            while self.small:
                one = self.small.pop(0)
                if self.uses[one] < 2 or self.small_capacity == self.capacity:
                    del self.uses[one]
                    self.ghosts.append(one)
                    return
                self.uses[one] = 0
                self.main.append(one)
        while True:
            one = self.main.pop(0)
            if not self.uses[one]:
                del self.uses[one]
                return
            self.uses[one] -= 1
            self.main.append(one)


class Admission(Protocol):
    def begin(self, now_ms: int) -> None: ...
    def admits(self, one: int) -> bool: ...
    def refused(self, one: int) -> None: ...


class Always:
    def begin(self, now_ms: int) -> None: ...
    def admits(self, one: int) -> bool:
        return True

    def refused(self, one: int) -> None: ...


class SecondTouch:
    """A block is written when it was refused among the last `memory` notes."""

    def __init__(self, memory: float) -> None:
        self.memory = int(memory)
        self.notes: list[int] = []

    def begin(self, now_ms: int) -> None: ...

    def admits(self, one: int) -> bool:
        return self.memory > 0 and one in self.notes[-self.memory :]

    def refused(self, one: int) -> None:
        if not self.admits(one):
            self.notes.append(one)


class WriteBudget:
    """So many blocks a day, saved up for an hour at most."""

    def __init__(self, blocks_a_day: float) -> None:
        self.per_ms, self.most = blocks_a_day / 86_400_000, max(1.0, blocks_a_day / 24)
        self.left, self.then = self.most, 0

    def begin(self, now_ms: int) -> None:
        self.left = min(self.most, self.left + self.per_ms * (now_ms - min(now_ms, self.then)))
        self.then = now_ms

    def admits(self, one: int) -> bool:
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def refused(self, one: int) -> None: ...


EVICTIONS: dict[str, Callable[[int], Cache]] = {"lru": Lru, "sieve": Sieve, "s3fifo": S3Fifo}


def admission_of(name: str, limit: float) -> Admission:
    return SecondTouch(limit) if name == "second-touch" else WriteBudget(limit) if name == "write-budget" else Always()


def simulate(
    eviction: str, admission: str, prompts: Prompts, times_ms: Sequence[int], capacity: int, tail_first: bool, limit: float
) -> list[tuple[int, int, int]]:
    """(leading hits, blocks written, blocks there when touched) of each request."""
    cache = EVICTIONS[eviction](capacity)
    rule = admission_of(admission, limit)
    return [_request(cache, rule, prompt, now_ms, tail_first) for prompt, now_ms in zip(prompts, times_ms, strict=True)]


def _request(cache: Cache, rule: Admission, prompt: Sequence[int], now_ms: int, tail_first: bool) -> tuple[int, int, int]:
    hits = _leading(prompt, cache.has)
    rule.begin(now_ms)
    admitted = hits
    while admitted < len(prompt) and (cache.has(prompt[admitted]) or rule.admits(prompt[admitted])):
        admitted += 1
    for one in prompt[admitted:]:
        if not cache.has(one):
            rule.refused(one)
    front, rest = list(prompt[:hits]), list(prompt[hits:admitted])
    written = held = 0
    for one in [*reversed(front), *reversed(rest)] if tail_first else [*front, *rest]:
        if cache.has(one):
            cache.touch(one)
            held += 1
        else:
            cache.insert(one)
            written += 1
    if tail_first and isinstance(cache, Lru):
        for one in reversed(front):
            if cache.has(one):
                cache.touch(one)
    return hits, written, held


def _leading(prompt: Sequence[int], has: Callable[[int], bool]) -> int:
    for at, one in enumerate(prompt):
        if not has(one):
            return at
    return len(prompt)
