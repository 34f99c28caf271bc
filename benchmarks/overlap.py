"""How much of a load is hidden behind compute that goes layer by layer: `python -m benchmarks.overlap [--blocks N] [--rounds N]
[--out FILE]` measures at ratios of compute to load from 0.25 to 4, prints a table and draws docs/overlap.svg.

A prompt of true-sized blocks comes from twelve daemons over TCP, plane by plane. One thread plays the engine: it begins the load,
computes the layers that need no plane, then each layer when its plane is there.
hidden share = 1 - (time of both - time of the compute alone) / time of that load alone; wall times, from the beginning of the load to the
end of the last layer. The note also gives the share of a load in the order of the disk, which is a little faster.

Compute is one of two kinds:
    gpu   a queue of layers that take their time whatever the processors do, as a GPU's does: all processors are left to the load
    cpu   matrix products on a processor of their own, with the engine's thread; daemons and client are confined to the other, in all
          arrangements alike. Caches and the memory's bandwidth are shared: what the compute takes longer for it counts as not hidden.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

import torch

from benchmarks.harness import ROOT, SCALES, Bench, interleaved, seconds
from benchmarks.prompts import LAYOUT, are_bytes_of, chain_keys, full_extents, pretouched, store_in_turns
from benchmarks.rig import Rig, rig
from kvstore.client import PlaneReady
from kvstore.client.ticket import Ticket
from kvstore.plots import Series, lines, save

PLANES: Final = LAYOUT.planes()
ENCODER_LAYERS, DECODER_LAYERS, SLOTS = 20, 20, 134  # of the layout's model
SOURCES: Final = (2, 8, 14, 20)  # layers that own rows, one plane each; those before the first need none
SUFFIX_TOKENS: Final = 3_072  # computed: 4 of 100 tokens of 600 blocks
PRODUCT_ROWS: Final = 192  # of three square matrices, which stay in a core's own cache
RATIOS: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
LOAD_NICE: Final = 5  # of the client's threads and the daemons
KINDS: Final = {"gpu": "compute leaves the processors to the load, as a GPU does", "cpu": "compute on a processor of its own"}


@dataclass(frozen=True)
class Shape:
    """A model's layers as (plane they wait for or None, work in encoder layers), those of one plane together."""

    name: str
    pieces: tuple[tuple[int | None, float], ...]
    layers: float  # that the load is divided by, to say what one layer of it is

    @property
    def work(self) -> float:
        return sum(work for _, work in self.pieces)


def _shape(name: str, decoder_layer: float, layers: float) -> Shape:
    bounds = (0, *SOURCES)
    pieces: list[tuple[int | None, float]] = [
        (plane - 1 if plane else None, float(end - begin)) for plane, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]
    return Shape(name, (*pieces, (len(SOURCES) - 1, DECODER_LAYERS * decoder_layer)), layers)


# Encoder layers run over all tokens that are computed, decoder layers over the prompt's last 134: the encoder is the prefill.
PREFILL: Final = _shape("prefill", SLOTS / SUFFIX_TOKENS, ENCODER_LAYERS)
# As if every layer ran over all of them: half of the work then waits for the last plane, which is two fifths of the bytes.
ALIKE: Final = _shape("all layers alike", 1.0, ENCODER_LAYERS + DECODER_LAYERS)


def allowed(shape: Shape, ratio: float) -> float:
    """The hidden share where planes come in proportion to their bytes and neither disturbs the other. The load takes 1."""
    total = sum(plane.bytes for plane in PLANES)
    arrivals = [sum(plane.bytes for plane in PLANES[: at + 1]) / total for at in range(len(PLANES))]
    layer, now = ratio / shape.layers, 0.0
    for plane, work in shape.pieces:
        now = max(now, arrivals[plane] if plane is not None else 0.0) + work * layer
    return 1 - (now - shape.work * layer)


def processors(kind: str) -> tuple[set[int], set[int]]:
    """Where the load runs, and where the engine's thread does."""
    own = sorted(os.sched_getaffinity(0))
    return (set(own), set(own)) if kind == "gpu" else ({own[0]}, {own[-1]})


def give_way() -> None:
    """This thread, and what it starts, to threads like those before: they run at once when they wake, as where a processor is idle."""
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + LOAD_NICE)
    else:  # chrt, on a busy machine
        os.sched_setparam(0, os.sched_param(max(1, os.sched_getparam(0).sched_priority - 1)))


def thread(where: set[int], settle: Callable[[], None]) -> ThreadPoolExecutor:
    """One, on these processors."""

    def begin() -> None:
        os.sched_setaffinity(0, where)
        settle()

    return ThreadPoolExecutor(1, initializer=begin)


class Compute(Protocol):
    def layers(self, work_seconds: float) -> None:
        """Puts layers of so much work into the queue, behind those before them."""

    def finish(self) -> float:
        """Returns when all is done: seconds that it computed."""


