"""How much of a load is hidden behind compute that goes layer by layer: `python -m benchmarks.overlap [--blocks N] [--rounds N]
[--out FILE]` measures at ratios of compute to load from 0.25 to 4, prints a table and draws docs/overlap.svg.

A prompt of true-sized blocks comes from twelve daemons over TCP, plane by plane. Layers are matrix products, as many each as the ratio asks
for; a layer starts when the plane of its source is there. hidden share = 1 - (time of both - time of the compute alone) / time of the load
alone. Load and compute are kept apart by processor: the daemons and the client on one, the compute on another, alone and together alike.
Only caches and the memory's bandwidth are shared then; how much longer the compute itself took for it is told, and counts as not hidden.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

from benchmarks.harness import ROOT, SCALES, Bench, interleaved, seconds
from benchmarks.prompts import LAYOUT, are_bytes_of, chain_keys, full_extents, pretouched, store_in_turns
from benchmarks.rig import Rig, rig
from kvstore.client import PlaneReady
from kvstore.plots import Series, lines, save

PLANES: Final = LAYOUT.planes()
ENCODER_LAYERS, DECODER_LAYERS, SLOTS = 20, 20, 134  # of the layout's model
SOURCES: Final = (2, 8, 14, 20)  # layers that own rows, one plane each; those before the first need none
SUFFIX_TOKENS: Final = 3_072  # computed: 4 of 100 tokens of 600 blocks
PRODUCT_ROWS: Final = 192  # of three square matrices, which stay in a core's own cache
RATIOS: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
WAIT_SECONDS: Final = 30.0


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


def processors() -> tuple[set[int], set[int]]:
    """Where the load runs, and where the compute does; the same where there is one only."""
    own = sorted(os.sched_getaffinity(0))
    return {own[0]}, {own[-1]}


@contextmanager
def confined(to: set[int]) -> Iterator[None]:
    """This thread, and what it starts meanwhile: threads of the client, daemons."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, to)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Compute:
    """Layers of matrix products on a thread and a processor of their own."""

    def __init__(self, where: set[int]) -> None:
        dice = torch.Generator().manual_seed(1)
        self._left, self._right = (torch.randn(PRODUCT_ROWS, PRODUCT_ROWS, generator=dice) for _ in range(2))
        self._out = torch.empty(PRODUCT_ROWS, PRODUCT_ROWS)
        self.pool = ThreadPoolExecutor(1, "compute", initializer=self._settle, initargs=(where,))
        self.calibrate()

    def calibrate(self) -> None:
        """What a product takes now."""
        self.product_seconds = statistics.median(self.pool.submit(self._product_seconds).result() for _ in range(5))

    def _settle(self, where: set[int]) -> None:
        """Of the pool's thread: torch keeps its number of threads for each thread that calls it."""
        os.sched_setaffinity(0, where)
        torch.set_num_threads(1)

    def _products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)

    def _product_seconds(self) -> float:
        return seconds(lambda: self._products(200)) / 200

    def run(self, shape: Shape, layer_seconds: float, arrived: Sequence[threading.Event]) -> tuple[float, float]:
        """On the pool's thread: all layers, each after its plane. Seconds that it computed; when it ended."""
        busy = 0.0
        for plane, work in shape.pieces:
            if plane is not None and not arrived[plane].wait(WAIT_SECONDS):
                raise RuntimeError(f"plane {plane} has not come")
            busy += seconds(lambda work=work: self._products(round(work * layer_seconds / self.product_seconds)))  # type: ignore[misc]  # called at once
        return busy, time.perf_counter()


@dataclass
class Times:
    """Seconds of one shape at one ratio, of each round."""

    load: list[float] = field(default_factory=list)  # alone, plane by plane
    compute: list[float] = field(default_factory=list)  # alone
    streamed: list[float] = field(default_factory=list)
    whole_first: list[float] = field(default_factory=list)  # loaded in the order of the disk, then computed
    busy: list[float] = field(default_factory=list)  # of the compute while the load goes on

    def hidden(self, together: Sequence[float]) -> float:
        return 1 - (statistics.median(together) - statistics.median(self.compute)) / statistics.median(self.load)

    def ratio(self, shape: Shape) -> float:
        """As it was: of one layer's compute to one layer's load."""
        return statistics.median(self.compute) / shape.work / (statistics.median(self.load) / shape.layers)

    def note(self, shape: Shape) -> str:
        load, compute, streamed, whole = (1e3 * statistics.median(x) for x in (self.load, self.compute, self.streamed, self.whole_first))
        slower = statistics.median(self.busy) * 1e3 / compute - 1
        return (
            f"load {load:.0f}, compute {compute:.0f}, both {streamed:.0f}, one after the other {whole:.0f} ms "
            f"(hidden {self.hidden(self.whole_first):+.2f}); compute {slower:+.0%} beside a load; ratio {self.ratio(shape):.2f}"
        )


