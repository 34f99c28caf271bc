"""Shadow audit: of every Nth answer that rests on a bounded replay, the exact run, in the background, and how far the two are apart.

The engine asks `begin` when such a request starts to answer, gives the recording each token with the logits it was chosen from, and hands
it back at the end. One thread then computes prompt and answer again with no cache, teacher-forced on what was answered, and compares:
KL(exact || approximate) of each token, and whether the most likely token is another. docs/REPLAY_ERROR.md says what to expect.

Bounds: of an answer the first `tokens_max` rows are kept, of recordings `waiting_max`, the next is dropped; prompts over
`prompt_tokens_max` are not audited. The thread has the lowest priority and computes at most `share` of the time, a block at once.
An audit of a prompt that was 96% cached computes 25 times what the request did: choose N with that in mind.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

from kvstore.engine_integration.model.model import Model
from kvstore.metrics import REPLAY_DEPTHS, REPLAY_ERROR_BOUNDS_NATS, Histogram, Values

LOWEST_PRIORITY: Final = 19
CLOSE_SECONDS: Final = 10.0
Result = Literal["done", "dropped", "long", "failed"]


@dataclass(slots=True)
class Recording:
    """An answer as it is given: its tokens, and what each was chosen from. Belongs to one thread at a time."""

    prompt: list[int]
    depth: int  # bounded replays behind it, at least 1
    tokens_max: int
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # (vocabulary,) each

    def add(self, token: int, logits: Tensor) -> None:
        """The next token; nothing is kept of those past `tokens_max`."""
        if len(self.tokens) < self.tokens_max:
            self.tokens.append(token)
            self.logits.append(logits.clone())


class ShadowAudit:
    """Safe on many threads. Never raises into the engine: an audit that fails is counted."""

    def __init__(
        self,
        model: Model,
        every: int,
        *,
        share: float = 0.1,
        waiting_max: int = 4,
        tokens_max: int = 128,
        prompt_tokens_max: int = 16_384,
    ) -> None:
        """`every`: N of "1 of N"; 0: none. `share`: most of the time that its thread computes, above 0, at most 1."""
        self.model, self.every, self.share = model, every, share
        self.waiting_max, self.tokens_max, self.prompt_tokens_max = waiting_max, tokens_max, prompt_tokens_max
        self._changed = threading.Condition()
        self._waiting: deque[Recording] = deque()
        self._busy = self._closing = False
        self._thread: threading.Thread | None = None
        self._seen = 0
        self._results: Counter[Result] = Counter()
        self._tokens: Counter[str] = Counter()
        self._nats = {depth: Histogram(REPLAY_ERROR_BOUNDS_NATS) for depth in REPLAY_DEPTHS}

    # --- the engine's side ---

    def begin(self, prompt: list[int], depth: int) -> Recording | None:
        """For a request whose answer rests on `depth` bounded replays: a recording where it is the Nth."""
        if not self.every or depth < 1:
            return None
        with self._changed:
            self._seen += 1
            if (self._seen - 1) % self.every:
                return None
            if len(prompt) > self.prompt_tokens_max:
                self._results["long"] += 1
                return None
        return Recording(list(prompt), depth, self.tokens_max)

    def submit(self, recording: Recording) -> None:
        """The answer has ended, whole or cut short."""
        if not recording.tokens:
            return
        with self._changed:
            if self._closing or len(self._waiting) >= self.waiting_max:
                self._results["dropped"] += 1
                return
            self._waiting.append(recording)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-shadow-audit", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    # --- what it found ---

    def read(self, values: Values) -> None:
        """The AUDIT table of kvstore/metrics.py."""
        with self._changed:
            for result, count in self._results.items():
                values.set("kvstore_replay_audits_total", count, result)
            for top, count in self._tokens.items():
                values.set("kvstore_replay_audited_tokens_total", count, top)
            for depth, histogram in self._nats.items():
                values.histogram("kvstore_replay_error_nats", list(histogram.counts), histogram.total, depth)

    def wait(self, timeout_seconds: float) -> bool:
        """Until nothing waits and nothing is computed. False: not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_seconds)

    def close(self) -> None:
        """What waits is dropped; what is being computed ends with its block."""
        with self._changed:
            self._closing = True
            self._results["dropped"] += len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    # --- the thread ---

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a courtesy: the share holds without it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                recording = self._waiting.popleft()
                self._busy = True
            result: Result = "failed"
            try:
                result = self._audit(recording)
            except Exception:  # of a shadow's fault no request may know; the counter does
                pass
            finally:
                with self._changed:
                    self._results[result] += 1
                    self._busy = False
                    self._changed.notify_all()

    def _audit(self, recording: Recording) -> Result:
        exact = self._exact(recording)
        if exact is None:
            return "dropped"
        told = torch.stack(recording.logits)
        nats = divergence(exact, told).tolist()
        same = int((exact.argmax(-1) == told.argmax(-1)).sum())
        with self._changed:
            histogram = self._nats[REPLAY_DEPTHS[min(recording.depth, len(REPLAY_DEPTHS)) - 1]]
            for value in nats:
                histogram.observe(value)
            self._tokens["same"] += same
            self._tokens["changed"] += len(nats) - same
        return "done"

    def _exact(self, recording: Recording) -> Tensor | None:
        """Logits (tokens, vocabulary) of a run without a cache; None: closed meanwhile."""
        tokens = recording.prompt + recording.tokens[:-1]
        state = self.model.begin(len(recording.prompt))
        rows: list[Tensor] = []
        while state.length < len(tokens):
            began = time.monotonic()
            end = (state.length // self.model.config.block + 1) * self.model.config.block
            rows.append(self.model.feed(state, tokens[state.length : end]))
            if not self._rest((time.monotonic() - began) * (1 / self.share - 1)):
                return None
        return torch.cat(rows)[-len(recording.tokens) :]

    def _rest(self, seconds: float) -> bool:
        """False: closed meanwhile."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._closing, seconds)


def divergence(exact: Tensor, approximate: Tensor) -> Tensor:
    """KL(exact || approximate) in nats, (n,), of logits (n, vocabulary). In float64, so that 1e-12 is real; equal bits give 0."""
    if torch.equal(exact, approximate):
        return torch.zeros(len(exact), dtype=torch.float64)
    p, q = (logits.double().log_softmax(-1) for logits in (exact, approximate))
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
