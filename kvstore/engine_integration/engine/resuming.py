"""How a request goes on from what was found, and what its blocks are worth afterwards. Decisions only; nothing is loaded here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.client.ticket import Ticket
from kvstore.client.values import Accept, Fidelity, FidelityKind
from kvstore.engine_integration.engine.options import EngineConfig, RequestOptions, ResumeMode
from kvstore.engine_integration.model.config import ModelConfig
from kvstore.engine_integration.model.resume import Resume, WindowUse, plan_resume

OLDER_DIVISOR: Final = 2  # `auto` computes from an entry up to (encoder layers / this) blocks older before it thinks of a bounded replay


@dataclass(frozen=True, slots=True)
class Mode:
    """A request's choices, the engine's where it has none."""

    resume: ResumeMode
    bounded_windows: int
    depth_max: int

    @classmethod
    def of(cls, options: RequestOptions, config: EngineConfig) -> Mode:
        def either(own: int | None, default: int) -> int:
            return default if own is None else own

        return cls(
            options.resume or config.resume,
            either(options.bounded_windows, config.bounded_windows),
            either(options.depth_max, config.depth_max),
        )

    @property
    def accept(self) -> Accept:
        """What it reads: approximations only where it may make some itself."""
        exact = self.resume in ("exact", "off") or self.depth_max == 0
        return Accept.EXACT if exact else Accept(depth_max=self.depth_max)


def plan(config: ModelConfig, prompt_tokens: int, blocks: int, entries: Collection[int], mode: Mode, depth: int) -> Resume:
    """`entries`: token counts whose window entry is at hand; `depth`: of the blocks found. `auto`: an entry at the hit; one that is
    a little older; a bounded replay, unless the answer would be deeper than it may be; else exact, from an older entry or by replay."""
    if mode.resume == "bounded":
        return plan_resume(config, prompt_tokens, blocks, entries, mode="bounded", bounded_windows=mode.bounded_windows)
    exact = plan_resume(config, prompt_tokens, blocks, entries)
    near = config.encoder_layers // OLDER_DIVISOR * config.block
    if mode.resume == "exact" or exact.window in (WindowUse.NONE, WindowUse.HIT) or depth >= mode.depth_max:
        return exact
    if exact.window is WindowUse.OLDER and exact.replayed_tokens <= near:
        return exact
    return plan_resume(config, prompt_tokens, blocks, mode="bounded", bounded_windows=mode.bounded_windows)


def depths_of(ticket: Ticket) -> list[int]:
    """Depth of each block of the hit; 0: exact."""
    approximate = ticket.extents["fidelity"] == FidelityKind.APPROX
    depths: list[int] = np.repeat(np.where(approximate, ticket.extents["depth"], 0), ticket.extents["count"]).tolist()
    return depths


@dataclass(frozen=True, slots=True)
class Worth:
    """What a request's rows rest on."""

    depth: int  # 0: exact
    approximate_tokens: int  # of the prompt

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.approx(self.depth) if self.depth else Fidelity.EXACT


def worth(prompt_tokens: int, resume: Resume, block_tokens: int, depths: list[int], entry: Fidelity) -> Worth:
    """Greatest depth of what was read, and one more for a bounded replay that is not exact anyhow."""
    read = depths[: resume.blocks_end_tokens // block_tokens]
    depth = max([*read, entry.depth if resume.entry else 0]) + resume.approximate if resume.blocks_end_tokens else 0
    computed = prompt_tokens - resume.blocks_end_tokens
    return Worth(depth, sum(d > 0 for d in read) * block_tokens + (computed if depth else 0))
