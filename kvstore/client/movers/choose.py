"""Which mover: by name, or by measuring here and now each that can run.

One measurement moves the planes of a long prompt, layer by layer, into pages in no order, as an engine has them after a while. Rounds of
all movers are interleaved with plain copies of as many bytes, so that a busy host slows all alike; the middle round counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.client.movers.cpu import CpuMover
from kvstore.client.movers.interface import MoveOutcome, Mover
from kvstore.client.native import U8
from kvstore.errors import ConfigError, KvstoreError, Unreachable
from kvstore.kernels._native import Loopback
from kvstore.layout import PRESETS, Layout

if TYPE_CHECKING:
    from torch import Tensor

NAMES: Final = ("cpu", "cuda", "cuda-kernel", "loopback")
AUTO: Final = "auto"
BLOCKS: Final = 256  # of 113,920 bytes: 29 MB, more than a cache holds, and an eighth of a second over slow PCIe
ROUNDS: Final = 7
ROUND_SECONDS: Final = 20.0
SHORT_BYTES: Final = 16 << 20  # at an engine's start: a quarter of a second in all, on a slow host
SHORT_BLOCKS_MAX: Final = 2048  # of small blocks: a move of more is rare
SHORT_ROUNDS: Final = 3
LAYOUT: Final = PRESETS["v41"]


@dataclass(frozen=True, slots=True)
class Measured:
    """`bytes_per_second` is None where it cannot run here, or did not bring the right bytes: `why`."""

    name: str
    bytes_per_second: float | None
    of_copy: float | None = None  # to a plain copy of as many bytes in one piece, in the same run
    why: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picked:
    """Of NAMES, and why this one: for a line at an engine's start."""

    name: str
    why: str


def pick(name: str, device: str = "cpu", *, rdma_device: str = AUTO, layout: Layout = LAYOUT) -> Picked:
    """The mover for pages on `device` (as torch calls it): `name`, or with "auto" the fastest by a short measurement of several.

    Raises ConfigError E156 where it cannot be had here, E157 for no name of a mover."""
    if name == AUTO:
        return _fastest(device, rdma_device, layout)
    pages: Any = np.zeros((1, 1), np.uint8)
    if device != "cpu":
        import torch

        pages = torch.zeros((1, 1), dtype=torch.uint8, device=device)
    try:
        make_mover(name, pages, rdma_device=rdma_device).close()
    except (ConfigError, Unreachable) as error:
        if error.code == "E157":
            raise
        raise ConfigError("E156", f"mover {name}", error.cause or error.what, "use another: kvstore doctor --measure") from None
    return Picked(name, "as it was set")


