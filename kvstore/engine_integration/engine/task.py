"""One request while the engine works on it: its tokens, its rows, and what of them was stored. Only the engine's thread changes it.

WAITING   looked up, or being so; holds no room
RUNNING   has room: blocks are loaded and the rest is computed, until every token so far is; then one step after the other
DONE      holds nothing
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from enum import Enum
from typing import Final

import torch
from torch import Tensor

from kvstore.client.agent.request import RequestWindows
from kvstore.client.load import Load
from kvstore.client.values import Fidelity
from kvstore.engine_integration.engine.audit import Recording, ShadowAudit
from kvstore.engine_integration.engine.cache import Cache, Found
from kvstore.engine_integration.engine.giving import Give, Outgoing
from kvstore.engine_integration.engine.request import FinishReason, Request, Response
from kvstore.engine_integration.engine.resuming import Mode, Worth, worth
from kvstore.engine_integration.engine.sampling import choose
from kvstore.engine_integration.model.handover import Buffer, import_handoff
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.pages import Pages
from kvstore.engine_integration.model.resume import Resume, WindowUse
from kvstore.engine_integration.model.speculate import DraftLayer
from kvstore.engine_integration.model.state import RequestState
from kvstore.keys import KeyChain

STORE_PREFILL_BLOCKS: Final = 64  # a whole extent of most layouts


class Phase(Enum):
    WAITING = 1
    RUNNING = 2
    DONE = 3


class Task:
    """See above. `tokens` are prompt and answer so far."""

    def __init__(self, request: Request, model: Model, cache: Cache, mode: Mode, speculate: bool, audit: ShadowAudit) -> None:
        self.request, self.model, self.cache, self.mode, self.audit = request, model, cache, mode, audit
        self.options = request.options
        self.tokens = list(request.prompt)
        self.prompt_tokens = len(request.prompt)
        self.phase = Phase.WAITING
        self.chain = KeyChain(model.namespace, request.options.secret, block_tokens=model.config.block)
        self.found: Found | None = None
        self.state: RequestState | None = None
        self.load: Load | None = None
        self.loading = False  # an I/O thread may write to the state's pages
        self.releasing = False  # as soon as it does not
        self.answering = False  # all tokens but the last are computed; else it is prefilling
        self.steps: Generator[int, None, tuple[Tensor, Tensor]] | None = None
        self.blocked_on: int | None = None  # a source whose rows have not come
        self.drafts = DraftLayer(model, self._choose) if speculate and model.network.draft is not None else None
        self.worth = Worth(0, 0)
        self.stored_blocks = 0  # of the chain, that need not be stored (again)
        self.recording: Recording | None = None  # of the answer, for the shadow audit
        self._stored = 0  # handed over by this request
        self._missed_tokens = 0  # where the hit ended and no window entry was
        self._windows: RequestWindows | None = None
        self._kept_to = 0  # window entries up to here were kept or left out
        self.last_output = torch.zeros(model.config.d)  # the decoder's, of the last computed row
        self._reach = model.config.spare  # how many to guess: one more than were right the last time
        self._outputs: list[Tensor] = []  # the decoder's, of rows the draft layer has not seen
        self.give: Give | None = None  # where to
        self.outgoing: Outgoing | None = None  # on its way there, from the start on
        self.giving = False  # all of it is sent: no step until it is known whether it was taken
        self.called_off = False  # meanwhile: it ends here, unless it was taken
        self.handoff_bytes = self.handoff_early_bytes = 0
        self.taken: Mapping[str, Buffer] | None = None  # all of it, from another process, until it has room here
        self.resume = Resume(WindowUse.NONE, 0, 0, False, 0, False)  # of the start that gave the first token
        self.load_outcome = "none"
        self.queue_seconds = self.lookup_seconds = self.load_seconds = self.prefill_seconds = self.ttft_seconds = 0.0
        self.guessed = self.accepted = self.preemptions = 0

    @property
    def deadline_seconds(self) -> float:
        return self.request.submitted_seconds + (self.options.deadline_seconds or self.cache.config.request_deadline_seconds)

    # --- room ---

    def blocks_to_start(self) -> int:
        """Pages it needs before the first row is computed: those of all its tokens, and of the next one."""
        return len(self.tokens) // self.model.config.block + 1

    def start(self, found: Found, pages: Pages) -> bool:
        """From WAITING to RUNNING. False: there is no room."""
        config = self.model.config
        if pages.free < self.blocks_to_start():
            return False
        self.found = found
        entry = found.window.entry if found.window is not None else None
        state = self.model.begin_early(self.prompt_tokens, found.resume, entry, pages)
        if not state.reserve(self.blocks_to_start()):
            return False
        self.state, self.phase = state, Phase.RUNNING
        self._outputs, self.steps, self.blocked_on, self.answering = [], None, None, False
        fidelity = found.window.fidelity if found.window is not None else Fidelity.EXACT
        now = worth(self.prompt_tokens, found.resume, config.block, found.depths, fidelity)
        self.worth = now if now.depth >= self.worth.depth else self.worth  # the answer rests on what it rested on before it lost its room
        self.stored_blocks = max(self.stored_blocks, found.blocks_found)
        self._kept_to = found.resume.start_tokens
        self._missed_tokens = 0 if found.resume.window is WindowUse.HIT else found.resume.blocks_end_tokens
        self._windows = self.cache.request(self.prompt_tokens, self._missed_tokens)
        if not self.preemptions:
            self.resume = found.resume
        return True

    def start_taken(self, pages: Pages) -> bool:
        """As start, for a request that another process began: nothing is looked up, loaded or computed."""
        if pages.free < self.blocks_to_start():
            return False
        assert self.taken is not None
        handover = import_handoff(self.model, self.taken, pages)
        self.taken = None
        handover.state.reserve(self.blocks_to_start())
        self.state, self.phase, self.answering = handover.state, Phase.RUNNING, True
        assert handover.last_output is not None
        self.last_output = handover.last_output
        if self.drafts is not None:
            handover.give_to(self.drafts)
        self._kept_to = self.state.length
        self._windows = self.cache.request(self.prompt_tokens, 0)
        self.ttft_seconds = time.monotonic() - self.request.submitted_seconds
        self.request.give(self.tokens[self.prompt_tokens :])
        return True

    def release(self) -> None:
        """Gives the room back, as soon as no I/O thread writes to it any more."""
        if self.steps is not None:
            self.steps.close()
            self.steps = None
        if self.loading:
            self.releasing = True
            if self.load is not None:
                self.load.cancel()
        elif self.state is not None:
            self.state.release()
            self.state, self.releasing = None, False

    def forget(self) -> None:
        """The plan it ran by fell short: another is made, and says what the rows are worth. What was said before stays, and its worth."""
        self.stored_blocks = 0
        if not self.preemptions:
            self.worth = Worth(0, 0)

    # --- computing ---

    @property
    def prefilling(self) -> bool:
        return self.phase is Phase.RUNNING and self.state is not None and not self.answering and not self.releasing

    @property
    def blocked(self) -> bool:
        """The next layer's rows have not come."""
        return self.state is not None and self.blocked_on in self.state.missing

    def prefill(self) -> int:
        """Computes up to the end of a block; the rows this took, 0 where rows of the hit have not come. The last piece gives a token."""
        assert self.state is not None
        began = time.monotonic()
        before = self.state.length
        try:
            if self.steps is None:
                end = min(len(self.tokens), (before // self.model.config.block + 1) * self.model.config.block)
                self.steps = self.model.steps(self.state, self.tokens[before:end])
            self.blocked_on = next(self.steps)
            return 0
        except StopIteration as done:
            outputs, logits = done.value
            self.steps = self.blocked_on = None
            if len(outputs):
                self._outputs.append(outputs)
        finally:
            self.prefill_seconds += time.monotonic() - began
        rows = self.state.length - before
        if self.outgoing is not None:
            self.outgoing.put_runs(self.state)
        if self.state.length == self._missed_tokens and self.options.store:
            self._keep_windows()  # the state soon forgets it
        if self.state.length == len(self.tokens):
            self._say([self._choose(logits[-1], len(self.tokens))], torch.cat(self._outputs), logits[-1:])
            self._settle()
        elif self.state.length // self.model.config.block - self.stored_blocks >= STORE_PREFILL_BLOCKS:
            self.store()
        return rows

    def room_for_guesses(self) -> int:
        left = self.options.max_tokens - (len(self.tokens) - self.prompt_tokens) - 1
        return min(self.model.config.spare - 1, left) if self.drafts is not None else 0

    def step(self, guesses_max: int) -> None:
        """Computes the last token, and guesses after it; what the model itself would have said of them stays."""
        assert self.state is not None
        position = self.state.length - 1
        token = self.tokens[-1]
        guesses: list[int] = []
        if self.drafts is not None and guesses_max:
            guesses = self.drafts.guess(position, self.last_output, token, min(guesses_max, self._reach))
        outputs, logits = self.model.run(self.state, [token, *guesses])
        said: list[int] = []
        for row, guess in zip(logits, [*guesses, None], strict=True):
            said.append(self._choose(row, position + 2 + len(said)))
            if said[-1] != guess or said[-1] in self.options.stop_tokens:
                break
        self.state.rollback(1 + len(guesses) - len(said))
        self.guessed += len(guesses)
        self.accepted += len(said) - 1
        self._reach = len(said)
        self._say(said, torch.cat([self.last_output[None], outputs[: len(said)]]), logits)
        self._settle()

    def _say(self, said: list[int], outputs: Tensor, logits: Tensor) -> None:
        """Adds tokens; `outputs` are the decoder's of the rows before each of them, and of rows before those; `logits` they came from."""
        before = len(self.tokens)
        self.tokens += said
        if self.drafts is not None and len(outputs) > 1:
            first = before + len(said) - 1 - len(outputs)  # position of the first row in `outputs`
            self.drafts.observe(first, outputs[:-1], self.tokens[first + 1 : first + len(outputs)])
        if before == self.prompt_tokens:
            self.recording = self.audit.begin(self.request.prompt, self.worth.depth)
        if self.recording is not None:
            for token, row in zip(said, logits, strict=False):
                self.recording.add(token, row)
        self.last_output = outputs[-1]
        self._outputs, self.answering = [], True
        if not self.ttft_seconds:
            self.ttft_seconds = time.monotonic() - self.request.submitted_seconds
        self.request.give(said)

    def _choose(self, logits: Tensor, position: int) -> int:
        return choose(logits, position, self.options)

    @property
    def finished(self) -> FinishReason | None:
        answer = self.tokens[self.prompt_tokens :]
        if answer and answer[-1] in self.options.stop_tokens:
            return "stop"
        return "length" if len(answer) >= self.options.max_tokens else None

    # --- storing ---

    def _settle(self) -> None:
        """After a step: what is whole now goes to the store, and windows are kept, each when its time has come."""
        assert self.state is not None
        if not self.options.store:
            return
        config, length = self.model.config, self.state.length
        answering = length > self.prompt_tokens
        if not answering or length // config.block - self.stored_blocks >= self.cache.config.store_step_blocks:
            self.store()
        self._keep_windows()

    def _keep_windows(self) -> None:
        """Of those that the state has now."""
        assert self.state is not None
        for at, entry in sorted(self.state.entries.items()):
            if self._windows is not None and at > self._kept_to and self._windows.wants(at):
                self._kept_to = at
                self._extend(at)
                self.cache.keep_window(self._windows, self.chain.keys, at, entry, self.worth.fidelity)

    def store(self) -> None:
        """Hands over all whole blocks that the store does not have."""
        if self.state is None or not self.options.store:
            return
        end = self.state.length // self.model.config.block
        if end > self.stored_blocks:
            self._extend(end * self.model.config.block)
            first, self.stored_blocks = self.stored_blocks, end
            blocks = self.state.export_blocks(first, end)
            if self.cache.store(self.chain.keys[:end].copy(), blocks, first, self.options.retention_class, self.worth.fidelity):
                self._stored += end - first

    def _extend(self, tokens: int) -> None:
        if self.chain.token_count < tokens:
            self.chain.extend(self.tokens[self.chain.token_count : tokens])

    # --- the end ---

    def response(self, reason: FinishReason) -> Response:
        return Response(
            tokens=self.tokens[self.prompt_tokens :], finish_reason=reason, prompt_tokens=self.prompt_tokens,
            cached_tokens=self.resume.hit_tokens, window=self.resume.window.value, replayed_tokens=self.resume.replayed_tokens,
            approximate_tokens=self.worth.approximate_tokens, depth=self.worth.depth, ttft_seconds=self.ttft_seconds,
            queue_seconds=self.queue_seconds, lookup_seconds=self.lookup_seconds, load_seconds=self.load_seconds,
            prefill_seconds=self.prefill_seconds, total_seconds=time.monotonic() - self.request.submitted_seconds,
            guessed_tokens=self.guessed, accepted_tokens=self.accepted, load_outcome=self.load_outcome, stored_blocks=self._stored,
            preemptions=self.preemptions, handoff_bytes=self.handoff_bytes, handoff_early_bytes=self.handoff_early_bytes,
        )  # fmt: skip
