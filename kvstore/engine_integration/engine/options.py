"""What an engine and each of its requests may choose. Values outside their range raise MisuseError E593 (requests), ConfigError E150."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from kvstore.errors import ConfigError, MisuseError

ResumeMode = Literal["auto", "exact", "bounded", "off"]
RESUME_MODES: Final = ("auto", "exact", "bounded", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """Of one request. None: the engine's own choice (EngineConfig)."""

    max_tokens: int = 256  # of the answer, at least 1
    temperature: float = 0.0  # 0: the most likely token, always
    top_p: float = 1.0  # only the most likely tokens that together have so much probability, above 0
    seed: int = 0  # the same seed, prompt and options: the same answer, whatever else runs
    stop_tokens: frozenset[int] = frozenset()  # the answer ends with the first of them, which it includes
    banned_tokens: frozenset[int] = frozenset()  # never in the answer
    resume: ResumeMode | None = None  # how a hit goes on where its window entry is missing; "off": nothing is looked up
    bounded_windows: int | None = None  # how many windows a bounded replay computes
    depth_max: int | None = None  # most bounded replays behind what is read; 0: exact blocks only
    speculate: bool | None = None
    store: bool = True  # what is computed is stored, and its window entries kept
    retention_class: str = "chat"
    secret: bytes = field(default=b"", repr=False)  # the tenant's: prompts hit only what the same secret wrote
    deadline_seconds: float | None = None  # from submit to the last token

    def __post_init__(self) -> None:
        self._need("max_tokens", self.max_tokens >= 1, "at least 1")
        self._need("temperature", 0 <= self.temperature <= 100, "0 to 100")
        self._need("top_p", 0 < self.top_p <= 1, "above 0, at most 1")
        self._need("seed", 0 <= self.seed < 1 << 64, "0 to 2^64 - 1")
        self._need("resume", self.resume is None or self.resume in RESUME_MODES, f"one of {', '.join(RESUME_MODES)}")
        self._need("bounded_windows", self.bounded_windows is None or self.bounded_windows >= 1, "at least 1")
        self._need("depth_max", self.depth_max is None or 0 <= self.depth_max < 1 << 16, "0 to 65535")
        self._need("deadline_seconds", self.deadline_seconds is None or self.deadline_seconds > 0, "above 0")

    def _need(self, name: str, fine: bool, range_text: str) -> None:
        if not fine:
            raise MisuseError("E593", f"request option {name} = {getattr(self, name)!r}", f"must be {range_text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Of one engine."""

    cache_bytes: int = 1 << 30  # of running requests' compressed rows, in pages of one block; where it is full, others wait
    prefill_tokens: int = 512  # of all prompts in one turn, in whole blocks, at least one; then each answer gets its next token
    running_max: int = 16
    queue_max: int = 1024  # requests that wait; one more ends at once as "busy"
    io_threads: int = 8  # lookups under way at once; each running request's load has a thread of its own
    resume: ResumeMode = "auto"
    bounded_windows: int = 1
    depth_max: int = 3
    speculate: bool = True
    lookup_deadline_seconds: float = 0.5
    load_deadline_seconds: float = 5.0
    handoff_deadline_seconds: float = 10.0  # from the first token until the other process has all; then it is answered here
    request_deadline_seconds: float = 600.0
    audit_every: int = 0  # N: of N answers over a bounded replay one is computed again exactly, in the background; 0: none is
    audit_share: float = 0.1  # of one thread's time, at most, for that
    mover: str = "auto"  # how loaded rows come into its memory: kvstore/client/movers, `kvstore doctor --measure`
    mover_bytes: int = 64 << 20  # of host RAM that a mover other than "cpu" is given to move from
    store_step_blocks: int = 8  # blocks of an answer that are stored at once; the last ones when it ends

    def __post_init__(self) -> None:
        self._need("resume", self.resume in RESUME_MODES, f"one of {', '.join(RESUME_MODES)}")
        for name in ("cache_bytes", "prefill_tokens", "running_max", "io_threads", "mover_bytes", "bounded_windows", "store_step_blocks"):
            self._need(name, getattr(self, name) >= 1, "at least 1")
        self._need("queue_max", self.queue_max >= 0, "at least 0")
        self._need("audit_every", self.audit_every >= 0, "at least 0")
        self._need("audit_share", 0 < self.audit_share <= 1, "above 0, at most 1")
        self._need("depth_max", 0 <= self.depth_max < 1 << 16, "0 to 65535")
        for name in ("lookup_deadline_seconds", "load_deadline_seconds", "handoff_deadline_seconds", "request_deadline_seconds"):
            self._need(name, getattr(self, name) > 0, "above 0")

    def _need(self, name: str, fine: bool, range_text: str) -> None:
        if not fine:
            raise ConfigError("E150", f"engine {name} = {getattr(self, name)!r}", f"must be {range_text}")
