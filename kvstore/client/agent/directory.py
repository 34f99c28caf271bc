"""The window directory as an agent sees it: which agent holds the window entry of a key. docs/WINDOWS.md is the text to this.

A directory is a hint in RAM. What cannot be learnt in time is a miss, counted and never raised: a window miss costs a replay, a wait
would cost the request. Keys are spread over the instances by rendezvous, so every agent asks the same instance about the same key.

An instance that does not answer costs one deadline, once: it is skipped from then on. A thread, there only while an instance is out,
asks it an empty question now and then, and takes it in again when it answers.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import tcp, wire, wire_directory
from kvstore.errors import Closed, MisuseError, ProtocolError
from kvstore.kernels import _native
from kvstore.placement import xxh3_64_u64
from kvstore.wire import Status, Verb
from kvstore.wire_directory import Holder as Holder  # agents know no wire
from kvstore.wire_directory import Speaker

Keys = npt.NDArray[np.uint8]

INSTANCES_MAX: Final = 64
PAUSE_SECONDS: Final = 0.05  # until an instance that failed is tried again; doubled each time, up to
PAUSE_SECONDS_MAX: Final = 4.0
TELL_SECONDS: Final = 0.5  # of register, touch, forget of keys: a word lost to a hiccup is a window missed elsewhere
PROBE_SECONDS: Final = 0.5  # within which the empty question has to be answered
STALL_SECONDS: Final = 1.0  # a connection that owes an answer for so long is made anew
IDLE_SECONDS: Final = 240.0  # below a directory's own: an agent's connection says that the agent lives
CLIENT_LIMIT: Final = 103  # Fault::LIMIT of client_net.hpp: too much waits to be sent

_Ask = tuple[int, int, bytes]  # instance, verb, body


class DirectoryClient:
    """Thread-safe; one connection to each instance, opened when needed and kept. Close it, or use it as a context.

    One client speaks for one agent: the first name given to register(), touch() or forget(). Its incarnation is the time of this
    object's making, so what an earlier process of the same name registered counts no more after the first register().
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        cluster: bytes = bytes(16),
        owner: bytes = wire.NO_OWNER,
        deadline_seconds: float = 0.02,
        clock: Callable[[], float] | None = None,
        congestion_control: str = "cubic",
    ) -> None:
        """`addresses`: "ip:port" of the instances, the same texts on every agent (ClusterMap.directories). `cluster`: ClusterMap.tag.
        `deadline_seconds`: of an answer to locate(); what is told has half a second, for nobody waits for it.
        `clock`: seconds, for directories that run with --virtual-clock only; None: theirs counts.
        Raises MisuseError E543 for addresses that are none or too many, and for a deadline out of range."""
        if not 1 <= len(set(addresses)) == len(addresses) <= INSTANCES_MAX:
            raise MisuseError("E543", f"{len(addresses)} directories", fix=f"give 1 to {INSTANCES_MAX}, each once")
        if not 0 < deadline_seconds <= 60:
            raise MisuseError("E543", f"directory deadline {deadline_seconds} s", fix="give more than 0, at most 60")
        try:
            self._core = _native.ClientCore(
                list(addresses),
                cluster,
                0,
                1,
                0,
                threads=1,
                connect_timeout_seconds=PROBE_SECONDS,
                stall_timeout_seconds=STALL_SECONDS,
                idle_timeout_seconds=IDLE_SECONDS,
                congestion_control=tcp.for_kernel(congestion_control),
                directories=True,
            )
        except ValueError as error:
            raise MisuseError("E543", "directory addresses", str(error), "write ip:port, as in 10.0.0.1:7399") from None
        self.addresses = tuple(addresses)
        self.deadline_seconds = deadline_seconds
        self._seeds = np.array([xxhash.xxh3_64_intdigest(address.encode()) for address in addresses], np.uint64)
        self._owner = owner
        self._clock = clock
        self._incarnation = time.time_ns()
        self._token = secrets.randbits(64)
        self._agent = ""
        self._counts: Counter[str] = Counter()
        self._out: dict[int, float] = {}  # instances that failed: seconds until they are asked again
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._prober: threading.Thread | None = None

    # --- verbs ---

    def register(self, agent: str, keys: Keys) -> int:
        """`agent` ("host:port") holds the entries of keys (n, 32) from now on, for one lifetime from now. Gives how many were taken."""
        done = sum(self._speak(Verb.REGISTER, agent, keys).values())
        self._count(registered=done)
        return done

    def touch(self, agent: str, keys: Keys) -> int:
        """They were used: their lifetime begins anew. What the directory has lost (a restart, a full table) is registered again."""
        parts = self._parts(keys)
        found = self._speak(Verb.TOUCH, agent, keys)
        lost = [parts[instance] for instance, done in found.items() if done < len(parts[instance])]
        done = sum(done for instance, done in found.items() if done == len(parts[instance]))
        done += self.register(agent, np.concatenate(lost)) if lost else 0
        self._count(touched=done)
        return done

    def forget(self, agent: str, keys: Keys | None = None) -> int:
        """`agent` no longer holds them; None: nothing at all (before it ends). Gives how many were forgotten."""
        if keys is not None:
            done = sum(self._speak(Verb.FORGET, agent, keys).values())
        else:
            body = wire_directory.encode_agent(
                self._speaker(agent), b"", owner=self._owner, clock_ms=self._clock_ms(), flags=wire_directory.FORGET_ALL
            )
            answers = self._ask([(instance, Verb.FORGET, body) for instance in range(len(self.addresses))], self.deadline_seconds)
            done = sum(self._done(answer) for answer in answers)
        self._count(forgotten=done)
        return done

    def locate(self, keys: Keys) -> list[list[Holder]]:
        """Holders of each of keys (n, 32), at most 4, the best first: agents that the directory hears, then those longest to live.
        Ask for H and the older candidates at once: one trip to each instance that has a key of them."""
        keys = _checked(keys)
        rows = self._rows(keys)
        found: list[list[Holder]] = [[] for _ in range(len(keys))]
        asks, places = [], []
        for instance, mine in rows.items():
            for first in range(0, len(mine), wire_directory.LOCATE_KEYS_MAX):
                part = mine[first : first + wire_directory.LOCATE_KEYS_MAX]
                body = wire_directory.encode_locate(keys[part].tobytes(), owner=self._owner, clock_ms=self._clock_ms())
                asks.append((instance, int(Verb.LOCATE), body))
                places.append(part)
        for (instance, _, _), part, answer in zip(asks, places, self._ask(asks, self.deadline_seconds), strict=True):
            if answer is None:
                continue
            try:
                holders = wire_directory.decode_locate_reply(answer, len(part))
            except ProtocolError:
                self._failed(instance, "protocol")
                continue
            for row, held in zip(part.tolist(), holders, strict=True):
                found[row] = held
        hits = sum(bool(held) for held in found)
        self._count(located=len(keys), found=hits, missed=len(keys) - hits)
        return found

    def report(self, holder: Holder) -> None:
        """`holder` could not be reached. It is left out of answers while its own connection to the directory is down, too.
        Does not wait."""
        body = wire_directory.encode_report(holder.address, holder.incarnation)
        live = [(instance, int(Verb.REPORT), body) for instance in range(len(self.addresses)) if instance not in self._out]
        self._call(live, 0.0)
        self._count(reports=1)

    def stats(self) -> dict[str, int]:
        """Keys by what became of them: registered, touched, forgotten, located, found, missed; `reports`; requests that got no good
        answer: failed_timeout, failed_unreachable, failed_refused, failed_protocol, and `skipped`: not sent; instances_out: now."""
        names = (
            "registered", "touched", "forgotten", "located", "found", "missed", "reports", "skipped",
            *(f"failed_{kind}" for kind in ("timeout", "unreachable", "refused", "protocol")),
        )  # fmt: skip
        with self._lock:
            return {**{name: self._counts[name] for name in names}, "instances_out": len(self._out)}

    def close(self) -> None:
        """Harmless twice. What is registered stays until it expires; forget() first where the agent ends."""
        self._closing.set()
        with self._lock:
            prober, self._prober = self._prober, None
        if prober is not None:
            prober.join()
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ---

    def _rows(self, keys: Keys) -> dict[int, npt.NDArray[np.int64]]:
        """Instance -> rows of its keys. The highest xxh3-64 of a key's first 8 bytes, seeded with that of the address, wins."""
        if len(self.addresses) == 1:
            return {0: np.arange(len(keys))} if len(keys) else {}
        values = np.ascontiguousarray(keys[:, :8]).view("<u8")
        owner_of = xxh3_64_u64(values, self._seeds[None, :]).argmax(axis=1)
        return {int(instance): np.flatnonzero(owner_of == instance) for instance in np.unique(owner_of)}

    def _parts(self, keys: Keys) -> dict[int, Keys]:
        keys = _checked(keys)
        return {instance: keys[rows] for instance, rows in self._rows(keys).items()}

    def _speak(self, verb: Verb, agent: str, keys: Keys) -> dict[int, int]:
        """Keys done, by instance; those that did not answer are left out."""
        speaker, asks = self._speaker(agent), []
        for instance, part in self._parts(keys).items():
            for first in range(0, len(part), wire.KEYS_MAX):
                joined = part[first : first + wire.KEYS_MAX].tobytes()
                body = wire_directory.encode_agent(speaker, joined, owner=self._owner, clock_ms=self._clock_ms())
                asks.append((instance, int(verb), body))
        done: dict[int, int] = {}
        for (instance, _, _), answer in zip(asks, self._ask(asks, max(self.deadline_seconds, TELL_SECONDS)), strict=True):
            if answer is not None:
                done[instance] = done.get(instance, 0) + self._done(answer)
        return done

    def _done(self, answer: bytes | None) -> int:
        if answer is None:
            return 0
        try:
            return wire_directory.decode_agent_reply(answer)[0]
        except ProtocolError:
            self._count(failed_protocol=1)
            return 0

    def _speaker(self, agent: str) -> Speaker:
        raw = agent.encode()
        if not 0 < len(raw) <= wire_directory.AGENT_ADDRESS_MAX or not all(32 < byte < 127 for byte in raw):
            most = wire_directory.AGENT_ADDRESS_MAX
            raise MisuseError("E544", f"agent address {agent!r}", fix=f"give host:port, at most {most} characters")
        with self._lock:
            self._agent = self._agent or agent
        if agent != self._agent:
            raise MisuseError("E544", f"agent {agent!r}", f"this client speaks for {self._agent!r}", "make one DirectoryClient an agent")
        return Speaker(agent, self._incarnation, self._token)

    def _clock_ms(self) -> int:
        return int(self._clock() * 1000) if self._clock is not None else 0

    def _ask(self, asks: Sequence[_Ask], seconds: float) -> list[bytes | None]:
        """Body of each OK answer that came in time; None for all else, which is counted. Raises Closed."""
        with self._lock:
            out = set(self._out)
        live = [at for at, (instance, _, _) in enumerate(asks) if instance not in out]
        self._count(skipped=len(asks) - len(live))
        answers: list[bytes | None] = [None] * len(asks)
        for at, (status, body) in zip(live, self._call([asks[at] for at in live], seconds), strict=True):
            if status == Status.OK:
                answers[at] = body
            elif status in _REFUSALS or status == CLIENT_LIMIT:  # it is there: only these keys are missed
                self._count(failed_refused=1)
            else:
                self._failed(asks[at][0], "timeout" if status < 0 else "unreachable")
        return answers

    def _call(self, asks: Sequence[_Ask], seconds: float) -> list[tuple[int, bytes]]:
        if self._closing.is_set():
            raise Closed("E545", "directory client", "it was closed", "make another")
        return self._core.call_many(list(asks), seconds) if asks else []

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    # --- instances that are out ---

    def _failed(self, instance: int, kind: str) -> None:
        with self._lock:
            self._counts[f"failed_{kind}"] += 1
            self._out.setdefault(instance, PAUSE_SECONDS)
            if self._prober is None and not self._closing.is_set():
                self._prober = threading.Thread(target=self._probe, name="kvstore-directory", daemon=True)
                self._prober.start()

    def _probe(self) -> None:
        """Until no instance is out."""
        due: dict[int, float] = {}
        while True:
            with self._lock:
                if not self._out or self._closing.is_set():
                    self._prober = None
                    return
                for instance, pause in self._out.items():
                    due.setdefault(instance, time.monotonic() + pause)
            if self._closing.wait(max(0.0, min(due.values()) - time.monotonic())):
                continue
            now = time.monotonic()
            asked = [instance for instance, when in due.items() if when <= now]
            self._core.retry_down()
            body = wire_directory.encode_locate(b"")
            answers = self._core.call_many([(instance, int(Verb.LOCATE), body) for instance in asked], PROBE_SECONDS)
            with self._lock:
                for instance, (status, _) in zip(asked, answers, strict=True):
                    del due[instance]
                    if status == Status.OK:
                        del self._out[instance]
                    else:
                        self._out[instance] = min(PAUSE_SECONDS_MAX, 2 * self._out[instance])


_REFUSALS: Final = frozenset((Status.BUSY, Status.SUPERSEDED))


def _checked(keys: Keys) -> Keys:
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != wire.KEY_BYTES:
        raise MisuseError("E544", "window keys", fix="give a numpy array of uint8 of shape (n, 32)")
    return keys
