"""The engine: `submit` from any thread; one thread computes. docs/ENGINE.md tells the flow.

That thread owns every task. Others (callers, lookups, loads) tell it things through a mailbox of functions, which it runs between two
pieces of work; each piece is at most one block of one prompt, or one step of one answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

import torch

from kvstore.client.agent.handoff import HandoffOutcome
from kvstore.client.client import Client
from kvstore.client.load import Load
from kvstore.client.values import LoadOutcome
from kvstore.engine_integration.engine.audit import ShadowAudit
from kvstore.engine_integration.engine.cache import Cache, Found
from kvstore.engine_integration.engine.giving import Give, Outgoing
from kvstore.engine_integration.engine.handing import offered_bytes, pack, settings_of
from kvstore.engine_integration.engine.host import HostCache, host_of
from kvstore.engine_integration.engine.landing import Landing
from kvstore.engine_integration.engine.options import EngineConfig, RequestOptions
from kvstore.engine_integration.engine.request import FinishReason, Request
from kvstore.engine_integration.engine.resuming import Mode
from kvstore.engine_integration.engine.task import Phase, Task
from kvstore.engine_integration.model.handover import Buffer, tokens_of, told
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.pages import Pages, page_bytes
from kvstore.engine_integration.model.state import Bytes
from kvstore.errors import Closed, MisuseError

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 60.0  # longest sleep of the thread; everything that happens wakes it
CLOSE_SECONDS: Final = 30.0


class Engine:
    """Continuous batching over one model and one cache. Safe to share between threads; not usable in a forked child."""

    def __init__(self, model: Model, cache: Client | HostCache | None, config: EngineConfig | None = None) -> None:
        """`cache`: a Client of the model's layout, whose window entries this engine keeps itself; or an Agent (of `agent_config`) or a
        WorkerAgent around one, which several engines may share. None: nothing is looked up or stored.

        Raises MisuseError E596 for a cache of another layout, size of block or of window."""
        self.model = model
        self.config = config = config or EngineConfig()
        self._own_agent = host_of(cache, model.config) if isinstance(cache, Client) else None
        host: HostCache | None = self._own_agent or (cache if not isinstance(cache, Client) else None)
        if host is not None and (host.client.layout != model.layout or host.client.config.block_tokens != model.config.block):
            cause = f"its client has blocks of {host.client.config.block_tokens} tokens and {host.client.layout.block_bytes} bytes"
            fix = f"make it with layout=model.layout and block_tokens={model.config.block}"
            raise MisuseError("E596", "engine's cache", cause, fix)
        if host is not None and host.slots != model.config.slots:
            cause = f"its agent has window entries of {host.slots} tokens"
            raise MisuseError("E596", "engine's cache", cause, f"make it with AgentConfig(slots={model.config.slots})")
        self.audit = ShadowAudit(model, config.audit_every, share=config.audit_share)
        self.pages = Pages(model.config, model.codec, max(2, config.cache_bytes // page_bytes(model.config, model.codec)))
        self.landing = Landing(self.pages, config.mover, config.mover_bytes)
        self.cache = Cache(model, host, config, self.landing)
        self._mail: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._waiting: list[Task] = []  # in the order of their submission
        self._running: list[Task] = []  # in the order of their start
        self._leaving: list[Task] = []  # done, but a load still writes to their pages
        self._turn = 0
        self._letters = 0  # read so far
        self._closing = False
        self.counts: Counter[str] = Counter()  # changed by the engine's thread only
        self._io = ThreadPoolExecutor(config.io_threads, "kvstore-engine-io")  # lookups
        # Loads, and requests on their way elsewhere, of each running request one: a slow one holds up no other, and no lookup.
        self._moves = ThreadPoolExecutor(2 * config.running_max, "kvstore-engine-move")
        self._thread = threading.Thread(target=self._run, name="kvstore-engine", daemon=True)
        self._thread.start()

    # --- callers ---

    def submit(self, prompt: list[int], *, options: RequestOptions | None = None, give: Give | None = None) -> Request:
        """Begins to answer; returns at once. `give`: offers the request to another process while its prompt is read here; once that has
        all of it, with the first token, it goes on there, and ends here as "handed_over". Where nobody takes it, it goes on here.

        Raises MisuseError for a prompt that is empty, has ids that are no tokens (E590), or does not fit the engine's memory with its
        answer (E594); Closed after close(). A full queue is no fault: the request ends as "busy"."""
        options = options or RequestOptions()
        vocabulary = self.model.config.vocabulary
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary:
            what = f"ids from {min(prompt)} to {max(prompt)}" if prompt else "is empty"
            raise MisuseError("E590", "prompt", what, f"give at least one id; ids are 0 to {vocabulary - 1}")
        self._check_room(len(prompt), options)
        if self.cache.host is not None and options.retention_class not in (classes := self.cache.host.client.map.classes):
            fix = f"use one of {', '.join(sorted(classes))}"
            raise MisuseError("E598", f"retention class {options.retention_class!r}", "is not in the cluster map", fix)
        task = self._task(prompt, options)
        task.give = give
        return self._begin(task)

    def take_over(self, sections: Mapping[str, Buffer], *, secret: bytes = b"") -> Request:
        """Goes on with a request that another process began; its stream begins with what was said there. `sections` must stay as they are
        until it has room; `secret`: the tenant's, where it has one. Raises LayoutError E576 for bytes that are no request of this model,
        MisuseError E594 where it does not fit the engine's memory, Closed."""
        prompt_tokens, sampler = told(self.model, sections)
        options, resume, worth, stored_blocks = settings_of(sampler, secret)
        if self.cache.host is not None and options.retention_class not in self.cache.host.client.map.classes:
            options = replace(options, retention_class="chat")
        self._check_room(prompt_tokens, options)
        tokens = tokens_of(sections)
        task = self._task(tokens[:prompt_tokens], options)
        task.tokens, task.taken, task.resume, task.worth, task.stored_blocks = tokens, sections, resume, worth, stored_blocks
        return self._begin(task)

    def check_taken(self, sections: Mapping[str, Buffer]) -> None:
        """Raises what take_over would raise; quick."""
        prompt_tokens, sampler = told(self.model, sections)
        self._check_room(prompt_tokens, settings_of(sampler, b"")[0])
        self._check_open()

    def places_free(self) -> int:
        """For how many more requests there is a place, running or waiting."""
        return self.config.running_max + self.config.queue_max - len(self._running) - len(self._waiting)

    def pages_promised(self) -> int:
        """To requests that were taken over, and wait for them."""
        return sum(task.blocks_to_start() for task in list(self._waiting) if task.taken is not None)

    def _check_open(self) -> None:
        if self._closing:
            raise Closed("E597", "engine", "is closed", "make a new one")

    def _task(self, prompt: list[int], options: RequestOptions) -> Task:
        request = Request(list(prompt), options)
        request.on_cancel(lambda: self._post(lambda: None))
        speculate = self.config.speculate if options.speculate is None else options.speculate
        return Task(request, self.model, self.cache, Mode.of(options, self.config), speculate, self.audit)

    def _begin(self, task: Task) -> Request:
        with self._changed:
            self._check_open()
            self._mail.append(lambda: self._submitted(task))
            self._changed.notify_all()
        return task.request

    def _check_room(self, prompt_tokens: int, options: RequestOptions) -> None:
        size = self.model.config.block
        need = (prompt_tokens + options.max_tokens + self.model.config.spare) // size + 1
        assert self.pages.capacity is not None
        if need > self.pages.capacity:
            cause = f"{need} blocks of {size} tokens, the engine has room for {self.pages.capacity}"
            raise MisuseError("E594", f"prompt of {prompt_tokens} tokens and an answer of {options.max_tokens}", cause, "raise cache_bytes")

    def stats(self) -> dict[str, int | float]:
        """Counters since the start and gauges of now, by plain name; docs/ENGINE.md lists them."""
        return {
            **self.counts, **self.cache.counts, "waiting": len(self._waiting), "running": len(self._running),
            "pages_free": self.pages.free, "pages": self.pages.capacity or 0,
        }  # fmt: skip

    def close(self) -> None:
        """Ends all requests, as "closed"; waits until nothing of them is under way. The cache stays open: it is its owner's."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)
        self._io.shutdown(wait=True)
        self._moves.shutdown(wait=True)
        self.landing.close()
        if self._own_agent is not None:
            self._own_agent.close()
        self.audit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- the thread ---

    def _post(self, letter: Callable[[], None]) -> None:
        with self._changed:
            self._mail.append(letter)
            self._changed.notify_all()

    def _run(self) -> None:
        torch.get_num_threads()  # a thread that never asked computes its first products with as many as there are processors
        try:
            while self._turn_once():
                pass
        except BaseException as error:  # a bug of ours: nobody may wait for ever
            with self._changed:
                self._closing = True
            for task in [*self._waiting, *self._running]:
                task.request.fail(error)
                if task.outgoing is not None:
                    task.outgoing.withdraw()
            raise

    def _turn_once(self) -> bool:
        """Reads the mail, starts what has room, computes a little of everything. False: closed."""
        closing = self._closing
        self._read_mail()
        self._end_early(closing)
        if closing and not self._running and not self._leaving and not self._waiting:
            return False
        self._admit()
        letters = self._letters
        worked = self._prefill() + self._step()
        if not worked and self._letters == letters:  # one read meanwhile may be of a request that can start now
            with self._changed:
                self._changed.wait_for(lambda: self._mail or (self._closing and not closing), self._idle_seconds())
        return True

    def _read_mail(self) -> None:
        with self._changed:
            letters = list(self._mail)
            self._mail.clear()
        self._letters += len(letters)
        for letter in letters:
            letter()

    def _idle_seconds(self) -> float:
        ends = [task.deadline_seconds for task in (*self._waiting, *self._running) if not task.called_off]
        return max(0.0, min(IDLE_SECONDS, min(ends, default=float("inf")) - time.monotonic()))

    def _end_early(self, closing: bool) -> None:
        now = time.monotonic()
        for task in [*self._waiting, *self._running]:
            if not (closing or task.request.cancelled or now > task.deadline_seconds):
                continue
            if task.giving:  # perhaps the other process has it by now: then it is not ended here
                self._call_off(task)
            else:
                self._end(task, "closed" if closing else "cancelled" if task.request.cancelled else "deadline")

    # --- a request's way in ---

    def _submitted(self, task: Task) -> None:
        self.counts["requests"] += 1
        full = len(self._waiting) >= self.config.queue_max + max(0, self.config.running_max - len(self._running))
        if full and task.taken is None:  # one that was taken over has begun, and nobody else answers it
            self._end(task, "busy")
            return
        self._waiting.append(task)
        if task.taken is None:
            self._look(task)

    def _look(self, task: Task) -> None:
        """Finds out what is there, on another thread."""

        def look() -> None:
            began = time.monotonic()
            try:
                task.chain.extend(task.tokens[task.chain.token_count :])
                keys = task.chain.keys[: task.prompt_tokens // self.model.config.block]
                found = self.cache.look(keys, task.prompt_tokens, task.mode, task.options.retention_class)
            except Exception as error:
                fault = error
                self._post(lambda: self._fail(task, fault))
                return
            self._post(lambda: self._looked(task, found, time.monotonic() - began))

        task.found = None
        self._io.submit(look)

    def _looked(self, task: Task, found: Found, seconds: float) -> None:
        if task.phase is Phase.WAITING:
            task.found = found
            task.lookup_seconds += seconds

    def _admit(self) -> None:
        """Starts waiting requests in their order, as long as there is room."""
        for task in list(self._waiting):
            if len(self._running) >= self.config.running_max:
                return
            if task.taken is None:
                if task.found is None:
                    continue  # others need not wait for its lookup
                if task.found.ticket is not None and task.found.rows is None and self._expired(task.found):
                    self._look(task)
                    continue
            try:
                if not (task.start_taken(self.pages) if task.found is None else task.start(task.found, self.pages)):
                    return
            except Exception as error:
                self._fail(task, error)
                continue
            self._waiting.remove(task)
            self._running.append(task)
            task.queue_seconds = time.monotonic() - task.request.submitted_seconds - task.lookup_seconds
            if task.give is not None and task.options.max_tokens > 1:
                self._offer(task, task.give)
            if task.found is not None:
                self._load(task)
            elif task.finished is not None:
                self._end(task, task.finished)

    def _expired(self, found: Found) -> bool:
        assert found.ticket is not None and self.cache.host is not None
        return found.resume.blocks_end_tokens > 0 and found.ticket.expired(self.cache.host.client.clock.wall_time())

    def _load(self, task: Task) -> None:
        """Brings the blocks of the plan, on another thread; computing begins at once and stops where it must wait."""
        found, state = task.found, task.state
        assert found is not None and state is not None
        if not state.missing:
            return

        def arrived(source: int, rows: Bytes) -> None:
            self.landing.land(state, source, rows)
            self._post(lambda: state.missing.discard(source))

        def load() -> None:
            began = time.monotonic()
            try:
                if found.rows is not None:
                    for source in sorted(state.missing):
                        arrived(source, found.rows[: found.resume.blocks_end_tokens // self.model.config.block])
                    outcome, rows = LoadOutcome.COMPLETE, found.rows
                else:
                    outcome, rows = self.cache.load(found, lambda load: self._post(lambda: self._began(task, load)), arrived)
            except Exception as error:
                fault = error
                self._post(lambda: self._loaded(task, found, None, None, 0.0, fault))
                return
            self._post(lambda: self._loaded(task, found, outcome, rows, time.monotonic() - began, None))

        task.loading = True
        self._moves.submit(load)

    def _began(self, task: Task, load: Load) -> None:
        task.load = load
        if task.releasing and task.loading:
            load.cancel()

    def _loaded(
        self, task: Task, found: Found, outcome: LoadOutcome | None, rows: Bytes | None, seconds: float, error: Exception | None
    ) -> None:
        task.loading, task.load = False, None
        task.load_seconds += seconds
        if outcome is not None and found.rows is None:
            task.load_outcome = outcome.value
        if task.releasing:
            task.release()
            if task in self._leaving:
                self._leaving.remove(task)
            return
        if error is not None:
            self._fail(task, error)
        elif rows is not None and len(rows) < found.resume.blocks_end_tokens // self.model.config.block:
            self._fell_short(task, found, rows)

    def _fell_short(self, task: Task, found: Found, rows: Bytes) -> None:
        """Fewer blocks came: all that was computed so far is thrown away, and a new plan made from those that did."""
        self.counts["loads_short"] += 1
        self._withdraw(task)
        task.release()
        task.forget()
        task.phase = Phase.WAITING
        self._running.remove(task)
        self._waiting.insert(0, task)
        task.found = None

        def look() -> None:
            keys = task.chain.keys[: task.prompt_tokens // self.model.config.block]
            try:
                again = self.cache.look_again(keys, task.prompt_tokens, task.mode, found, rows)
            except Exception as error:
                fault = error
                self._post(lambda: self._fail(task, fault))
                return
            self._post(lambda: self._looked(task, again, 0.0))

        self._io.submit(look)

    # --- computing ---

    def _prefill(self) -> int:
        """One block of each prompt in turn, until this step's budget is used up."""
        budget = max(1, self.config.prefill_tokens // self.model.config.block) * self.model.config.block
        done = 0
        while done < budget:
            self._read_mail()  # a plane that has come is used by the next piece, not by the next turn
            ready = [task for task in self._running if task.prefilling and not task.blocked]
            if not ready:
                break
            self._turn += 1
            task = ready[self._turn % len(ready)]
            rows = self._guarded(task, task.prefill)
            if not rows:
                continue  # it waits for a plane, or failed
            done += rows
            self.counts["prefill_tokens"] += rows
            if task.finished is not None and task.phase is Phase.RUNNING:
                self._end(task, task.finished)
            elif task.outgoing is not None and task.answering and task.phase is Phase.RUNNING:
                self._hand_over(task, task.outgoing)
        return done

    # --- giving it to another process ---

    def _offer(self, task: Task, give: Give) -> None:
        size = offered_bytes(task)
        if size is None:
            self._stays(task, HandoffOutcome.TOO_LARGE)
            return
        task.outgoing = Outgoing(give, self.model, task.prompt_tokens, size)
        self._moves.submit(task.outgoing.begin)

    def _hand_over(self, task: Task, outgoing: Outgoing) -> None:
        """The first token is said: sends what is left, on another thread; what that thread sends is a copy."""
        early = outgoing.sent_bytes
        try:
            task.store()
            rest = pack(task, outgoing.sampler_bytes)
        except Exception as error:
            self._fail(task, error)
            return
        task.give, task.giving = None, True

        def work() -> None:
            try:
                outcome = outgoing.finish(rest, self.config.handoff_deadline_seconds)
            except Exception:  # whatever it is: the request can still be answered here
                outcome = HandoffOutcome.LOST
            self._post(lambda: self._handed_over(task, outgoing, outcome, early))

        if outgoing.outcome is not None:
            self._handed_over(task, outgoing, outgoing.outcome, early)
        else:
            self._moves.submit(work)

    def _handed_over(self, task: Task, outgoing: Outgoing, outcome: HandoffOutcome, early: int) -> None:
        if task.outgoing is not outgoing:
            return  # it was withdrawn
        task.giving, task.outgoing = False, None
        if outcome is not HandoffOutcome.DONE:
            self._moves.submit(outgoing.withdraw)
            if task.called_off:
                self.counts["handoff_aborted"] += 1
            else:
                self._stays(task, outcome)
            return
        task.handoff_bytes, task.handoff_early_bytes = outgoing.total_bytes, early
        self.counts["handoff_done"] += 1
        self.counts["handoff_early_bytes"] += early
        self.counts["handoff_late_bytes"] += outgoing.total_bytes - early
        self._end(task, "handed_over")

    def _stays(self, task: Task, outcome: HandoffOutcome) -> None:
        task.give = None
        self.counts[f"handoff_{outcome.value}"] += 1
        log.warning("request %d is answered here: its handoff was %s", task.request.number, outcome.value)

    def _call_off(self, task: Task) -> None:
        """What becomes of it is told by `_handed_over`, soon."""
        if not task.called_off and task.outgoing is not None:
            task.called_off = True
            self._moves.submit(task.outgoing.withdraw)

    def _withdraw(self, task: Task) -> None:
        """What was sent of it counts no more: it ends here, or is computed or loaded again."""
        outgoing, task.outgoing, task.giving = task.outgoing, None, False
        if outgoing is not None:
            self.counts["handoff_aborted"] += 1
            self._moves.submit(outgoing.withdraw)

    # --- answers ---

    def _step(self) -> int:
        """One step of each answer."""
        done = 0
        for task in list(self._running):
            if task.phase is not Phase.RUNNING or task.prefilling or task.state is None or task.releasing or task.giving:
                continue
            room = task.room_for_guesses()
            if not self._make_room(task, task.state.length + 1 + room):
                continue
            before = len(task.tokens)
            self._guarded(task, lambda task=task, room=room: task.step(room))  # type: ignore[misc]  # bound now, in this turn
            done += 1
            self.counts["decode_steps"] += 1
            self.counts["decode_tokens"] += len(task.tokens) - before
            if task.finished is not None and task.phase is Phase.RUNNING:
                self._end(task, task.finished)
        return done

    def _make_room(self, task: Task, tokens: int) -> bool:
        """Pages for so many tokens of a running answer; the request that started last loses its room for them, if need be this one."""
        assert task.state is not None
        while not task.state.reserve((tokens - 1) // self.model.config.block + 1):
            victims = [other for other in self._running if not other.loading and not other.giving]
            if not victims:
                return False  # the end of a load will wake us
            victim = victims[-1]
            self._preempt(victim)
            if victim is task:
                return False
        return True

    def _preempt(self, task: Task) -> None:
        """What it computed is stored as far as it is whole, so that it goes on from there; the tokens it gave stay."""
        self.counts["preemptions"] += 1
        task.preemptions += 1
        self._withdraw(task)
        task.store()
        task.release()
        task.phase = Phase.WAITING
        self._running.remove(task)
        self._waiting.insert(0, task)
        self._look(task)

    def _guarded(self, task: Task, work: Callable[[], int | None]) -> int:
        try:
            return work() or 0
        except Exception as error:
            self._fail(task, error)
            return 0

    # --- a request's way out ---

    def _leave(self, task: Task) -> None:
        task.phase = Phase.DONE
        for tasks in (self._waiting, self._running):
            if task in tasks:
                tasks.remove(task)
        self._withdraw(task)
        task.release()
        if task.loading:
            self._leaving.append(task)

    def _end(self, task: Task, reason: FinishReason) -> None:
        if task.phase is Phase.DONE:
            return
        try:
            task.store()
        except Exception as error:
            self._fail(task, error)
            return
        response = task.response(reason)
        if task.recording is not None:
            self.audit.submit(task.recording)
        self._leave(task)
        self.counts[f"finished_{reason}"] += 1
        self.counts["prompt_tokens"] += response.prompt_tokens
        self.counts["cached_tokens"] += response.cached_tokens
        self.counts["guessed_tokens"] += response.guessed_tokens
        self.counts["accepted_tokens"] += response.accepted_tokens
        task.request.end(response)

    def _fail(self, task: Task, error: Exception) -> None:
        if task.phase is Phase.DONE:
            return
        self._leave(task)
        self.counts["finished_error"] += 1
        task.request.fail(error)