def _fastest(device: str, rdma_device: str, layout: Layout) -> Picked:
    if device == "cpu":
        try:
            Loopback(rdma_device)
        except KvstoreError as error:
            return Picked("cpu", f"pages are in host RAM, and loopback cannot run ({error.cause or error.what})")
    blocks = max(64, min(SHORT_BLOCKS_MAX, SHORT_BYTES // layout.block_bytes))
    measured = measure(device, rdma_device=rdma_device, blocks=blocks, rounds=SHORT_ROUNDS, layout=layout)
    name = chosen(measured)
    if not name:
        why = "; ".join(f"{each.name}: {each.why}" for each in measured)
        raise ConfigError("E156", f"mover for {device}", why, "see kvstore doctor --measure")
    rates = [f"{each.name} {each.bytes_per_second / 1e9:.2f} GB/s" for each in measured if each.bytes_per_second]
    return Picked(name, f"measured {', '.join(rates)}")


def make_mover(name: str, pages: Tensor | U8, *, rdma_device: str = AUTO) -> Mover:
    """`name`: one of NAMES, or "auto", as `pick` does. Raises ConfigError E156, E157."""
    if name == AUTO:
        device = "cpu" if isinstance(pages, np.ndarray) else str(pages.device)
        name = pick(AUTO, device, rdma_device=rdma_device).name
    if name not in NAMES:
        raise ConfigError("E157", f'mover "{name}"', fix=f"write one of {', '.join((AUTO, *NAMES))}")
    if name == "loopback":
        from kvstore.client.movers.loopback import LoopbackMover

        return LoopbackMover(pages, rdma_device)
    if name == "cpu":
        return CpuMover(pages)
    if isinstance(pages, np.ndarray):
        raise ConfigError("E156", f"mover {name}", "pages are in host RAM", "use mover cpu")
    if name == "cuda":
        from kvstore.client.movers.cuda import CudaMover

        return CudaMover(pages)
    from kvstore.client.movers.kernel import KernelMover

    return KernelMover(pages)


def chosen(measured: list[Measured]) -> str:
    """The fastest that brought the right bytes; "" where none did."""
    best = max(measured, key=lambda each: each.bytes_per_second or 0.0, default=None)
    return best.name if best is not None and best.bytes_per_second else ""


def measure(
    device: str = "cpu", *, rdma_device: str = AUTO, blocks: int = BLOCKS, rounds: int = ROUNDS, layout: Layout = LAYOUT
) -> list[Measured]:
    """Of each name, whether it runs here or not. `device`: where the pages are, as torch calls it. Takes seconds."""
    rng = np.random.default_rng(4)
    table = rng.permutation(2 * blocks)[:blocks]
    layers = [plane.columns for plane in layout.planes()]
    runs: dict[str, _Run] = {}
    results: list[Measured] = []
    for name in NAMES:
        try:
            runs[name] = _Run(name, device, rdma_device, table, layers, layout.block_bytes, rng)
            runs[name].check()
        except (KvstoreError, RuntimeError, OSError) as error:
            results.append(_dropped(runs, name, error))
    copies: list[float] = []
    plain = _plain_copy(device, blocks * layout.block_bytes)
    for _ in range(rounds):
        copies.append(plain())
        for name, run in list(runs.items()):
            try:
                run.seconds.append(run.once())
            except (KvstoreError, RuntimeError, OSError) as error:
                results.append(_dropped(runs, name, error))
    size = blocks * layout.block_bytes
    for name, run in runs.items():
        rate = size / median(run.seconds)
        results.append(Measured(name, rate, of_copy=rate * median(copies) / size, note=str(getattr(run.mover, "registration", ""))))
        run.mover.close()
    return sorted(results, key=lambda each: NAMES.index(each.name))


def _dropped(runs: dict[str, _Run], name: str, error: Exception) -> Measured:
    """It cannot run here, or failed: what it holds is given back."""
    if (run := runs.pop(name, None)) is not None:
        run.mover.close()
    told = error.cause or error.what if isinstance(error, KvstoreError) else str(error)
    return Measured(name, None, why=(told.splitlines() or ["no reason told"])[0])


class _Run:
    """One mover with memory of its own."""

    def __init__(
        self, name: str, device: str, rdma_device: str, table: Any, layers: list[slice], row_bytes: int, rng: np.random.Generator
    ) -> None:
        self.seconds: list[float] = []
        self._table, self._layers = table, layers
        count = int(2 * len(table))
        self.pages: Any = np.zeros((count, row_bytes), np.uint8)
        if device != "cpu":
            import torch

            self.pages = torch.zeros((count, row_bytes), dtype=torch.uint8, device=device)
        self.mover = make_mover(name, self.pages, rdma_device=rdma_device)
        try:
            self.rows = self.mover.host_rows(len(table))
        except BaseException:
            self.mover.close()
            raise
        self.rows[:] = rng.integers(0, 256, self.rows.shape, dtype=np.uint8)

    def once(self) -> float:
        began = time.monotonic()
        with self.mover.move(self.rows, self._table, self._layers, deadline_seconds=ROUND_SECONDS) as move:
            for _ in move:
                pass
        if move.outcome is not MoveOutcome.COMPLETE:
            raise ConfigError("E156", f"mover {self.mover.name}", f"took longer than {ROUND_SECONDS:g} s", "use another")
        return time.monotonic() - began

    def check(self) -> None:
        """Also warms up: streams, kernels, first touches."""
        self.once()
        there = self.pages if isinstance(self.pages, np.ndarray) else self.pages.cpu().numpy()
        if not np.array_equal(there[self._table], self.rows):
            raise ConfigError("E156", f"mover {self.mover.name}", "brought bytes that differ", "report it, with kvstore doctor's lines")


def _plain_copy(device: str, size: int) -> Callable[[], float]:
    """Seconds of one copy in one piece: what a mover could reach."""
    if device == "cpu":
        source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)

        def on_host() -> float:
            began = time.monotonic()
            np.copyto(target, source)
            return time.monotonic() - began

        return on_host
    import torch

    pinned, there = torch.ones(size, dtype=torch.uint8).pin_memory(), torch.ones(size, dtype=torch.uint8, device=device)

    def to_device() -> float:
        torch.cuda.synchronize(there.device)
        began = time.monotonic()
        there.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize(there.device)
        return time.monotonic() - began

    return to_device


def device_here(gpus: int) -> tuple[str, str]:
    """Where pages would be on this host, and why not in a GPU where there is one."""
    if not gpus:
        return "cpu", ""
    if find_spec("torch") is None:
        return "cpu", "torch is not installed"
    import torch

    return ("cuda:0", "") if torch.cuda.is_available() else ("cpu", "torch was built without CUDA, or sees no GPU")