class Queue:
    """A GPU's, as far as a load can tell: work takes its time from when it is put in, or from the end of that before it."""

    def __init__(self) -> None:
        self._free = self._busy = 0.0

    def layers(self, work_seconds: float) -> None:
        self._free = max(self._free, time.perf_counter()) + work_seconds
        self._busy += work_seconds

    def finish(self) -> float:
        while (left := self._free - time.perf_counter()) > 0:
            time.sleep(left)
        busy, self._busy = self._busy, 0.0
        return busy


class Products:
    """Matrix products, on the calling thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # torch keeps it for each thread that calls
        dice = torch.Generator().manual_seed(1)
        self._left, self._right = (torch.randn(PRODUCT_ROWS, PRODUCT_ROWS, generator=dice) for _ in range(2))
        self._out = torch.empty(PRODUCT_ROWS, PRODUCT_ROWS)
        self._busy = 0.0
        self._product_seconds = statistics.median(seconds(lambda: self._multiply(200)) / 200 for _ in range(5))

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)

    def layers(self, work_seconds: float) -> None:
        self._busy += seconds(lambda: self._multiply(round(work_seconds / self._product_seconds)))

    def finish(self) -> float:
        busy, self._busy = self._busy, 0.0
        return busy


@dataclass
class Times:
    """Seconds of one shape at one ratio, of each round."""

    load: list[float] = field(default_factory=list)  # alone, plane by plane
    whole: list[float] = field(default_factory=list)  # alone, in the order of the disk
    compute: list[float] = field(default_factory=list)  # alone
    streamed: list[float] = field(default_factory=list)
    whole_first: list[float] = field(default_factory=list)  # loaded in the order of the disk, then computed
    busy: list[float] = field(default_factory=list)  # of the compute while the load goes on
    arrivals: list[list[float]] = field(default_factory=list)  # of the planes of loads alone, from their begin

    def hidden(self) -> float:
        return self._of(self.streamed, self.load)

    def gained(self) -> float:
        """Of what a host waits for that loads in the order of the disk and then computes."""
        return self._of(self.streamed, self.whole)

    def _of(self, together: Sequence[float], load: Sequence[float]) -> float:
        # Of a round, whose layers take alike.
        longer = statistics.median(both - alone for both, alone in zip(together, self.compute, strict=True))
        return 1 - longer / statistics.median(load)

    def ratio(self, shape: Shape) -> float:
        """As it was: of one layer's compute to one layer's load."""
        return statistics.median(self.compute) / shape.work / (statistics.median(self.load) / shape.layers)

    def note(self, shape: Shape) -> str:
        load, whole, compute, streamed, first = (
            1e3 * statistics.median(x) for x in (self.load, self.whole, self.compute, self.streamed, self.whole_first)
        )
        planes = ", ".join(f"{1e3 * statistics.median(times):.1f}" for times in zip(*self.arrivals, strict=True))
        slower = statistics.median(self.busy) * 1e3 / compute - 1
        return (
            f"load {load:.1f} ms (planes after {planes}), compute {compute:.1f}, both {streamed:.1f}; in the order of the disk {whole:.1f} "
            f"({self.gained():.2f} of it hidden), then compute {first:.1f} (hidden {self._of(self.whole_first, self.whole):+.2f}); "
            f"compute {slower:+.0%} beside a load; ratio {self.ratio(shape):.2f}"
        )


class Overlap:
    """A stored prompt, a place for it, and a thread that plays the engine."""

    def __init__(self, bench: Bench, stack: ExitStack, kind: str) -> None:
        where_load, where_engine = processors(kind)
        self.apart = where_load != where_engine
        loader = stack.enter_context(thread(where_load, give_way))
        self._engine = stack.enter_context(thread(where_engine, lambda: None))
        blocks = bench.scale.chain_blocks
        self.rig: Rig = loader.submit(lambda: rig(bench, stack, f"overlap-{kind}")).result()
        self.keys, self.place = chain_keys(7, blocks), pretouched(blocks)
        store_in_turns(self.rig.client, self.keys, full_extents(blocks))
        self._kind = kind
        self._lately: deque[float] = deque(maxlen=7)  # seconds of loads
        self._calibrate()
        for _ in range(3):  # into the page cache, and the client's first connections
            self._whole()
            self._load([])

    def _calibrate(self) -> None:
        made: Callable[[], Compute] = Queue if self._kind == "gpu" else Products
        self._compute = self._engine.submit(made).result()

    def times(self, shape: Shape, ratio: float, rounds: int, warm_up: int) -> Times:
        """`ratio`: of one layer's compute to one layer's load."""
        self._calibrate()
        self._lately.clear()
        for _ in range(3):
            self._load([])
        found = Times()

        def layer() -> float:  # the same within a round, which a load begins or ends
            return ratio * statistics.median(self._lately) / shape.layers

        takes = (
            lambda: self._load(found.arrivals), self._whole, lambda: self._alone(shape, layer()),
            lambda: self._streamed(shape, layer(), found.busy), lambda: self._whole_first(shape, layer()),
        )  # fmt: skip
        found.load, found.whole, found.compute, found.streamed, found.whole_first = interleaved(rounds, *takes, warm_up=warm_up)
        del found.busy[:warm_up], found.arrivals[:warm_up]
        return found

    def _timed(self, part: Callable[[Ticket, float], object], loads: bool = True) -> float:
        """Seconds of what the engine's thread does. What it loads is checked."""
        self.place[:, ::4096] = 0  # a block that is not loaded shows
        ticket = self.rig.client.lookup(self.keys)
        took = self._engine.submit(lambda: seconds(lambda: part(ticket, time.perf_counter()))).result()
        if loads and not are_bytes_of(self.keys, self.place):
            raise RuntimeError("wrong bytes")
        return took

    @contextmanager
    def _loading(self, ticket: Ticket) -> Iterator[Iterator[PlaneReady]]:
        client, blocks = self.rig.client, len(self.keys)
        load = client.begin_load(ticket, self.place, hedge="lazy", deadline_seconds=None, blocks=range(blocks), by_plane=True)
        yield load.planes()
        if client.counted(load, ticket, blocks).blocks != blocks:
            raise RuntimeError("a load fell short")

    def _whole(self) -> float:
        return self._timed(lambda ticket, _: self.rig.client.load(ticket, self.place))

    def _load(self, arrivals: list[list[float]]) -> float:
        def load(ticket: Ticket, begin: float) -> None:
            with self._loading(ticket) as planes:
                arrivals.append([time.perf_counter() - begin for _ in planes])

        took = self._timed(load)
        self._lately.append(took)
        return took

    def _run(self, shape: Shape, layer_seconds: float, planes: Iterator[PlaneReady] | None) -> float:
        """All layers, each after its plane where there are planes to wait for. Seconds that it computed."""
        for plane, work in shape.pieces:
            if plane is not None and planes is not None:
                ready = next(planes)
                if (ready.plane, ready.blocks) != (plane, len(self.keys)):
                    raise RuntimeError(f"plane {ready.plane} of {ready.blocks} blocks, not {plane}")
                if plane + 1 == len(PLANES):
                    next(planes, None)  # ends the load
            self._compute.layers(work * layer_seconds)
        return self._compute.finish()

    def _alone(self, shape: Shape, layer: float) -> float:
        return self._timed(lambda *_: self._run(shape, layer, None), loads=False)

    def _whole_first(self, shape: Shape, layer: float) -> float:
        def load_and_run(ticket: Ticket, _: float) -> None:
            self.rig.client.load(ticket, self.place)
            self._run(shape, layer, None)

        return self._timed(load_and_run)

    def _streamed(self, shape: Shape, layer: float, busy: list[float]) -> float:
        def load_and_run(ticket: Ticket, _: float) -> None:
            with self._loading(ticket) as planes:
                busy.append(self._run(shape, layer, planes))

        return self._timed(load_and_run)


