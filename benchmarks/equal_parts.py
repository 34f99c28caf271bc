"""What resume_bit_equal, bounded_short_equal and rollback_equal compare, cut into items that several processes can share.

`python -m benchmarks.equal_parts DIRECTORY FIRST OF` runs every OF-th item of each part from FIRST on, says on stderr how far it is, and
prints {"part": [cases, right, [what was not]]} as JSON. The oracle is always a run of that very prompt with no cache.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch

from benchmarks.engine_rig import (
    DRAFTING,
    MINI,
    TINY,
    WAIT_SECONDS,
    Tally,
    alone,
    cluster_beside,
    model_of,
    one_thread,
    settled,
    submit,
    text,
)
from kvstore.engine_integration.engine import Engine, RequestOptions, host_of
from kvstore.engine_integration.model import ModelConfig, Resume, WindowUse, hit_tokens_max, plan_resume
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.state import Bytes

TELL_SECONDS: Final = 10.0
T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Of each part, every `of`-th item from `first` on."""

    directory: Path
    smoke: bool = True
    first: int = 0
    of: int = 1

    def items(self, name: str, items: Sequence[T], tally: Tally) -> Iterator[T]:
        """This share's items; tells how far it is, now and then, where a person waits."""
        mine, told = items[self.first :: self.of], time.monotonic()
        for number, item in enumerate(mine, 1):
            yield item
            if not self.smoke and (number == len(mine) or time.monotonic() - told >= TELL_SECONDS):
                told = time.monotonic()
                print(f"  {name}, share {self.first + 1}: {number} of {len(mine)}; {tally.note}", file=sys.stderr, flush=True)


