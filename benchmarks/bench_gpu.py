"""Kernels of the GPU path beside the copy bandwidth of the same GPU in the same run. Where there is no GPU there is no figure.

Bytes are those that cross the memory bus: read and written. A copy of n bytes moves 2 n, a scatter of n bytes 2 n, rebuilding two of ten
shards of n bytes 12 n. Buffers are far larger than any cache at full size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness import Bench, Figure, NotMeasurable, at_least, interleaved, measures, spread
from kvstore.kernels.gpu import PageTable, Part, rebuild, scatter
from kvstore.layout import PRESETS, Plane

if TYPE_CHECKING:
    import torch

K, M = 10, 2
PAGE_ROWS = 64
BLOCKS_COUNT = 16_384  # 1.9 GB of v41: the shortest of the launches takes some 100 us at 4 TB/s, longer than starting it


@dataclass(frozen=True)
class Take:
    """What is timed, the bytes that it moves, and a check of what it did."""

    run: Callable[[], None]
    moved_bytes: int
    check: Callable[[], None]


def takes(device: str, blocks_count: int) -> dict[str, Take]:
    """By id: scatter of all sections of v41 and of one layer of MLA rows; one and two data shards rebuilt; and a copy."""
    v41 = PRESETS["v41"]
    main_rows = [Part(plane.offset_bytes + rows * 68, rows, 288) for plane, rows in zip(v41.planes(K), (64, 64, 64, 128), strict=True)]
    index_rows = [Part(plane.offset_bytes, rows, 68) for plane, rows in zip(v41.planes(K), (64, 64, 64, 128), strict=True)]
    return {
        "gpu_scatter_vs_copy.v41": _scatter(device, blocks_count, v41.planes(K), [index_rows, main_rows]),
        "gpu_scatter_vs_copy.mla": _scatter(device, blocks_count, (Plane(0, 147_456, 14_752),), [[Part(0, 128, 1152)]]),
        "gpu_decode_vs_copy.one_lost": _rebuild(device, blocks_count, (*range(1, 11),)),
        "gpu_decode_vs_copy.two_lost": _rebuild(device, blocks_count, (*range(2, 12),)),
        "copy": _copy(device, blocks_count * v41.block_bytes),
    }


def _random(device: str, *shape: int) -> torch.Tensor:
    import torch

    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def _scatter(device: str, blocks_count: int, planes: tuple[Plane, ...], kinds: list[list[Part]]) -> Take:
    import torch

    arrived = [_random(device, K, blocks_count, plane.shard_bytes) for plane in planes]
    caches, moved_bytes = [], 0
    for parts in kinds:
        for plane, zone, part in zip(planes, arrived, parts, strict=True):
            count = -(-blocks_count * part.rows // PAGE_ROWS)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
            caches.append((plane, zone, part, _random(device, count, PAGE_ROWS, part.row_bytes), PageTable(order.tolist(), count, device)))
            moved_bytes += 2 * blocks_count * part.rows * part.row_bytes

    def run() -> None:
        for plane, zone, part, pages, table in caches:
            scatter(zone, part, pages, table, plane_offset_bytes=plane.offset_bytes)

    def check() -> None:
        for plane, zone, part, pages, table in caches:
            begin = part.offset_bytes - plane.offset_bytes
            whole = zone.transpose(0, 1).reshape(blocks_count, -1)[:, begin : begin + part.rows * part.row_bytes]
            assert torch.equal(
                pages[table.pages].reshape(-1, part.row_bytes)[: blocks_count * part.rows], whole.reshape(-1, part.row_bytes)
            )

    return Take(run, moved_bytes, check)


def _rebuild(device: str, blocks_count: int, have: tuple[int, ...]) -> Take:
    import torch

    from kvstore.erasure import codec

    shard_bytes = PRESETS["v41"].planes(K)[3].shard_bytes
    zone = _random(device, K + M, blocks_count, shard_bytes)
    lost = K - sum(number < K for number in have)
    survivors = [have] * blocks_count

    def run() -> None:
        rebuild(zone, K, M, survivors)

    def check() -> None:
        first = zone[:, 0].cpu().numpy()
        data = torch.from_numpy(codec("isal", K, M).decode([(number, first[number]) for number in have]))
        assert torch.equal(zone[:K, 0].cpu(), data)

    return Take(run, (K + lost) * blocks_count * shard_bytes, check)


def _copy(device: str, count_bytes: int) -> Take:
    import torch

    source = _random(device, count_bytes)
    target = torch.empty_like(source)

    def check() -> None:
        assert torch.equal(target, source)

    return Take(lambda: (target.copy_(source), None)[1], 2 * count_bytes, check)


def gpu_seconds(run: Callable[[], None]) -> float:
    """Between two events on the current stream."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch has no types for it
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


@measures("gpu_scatter_vs_copy", "gpu_decode_vs_copy")
def gpu(bench: Bench) -> dict[str, Figure]:
    """Moved bytes a second / those of a copy, medians of interleaved rounds. NotMeasurable without a GPU."""
    try:
        import torch
        import triton  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise NotMeasurable(f"{error}; pip install 'kvstore[gpu]'") from error
    if not torch.cuda.is_available():
        raise NotMeasurable("there is no GPU here")
    given = takes("cuda", 64 if bench.scale.name == "smoke" else BLOCKS_COUNT)
    times = interleaved(bench.scale.rounds, *(lambda take=take: gpu_seconds(take.run) for take in given.values()))
    for take in given.values():
        take.check()
    speeds = {name: take.moved_bytes / statistics.median(times[at]) / 1e9 for at, (name, take) in enumerate(given.items())}
    copy = speeds.pop("copy")
    name = torch.cuda.get_device_name()
    return {
        part: Figure(speed / copy, at_least(0.6), f"{speed:.0f} of {copy:.0f} GB/s read and written, {name}; {spread(times[at])}")
        for at, (part, speed) in enumerate(speeds.items())
    }
