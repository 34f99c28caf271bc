"""The engine's side of the cache: what is there of a prompt, its bytes plane by plane, and where to put what was computed.

Everything here may be slow or fail, and runs on the engine's I/O threads. A fault is a miss: it is counted, and the request is computed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.client.agent.agent import Window
from kvstore.client.agent.request import RequestWindows
from kvstore.client.load import Load
from kvstore.client.ticket import Ticket
from kvstore.client.values import Fidelity, LoadOutcome, StoreOutcome, StoreResult
from kvstore.engine_integration.engine.host import HostCache
from kvstore.engine_integration.engine.landing import Landing
from kvstore.engine_integration.engine.options import EngineConfig
from kvstore.engine_integration.engine.resuming import Mode, depths_of, plan
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.pages import sections_of
from kvstore.engine_integration.model.resume import Resume, hit_tokens_max
from kvstore.engine_integration.model.state import Bytes
from kvstore.errors import KvstoreError
from kvstore.keys import Keys


@dataclass(frozen=True, slots=True)
class Found:
    """From where a request goes on. `rows`: blocks that were loaded already (an earlier load fell short of its ticket)."""

    resume: Resume
    ticket: Ticket | None = None
    depths: list[int] = field(default_factory=list)
    window: Window | None = None
    rows: Bytes | None = None

    @property
    def blocks_found(self) -> int:
        """Those that need not be stored again."""
        return len(self.rows) if self.rows is not None else self.ticket.hit_blocks if self.ticket is not None else 0


class Cache:
    """Of one engine. Safe to share between its threads."""

    def __init__(self, model: Model, host: HostCache | None, config: EngineConfig, landing: Landing) -> None:
        self.model, self.host, self.config, self.landing = model, host, config, landing
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.planes = model.layout.planes(host.client.map.k) if host is not None else ()
        # A source's rows have come with the plane in which its last section ends.
        ends = {section.source: section.offset_bytes + section.bytes for section in sections_of(model.config, model.codec)}
        spans = [(plane.offset_bytes, plane.offset_bytes + plane.bytes) for plane in self.planes]
        self._sources_of = [[source for source, end in ends.items() if low < end <= high] for low, high in spans]

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self.counts[name] += by

    def look(self, keys: Keys, prompt_tokens: int, mode: Mode, retention_class: str) -> Found:
        """What is there of a prompt, and from where to go on. Never raises."""
        config = self.model.config
        if self.host is None or mode.resume == "off":
            return Found(plan(config, prompt_tokens, 0, (), mode, 0))
        try:
            ticket = self.host.lookup(
                keys, input_tokens=prompt_tokens, accept=mode.accept, retention_class=retention_class,
                deadline_seconds=self.config.lookup_deadline_seconds,
            )  # fmt: skip
        except KvstoreError:
            self.count("lookup_errors")
            return Found(plan(config, prompt_tokens, 0, (), mode, 0))
        return self._with_window(keys, prompt_tokens, mode, Found(plan(config, prompt_tokens, 0, (), mode, 0), ticket, depths_of(ticket)))

    def look_again(self, keys: Keys, prompt_tokens: int, mode: Mode, found: Found, rows: Bytes) -> Found:
        """After a load that gave only `rows`: from there."""
        return self._with_window(keys, prompt_tokens, mode, Found(found.resume, found.ticket, found.depths[: len(rows)], None, rows))

    def _with_window(self, keys: Keys, prompt_tokens: int, mode: Mode, found: Found) -> Found:
        """The plan for what was found, its window entry fetched; a plan without that entry where it cannot be had after all."""
        assert self.host is not None
        config = self.model.config
        end = min(found.blocks_found * config.block, hit_tokens_max(config, prompt_tokens))
        depth = max(found.depths[: end // config.block], default=0)
        candidates: set[int] = set()
        if end:
            try:
                candidates = self.host.windows_at(keys, end, found.ticket, mode.accept)
            except KvstoreError:
                self.count("window_errors")
        while True:
            resume = plan(config, prompt_tokens, found.blocks_found, candidates, mode, depth)
            if not resume.entry:
                return Found(resume, found.ticket, found.depths, None, found.rows)
            window = None
            try:
                window = self.host.window(keys, resume.start_tokens, found.ticket, mode.accept)
            except KvstoreError:
                self.count("window_errors")
            if window is not None:
                return Found(resume, found.ticket, found.depths, window, found.rows)
            self.count("windows_gone")
            candidates = candidates - {resume.start_tokens}

    def load(self, found: Found, began: Callable[[Load], None], arrived: Callable[[int, Bytes], None]) -> tuple[LoadOutcome, Bytes]:
        """Loads the blocks of a plan, plane after plane; `arrived(source, blocks)` is called as soon as a source's rows have come for all
        of them. How it ended, and the blocks that are whole: as many as planned, or fewer. Never raises."""
        assert self.host is not None and found.ticket is not None
        wanted = found.resume.blocks_end_tokens // self.model.config.block
        rows = self.landing.rows(wanted, self.model.layout.block_bytes)
        try:
            outcome, blocks = self._load_into(rows, found, began, arrived)
        finally:
            kept = self.landing.give(rows)
        return outcome, kept[:blocks]

    def _load_into(
        self, rows: Bytes, found: Found, began: Callable[[Load], None], arrived: Callable[[int, Bytes], None]
    ) -> tuple[LoadOutcome, int]:
        assert self.host is not None and found.ticket is not None
        wanted = len(rows)
        loads: list[Load] = []
        missing = set(range(len(self.model.config.sources)))

        def begin(load: Load) -> None:
            loads.append(load)
            began(load)

        try:
            for ready in self.host.planes_with(
                begin, found.ticket, rows, deadline_seconds=self.config.load_deadline_seconds, blocks=range(wanted)
            ):
                # Fewer: what was computed so far rests on blocks that do not come. The load goes on for those that do: the next plan's hit.
                for source in self._sources_of[ready.plane] if ready.blocks == wanted else ():
                    arrived(source, rows)
                    missing.discard(source)
            if not loads:
                return LoadOutcome.EXPIRED, 0
            result = loads[0].finish()
            if result.blocks >= wanted:  # all of it came after all
                for source in sorted(missing):
                    arrived(source, rows)
        except KvstoreError:
            self.count("load_errors")
            return LoadOutcome.UNREACHABLE, 0
        return result.outcome, result.blocks

    def store(self, keys: Keys, blocks: Bytes, first_block: int, retention_class: str, fidelity: Fidelity) -> bool:
        """In the background. False: it was not even begun."""
        if self.host is None:
            return False
        try:
            future = self.host.store(keys, blocks, first_block=first_block, retention_class=retention_class, fidelity=fidelity)
        except KvstoreError:
            self.count("store_errors")
            return False
        future.add_done_callback(lambda done: self._stored(done.result()))
        return True

    def _stored(self, result: StoreResult) -> None:
        self.count("blocks_stored", result.blocks)
        if not result.outcome.readable and result.outcome is not StoreOutcome.DECLINED:
            self.count("store_failures")

    def request(self, prompt_tokens: int, missed_tokens: int) -> RequestWindows | None:
        """The keep rules of a request; `missed_tokens`: where its hit ended without an entry."""
        return self.host.request(prompt_tokens, missed_tokens) if self.host is not None else None

    def keep_window(self, windows: RequestWindows, keys: Keys, tokens: int, entry: bytes, fidelity: Fidelity) -> None:
        try:
            self.count("windows_kept", windows.keep(keys, tokens, entry, fidelity=fidelity))
        except KvstoreError:
            self.count("window_errors")