class Overlap:
    """A stored prompt, a place for it, and a thread that computes."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        where_load, self.where_compute = processors()
        stack.enter_context(confined(where_load))
        self.apart = where_load != self.where_compute
        blocks = bench.scale.chain_blocks
        self.rig: Rig = rig(bench, stack, "overlap")
        self.keys, self.place = chain_keys(7, blocks), pretouched(blocks)
        store_in_turns(self.rig.client, self.keys, full_extents(blocks))
        self.compute = Compute(self.where_compute)
        stack.callback(self.compute.pool.shutdown)
        for _ in range(3):  # into the page cache, and the client's first connections
            self._load()

    def times(self, shape: Shape, ratio: float, rounds: int, warm_up: int) -> Times:
        """`ratio`: of one layer's compute to one layer's load."""
        self.compute.calibrate()
        layer = ratio * statistics.median(self._load() for _ in range(5)) / shape.layers
        found = Times()
        takes = (
            self._load, lambda: self._alone(shape, layer), lambda: self._streamed(shape, layer, found.busy),
            lambda: self._whole_first(shape, layer),
        )  # fmt: skip
        found.load, found.compute, found.streamed, found.whole_first = interleaved(rounds, *takes, warm_up=warm_up)
        del found.busy[:warm_up]
        return found

    def _begin(self) -> None:
        self.place[:, ::4096] = 0  # a block that is not loaded shows
        self.ticket = self.rig.client.lookup(self.keys)

    def _planes(self) -> Iterator[PlaneReady]:
        for at, ready in enumerate(self.rig.client.planes(self.ticket, self.place)):
            if (ready.plane, ready.blocks) != (at, len(self.keys)):
                raise RuntimeError(f"plane {ready.plane} of {ready.blocks} blocks")
            yield ready

    def _check(self) -> None:
        if not are_bytes_of(self.keys, self.place):
            raise RuntimeError("wrong bytes")

    def _load(self) -> float:
        self._begin()
        took = seconds(lambda: sum(1 for _ in self._planes()))
        self._check()
        return took

    def _started(self, shape: Shape, layer: float, arrived: Sequence[threading.Event]) -> tuple[float, float]:
        return self.compute.pool.submit(self.compute.run, shape, layer, arrived).result()

    def _alone(self, shape: Shape, layer: float) -> float:
        begin = time.perf_counter()
        return self._started(shape, layer, _all_there())[1] - begin

    def _whole_first(self, shape: Shape, layer: float) -> float:
        self._begin()
        begin = time.perf_counter()
        self.rig.client.load(self.ticket, self.place)
        end = self._started(shape, layer, _all_there())[1]
        self._check()
        return end - begin

    def _streamed(self, shape: Shape, layer: float, busy: list[float]) -> float:
        arrived = [threading.Event() for _ in PLANES]
        self._begin()
        begin = time.perf_counter()
        computing = self.compute.pool.submit(self.compute.run, shape, layer, arrived)
        for ready in self._planes():
            arrived[ready.plane].set()
        computed, end = computing.result()
        busy.append(computed)
        self._check()
        return end - begin


def _all_there() -> list[threading.Event]:
    arrived = [threading.Event() for _ in PLANES]
    for event in arrived:
        event.set()
    return arrived


def draw(found: dict[tuple[str, float], Times], path: Path) -> None:
    """Measured shares over ratios as they were, beside what the planes' sizes allow."""
    series = []
    fine = [2 ** (step / 8 - 2) for step in range(33)]
    for shape in (PREFILL, ALIKE):
        points = sorted((times.ratio(shape), times.hidden(times.streamed)) for (name, _), times in found.items() if name == shape.name)
        if points:
            series.append(Series(f"{shape.name}: measured", [x for x, _ in points], [y for _, y in points], kind="points"))
        series.append(Series(f"{shape.name}: what its planes allow", fine, [allowed(shape, x) for x in fine]))
    figure = lines(
        series, title="Load time hidden behind compute, layer by layer", x_label="compute of a layer / load of a layer",
        y_label="share of the load's time", x_log=True, x_ticks={x: f"{x:g}" for x in (0.25, 0.5, 1.0, 2.0, 4.0)}, y_range=(0, 1.02),
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
    found: dict[tuple[str, float], Times] = {}
    if asked.rounds:
        found = _measured(asked.blocks, asked.rounds)
    draw(found, asked.out)
    print(asked.out)
    return 0


def _measured(blocks: int, rounds: int) -> dict[tuple[str, float], Times]:
    found = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as scratch, ExitStack() as stack:
        scale = replace(SCALES["ci"], chain_blocks=blocks)
        overlap = Overlap(Bench(scale, Path(scratch)), stack)
        for shape in (PREFILL, ALIKE):
            for ratio in RATIOS:
                times = found[shape.name, ratio] = overlap.times(shape, ratio, rounds, warm_up=1)
                share = f"{times.hidden(times.streamed):.2f} of {allowed(shape, ratio):.2f}"
                print(f"{shape.name:<16} {ratio:>5g}  hidden {share}; {times.note(shape)}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