def stored(model: Model, tokens: list[int]) -> tuple[Bytes, dict[int, bytes]]:
    """Blocks, and entries at all multiples, of another request that had this text."""
    state, entries = model.begin(len(tokens)), {}
    for at in range(0, len(tokens), model.config.block):
        model.feed(state, tokens[at : at + model.config.block])
        entries.update(state.entries)
    return state.export_blocks(0, len(tokens) // model.config.block), entries


def logits_of(model: Model, tokens: list[int], plan: Resume | None = None, blocks: Bytes | None = None, entry: bytes | None = None) -> Any:
    """Logits of the prompt's last rows, and the blocks of the whole prompt."""
    state = model.begin(len(tokens), plan, blocks, entry)
    logits = model.feed(state, tokens[plan.start_tokens if plan else 0 :])
    return logits, state.export_blocks(0, len(tokens) // model.config.block)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def ways(config: ModelConfig, length: int, blocks: int, entries: dict[int, bytes]) -> dict[WindowUse, Resume]:
    """A window hit; from an older window; by exact replay. Fewer where the prompt is short."""
    end = hit_tokens_max(config, length)
    found = {}
    for newest in (end, end - 2 * config.block, 0):
        plan = plan_resume(config, length, blocks, {at for at in entries if at <= newest})
        found[plan.window] = plan
    return found


def logits_equal(share: Share, name: str, model: Model, lengths: list[int]) -> Tally:
    tally = Tally()
    whole = text(max(lengths) // model.config.block * model.config.block + model.config.block)
    blocks, entries = stored(model, whole)
    for length in share.items(name, lengths, tally):
        cold = logits_of(model, whole[:length])
        for window, plan in ways(model.config, length, len(blocks), entries).items():
            resumed = logits_of(model, whole[:length], plan, blocks, entries.get(plan.start_tokens))
            tally.add(f"{length} tokens by {window.value}", same(resumed, cold))
    return tally


def every_length(share: Share) -> Tally:
    return logits_equal(share, "tiny, 1 to 385 tokens", model_of(TINY), list(range(1, 386, 96 if share.smoke else 1)))


def mini_edges(share: Share) -> Tally:
    edges = [127, 128, 129, 133, 134, 135, 262, 263, 385]
    return logits_equal(share, "mini", model_of(MINI), edges if not share.smoke else [263])


def mini_long(share: Share) -> Tally:
    chosen = random.Random(3)
    return logits_equal(share, "mini, 20 long", model_of(MINI), sorted(chosen.randrange(400, 2_500) for _ in range(20)))


def texts(share: Share) -> Tally:
    """Conversations, so many at once as a batch says, with and without guesses, arriving at random; each turn hits what prefill and
    decode stored in the one before. Then each last prompt anew without window entries, exact."""
    tally = Tally()
    batches = [(rounds, speculate, batch) for rounds in range(4) for speculate in (False, True) for batch in (1, 3, 8)]
    with cluster_beside(share.directory / f"texts-{share.first}", model_of(DRAFTING)) as (_, host):
        for number, speculate, batch in share.items("texts", batches if not share.smoke else [(0, False, 1), (0, True, 3)], tally):
            conversations_equal(tally, host, random.Random(f"{number} {speculate} {batch}"), batch, speculate, 3 if not share.smoke else 2)
    return tally


def conversations_equal(tally: Tally, host: Any, chosen: random.Random, batch: int, speculate: bool, turns: int) -> None:
    model = model_of(DRAFTING)
    conversations = [text(chosen.randrange(1, 120), chosen.randrange(1 << 30)) for _ in range(batch)]
    with Engine(model, host) as engine:
        for turn in range(turns):
            requests = []
            for prompt in conversations:
                threading.Event().wait(chosen.random() * 0.02)  # of a few steps
                requests.append(submit(engine, prompt, 20 + turn, RequestOptions(speculate=speculate, resume="exact")))
            for number, request in enumerate(requests):
                answer, prompt = request.result(WAIT_SECONDS).tokens, conversations[number]
                tally.add(f"{batch} at once, turn {turn}, guesses {speculate}", answer == alone(model, prompt, 20 + turn))
                conversations[number] = prompt + answer + text(9, turn)
            settled(host)
    with Engine(model, host_of(host.client, model.config)) as engine:
        requests = [submit(engine, prompt, 12, RequestOptions(resume="exact", store=False)) for prompt in conversations]
        for request, prompt in zip(requests, conversations, strict=True):
            response = request.result(WAIT_SECONDS)
            tally.add(f"{batch} at once, no window: {response.window}", response.tokens == alone(model, prompt, 12))


def bounded(share: Share) -> Tally:
    """Bounded replay where the hit is one window at most begins at the prompt's start."""
    tally, cases = Tally(), []
    for config in (TINY,) if share.smoke else (TINY, MINI):
        first = config.slots + config.block
        cases += [(config, length) for length in range(first, first + config.block, 1 if config.block < 100 else 16)]
    blocks = {config: stored(model_of(config), text(3 * config.block))[0] for config, _ in cases}
    for config, length in share.items("bounded", cases, tally):
        model, prompt = model_of(config), text(3 * config.block)[:length]
        plan = plan_resume(config, length, len(blocks[config]), mode="bounded")
        equal = plan.window is WindowUse.BOUNDED and same(logits_of(model, prompt, plan, blocks[config]), logits_of(model, prompt))
        tally.add(f"{config.name}, {length} tokens", equal)
    return tally


def rollback(share: Share) -> Tally:
    """1 to 6 tokens taken back that end at, cross, or begin at a stored boundary: logits, blocks and the next entry as without them."""
    model, tally = model_of(TINY), Tally()
    size = model.config.block
    tokens, wrong = text(7 * size), text(size, 9)
    want = logits_of(model, tokens[: 6 * size + 3])
    _, entries = stored(model, tokens)
    backs = range(1, model.config.spare + 1)
    cases = [(back, kept) for back in backs for kept in range(3 * size - back, 3 * size + 2, 3 if share.smoke else 1)]
    for back, kept in share.items("rollback", cases, tally):
        state = model.begin(6 * size + 3)
        model.feed(state, tokens[:kept])
        model.feed(state, wrong[:back])
        state.rollback(back)
        logits = model.feed(state, tokens[kept : 6 * size + 3])[-model.config.slots :]
        equal = same((logits, state.export_blocks(0, 6)), want) and state.entries[6 * size] == entries[6 * size]
        tally.add(f"{back} tokens back to {kept}", equal)
    return tally


PARTS: Final[dict[str, Callable[[Share], Tally]]] = {
    "resume_bit_equal.text": texts,
    "resume_bit_equal.1_to_385": every_length,
    "resume_bit_equal.mini": mini_edges,
    "resume_bit_equal.20_long": mini_long,
    "bounded_short_equal": bounded,
    "rollback_equal": rollback,
}  # the longest first


def run(share: Share) -> dict[str, Tally]:
    with one_thread():
        return {name: part(share) for name, part in PARTS.items() if not share.smoke or part is not mini_long}


def main(directory: str, first: str, of: str) -> None:
    found = run(Share(Path(directory), smoke=False, first=int(first), of=int(of)))
    print(json.dumps({name: [tally.cases, tally.right, tally.wrong] for name, tally in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
