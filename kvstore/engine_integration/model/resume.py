"""From where a prompt goes on, given which blocks and window entries were found. Plain numbers; no torch.

Blocks give every global row below H. The rings of the encoder's windows at H come from an entry at H (hit), from an older entry or from the
prompt's start or far enough back (older, exact: computed up to H without writing a row below it), or from too few tokens (bounded).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from kvstore.engine_integration.model.config import ModelConfig
from kvstore.errors import MisuseError


class WindowUse(Enum):
    """How the encoder's windows at the hit boundary came about."""

    NONE = "none"  # nothing was hit
    HIT = "hit"
    OLDER = "older"
    EXACT = "exact"
    BOUNDED = "bounded"


@dataclass(frozen=True, slots=True)
class Resume:
    """Blocks [0, blocks_end_tokens) are read; computing begins at `start_tokens`, with the window entry there where `entry`."""

    window: WindowUse
    blocks_end_tokens: int
    start_tokens: int
    entry: bool
    exact_from_tokens: int  # window rows from here on are as in a cold run, in every encoder layer; blocks_end if never below it
    approximate: bool  # rows this run writes may differ from a cold run's

    @property
    def replayed_tokens(self) -> int:
        return self.blocks_end_tokens - self.start_tokens

    @property
    def hit_tokens(self) -> int:
        """Tokens the request is spared. A missing entry costs those that are computed again, at the original's rule one block."""
        return min(self.blocks_end_tokens, self.start_tokens) if self.window is not WindowUse.HIT else self.blocks_end_tokens


def hit_tokens_max(config: ModelConfig, prompt_tokens: int) -> int:
    """Most that a prompt may take from blocks: the decoder needs the encoder's output of its last `slots` tokens, which nothing keeps."""
    return max(0, prompt_tokens - config.slots) // config.block * config.block


def plan_resume(
    config: ModelConfig,
    prompt_tokens: int,
    blocks_found: int,
    entries: Collection[int] = (),
    *,
    mode: Literal["exact", "bounded"] = "exact",
    bounded_windows: int = 1,
) -> Resume:
    """`entries`: token counts at which a window entry is at hand. `bounded_windows`: how many windows a bounded replay computes."""
    if prompt_tokens < 1 or blocks_found < 0 or bounded_windows < 0 or mode not in ("exact", "bounded"):
        raise MisuseError("E584", "resume", f"prompt of {prompt_tokens}, {blocks_found} blocks, {mode!r} of {bounded_windows} windows")
    end = min(blocks_found * config.block, hit_tokens_max(config, prompt_tokens))
    if end == 0:
        return Resume(WindowUse.NONE, 0, 0, False, 0, False)
    if end in entries:
        return Resume(WindowUse.HIT, end, end, True, max(0, end - config.slots), False)
    if mode == "bounded":
        start = max(0, end - bounded_windows * config.window)
        if start > max(0, end - config.replay_blocks_tokens):
            return Resume(WindowUse.BOUNDED, end, start, False, start, True)
        return _replay(config, WindowUse.BOUNDED, end, start)
    far_enough = max(0, end - config.replay_entry_tokens)
    older = max((h for h in entries if 0 < h < end and h % config.block == 0), default=0)
    if older and older >= far_enough:
        return Resume(WindowUse.OLDER, end, older, True, max(0, older - config.slots), False)
    return _replay(config, WindowUse.EXACT, end, far_enough)


def _replay(config: ModelConfig, window: WindowUse, end: int, start: int) -> Resume:
    """From no state at all: the last encoder layer's rows are right once all windows below it lie behind `start`."""
    right = start + (config.encoder_layers - 1) * (config.window - 1) if start else 0
    return Resume(window, end, start, False, right, False)