def draw(found: dict[tuple[str, str, float], Times], path: Path) -> None:
    """Measured shares over ratios as they were, beside what the planes' sizes allow."""
    series = []
    fine = [2 ** (step / 8 - 2) for step in range(33)]
    for shape in (PREFILL, ALIKE):
        for kind in KINDS:
            points = sorted((t.ratio(shape), t.hidden()) for (of, name, _), t in found.items() if (of, name) == (kind, shape.name))
            if points:
                series.append(Series(f"{shape.name}, {kind}: measured", [x for x, _ in points], [y for _, y in points], kind="points"))
        series.append(Series(f"{shape.name}: what its planes allow", fine, [allowed(shape, x) for x in fine]))
    figure = lines(
        series, title="Load time hidden behind compute, layer by layer", x_label="compute of a layer / load of a layer",
        y_label="share of the load's time", x_log=True, x_ticks={x: f"{x:g}" for x in (0.25, 0.5, 1.0, 2.0, 4.0)}, y_range=(0, 1.1),
    )  # fmt: skip
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description="How much of a load is hidden behind compute.")
    parser.add_argument("--blocks", type=int, default=SCALES["ci"].chain_blocks, help="of the prompt (default: %(default)s, 68 MB)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=SCALES["ci"].rounds,
        help="of each ratio (default: %(default)s; 0: the plot of what planes allow alone)",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "overlap.svg", help="the plot (default: docs/overlap.svg)")
    asked = parser.parse_args(arguments)
    found: dict[tuple[str, str, float], Times] = {}
    if asked.rounds:
        found = _measured(asked.blocks, asked.rounds)
    draw(found, asked.out)
    print(asked.out)
    return 0


def _measured(blocks: int, rounds: int) -> dict[tuple[str, str, float], Times]:
    found = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as scratch, ExitStack() as stack:
            overlap = Overlap(Bench(replace(SCALES["ci"], chain_blocks=blocks), Path(scratch)), stack, kind)
            for shape in (PREFILL, ALIKE):
                for ratio in RATIOS:
                    times = found[kind, shape.name, ratio] = overlap.times(shape, ratio, rounds, warm_up=1)
                    share = f"{times.hidden():.2f} of {allowed(shape, ratio):.2f}"
                    print(f"{kind} {shape.name:<16} {ratio:>5g}  hidden {share}; {times.note(shape)}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
