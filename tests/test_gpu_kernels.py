"""The kernels equal their plain references bit by bit: 100 random page tables, all 66 survivor sets, sums of every kind of length."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_tools import DEVICE, back, kernels_run, there

from benchmarks import bench_gpu
from kvstore.erasure import codec
from kvstore.errors import CodecError, LayoutError, MisuseError
from kvstore.kernels import hash_reference
from kvstore.kernels.gpu import Identity, PageTable, Part, gather, piece_sums, plane_digests, rebuild, scatter
from kvstore.kernels.gpu.coding import coefficients, lost_of
from kvstore.kernels.gpu.reference import gather_reference, rebuild_reference, scatter_reference
from kvstore.layout import PRESETS, shard_bytes_of

__all__ = ["kernels_run"]
pytestmark = pytest.mark.usefixtures("kernels_run")

# (k, part, bytes behind it, rows of a page): sections of v41 and odd ones, from 1 byte to 8 a step.
SHAPES = [
    (10, Part(0, 64, 68), 18432, 16),
    (10, Part(4352, 64, 288), 0, 64),
    (10, Part(3, 20, 13), 4, 7),
    (1, Part(0, 1, 1), 0, 1),
    (4, Part(2, 9, 6), 1, 5),
    (3, Part(0, 33, 24), 8, 128),
    (7, Part(12, 5, 100), 31, 2),
    (32, Part(1, 128, 17), 0, 3),
]


def paged(rng: np.random.Generator, part: Part, behind_bytes: int, k: int, page_rows: int, blocks: int, whole: bool):
    """Random planes, pages, table and first row of a request."""
    plane_bytes = part.offset_bytes + part.rows * part.row_bytes + behind_bytes
    shape = (1, blocks, plane_bytes) if whole else (k, blocks, shard_bytes_of(plane_bytes, k))
    first_row = int(rng.choice([0, 7, 16, 32, 39]))  # some let rows be moved together
    needed = -(-(first_row + blocks * part.rows) // page_rows)
    pages_count = needed + int(rng.integers(0, 9))
    table = rng.permutation(pages_count)[:needed]
    pages = rng.integers(0, 256, (pages_count, page_rows, part.row_bytes), np.uint8)
    return rng.integers(0, 256, shape, np.uint8), pages, table, first_row


@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_page_tables_are_scattered_and_gathered_as_the_references_do(seed: int) -> None:
    """25 each: shards or whole planes, pages that a block straddles or shares, blocks left out, canaries in all that is not named."""
    rng = np.random.default_rng(seed)
    for number in range(25):
        k, part, behind_bytes, page_rows = SHAPES[number % len(SHAPES)]
        planes, pages, table, first_row = paged(rng, part, behind_bytes, k, page_rows, int(rng.integers(1, 4)), number % 3 == 0)
        good = rng.integers(0, 2, planes.shape[1]).astype(np.uint8) if number % 2 else None
        moved = Part(part.offset_bytes + 1000, part.rows, part.row_bytes)
        names = PageTable(table.tolist(), len(pages), DEVICE)
        there_pages, there_planes = there(pages), there(planes)
        gather(there_planes, moved, there_pages, names, first_row=first_row, plane_offset_bytes=1000)
        gathered = planes.copy()
        gather_reference(gathered, part, pages, table, first_row)
        assert np.array_equal(back(there_planes), gathered), (seed, number)
        kept = None if good is None else there(good)
        scatter(there(planes), moved, there_pages, names, first_row=first_row, plane_offset_bytes=1000, good=kept)
        scatter_reference(planes, part, pages, table, first_row, good=good)
        assert np.array_equal(back(there_pages), pages), (seed, number)


@pytest.mark.parametrize("seed", range(10, 13))
def test_any_sizes_are_moved_as_the_references_do(seed: int) -> None:
    """Ten each of whatever comes: rows of 1 to 64 bytes, 1 to 40 of them, pages of 1 to 40, 1 to 32 shards."""
    rng = np.random.default_rng(seed)
    for number in range(10):
        part = Part(int(rng.integers(0, 20)), int(rng.integers(1, 41)), int(rng.integers(1, 65)))
        k, page_rows = int(rng.integers(1, 33)), int(rng.integers(1, 41))
        planes, pages, table, first_row = paged(rng, part, int(rng.integers(0, 20)), k, page_rows, 2, number % 2 == 0)
        names = PageTable(table.tolist(), len(pages), DEVICE)
        there_pages, there_planes = there(pages), there(np.zeros_like(planes))
        scatter(there(planes), part, there_pages, names, first_row=first_row)
        scatter_reference(planes, part, pages, table, first_row)
        assert np.array_equal(back(there_pages), pages), (seed, number)
        gather(there_planes, part, there_pages, names, first_row=first_row)
        gathered = np.zeros_like(planes)
        gather_reference(gathered, part, pages, table, first_row)
        assert np.array_equal(back(there_planes), gathered), (seed, number)


def test_blocks_and_pages_may_lie_apart_and_anywhere() -> None:
    """Blocks one byte off any alignment, K and V interleaved by page: strides of everything but the last dimension."""
    rng = np.random.default_rng(5)
    part = Part(40, 32, 24)
    blocks = rng.integers(0, 256, (3, 1001), np.uint8)
    cache = rng.integers(0, 256, (2, 9, 16, 3, 24), np.uint8)
    there_blocks, there_cache = there(blocks), there(cache)
    table = [7, 2, 4, 1, 8, 0, 5]
    names = PageTable(table, 9, DEVICE)
    for kv, offset in ((0, 0), (1, 5)):
        scatter(there_blocks[:, offset : offset + 900], part, there_cache[kv, :, :, 1], names, first_row=7)
        pages = np.ascontiguousarray(cache[kv, :, :, 1])
        scatter_reference(blocks[None, :, offset : offset + 900], part, pages, table, 7)
        cache[kv, :, :, 1] = pages
    assert np.array_equal(back(there_cache), cache)
    out = there(np.zeros_like(blocks))
    gather(out[:, 5:905], part, there_cache[1, :, :, 1], names, first_row=7)
    expected = np.zeros_like(blocks)
    expected[:, 45 : 45 + 32 * 24] = blocks[:, 45 : 45 + 32 * 24]
    assert np.array_equal(back(out), expected)


def test_pages_that_are_not_there_and_buffers_that_do_not_fit_are_refused() -> None:
    planes, pages = torch.zeros((10, 2, 64), dtype=torch.uint8), torch.zeros((4, 8, 12), dtype=torch.uint8)
    table = PageTable([0, 1], 4, "cpu")
    for wrong in ([0, 4], [-1, 0], [1, 1], [[0]]):
        with pytest.raises(LayoutError, match="E509"):
            PageTable(wrong, 4, "cpu")
    part = Part(0, 8, 12)
    for call in (
        lambda: scatter(planes, Part(0, 8, 13), pages, table),
        lambda: scatter(planes, Part(600, 8, 12), pages, table),
        lambda: scatter(planes, part, pages, table, plane_offset_bytes=1),
        lambda: scatter(planes, part, pages, table, first_row=1),
        lambda: scatter(planes, part, pages, table, first_row=-1),
        lambda: scatter(planes, part, pages[:3], table),
        lambda: scatter(planes, part, pages, table, good=torch.zeros(3, dtype=torch.uint8)),
        lambda: scatter(planes, part, pages, table, good=torch.zeros(2, dtype=torch.bool)),
        lambda: scatter(planes.int(), part, pages, table),
        lambda: scatter(planes[0, 0], part, pages, table),
        lambda: scatter(planes[:, :, ::2], part, pages, table),
        lambda: Part(0, 0, 12),
        lambda: piece_sums(planes[:, :, :33], torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0, []),
        lambda: rebuild(planes, 10, 2, [None, None]),
    ):
        with pytest.raises(LayoutError, match="E508"):
            call()


def broken(rng: np.random.Generator, k: int, m: int, shard_bytes: int, sets: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """(whole, without what each block's set does not name): shards (k + m, n, shard_bytes)."""
    data = rng.integers(0, 256, (k, len(sets), shard_bytes), np.uint8)
    parity = codec("isal", k, m).encode(data.reshape(k, -1)).reshape(m, len(sets), shard_bytes)
    whole = np.concatenate([data, parity])
    short = whole.copy()
    for b, have in enumerate(sets):
        lost = [number for number in range(k + m) if number not in have]
        short[lost, b] = rng.integers(0, 256, (len(lost), shard_bytes), np.uint8)
    return whole, short


def rebuilt(short: np.ndarray, k: int, m: int, sets: list[tuple[int, ...]]) -> np.ndarray:
    """By the kernel, having compared it with the plain reference."""
    expected = short.copy()
    for b, have in enumerate(sets):
        lost = lost_of(have, k)
        shards = expected[:, b].copy()
        rebuild_reference(shards, have, lost, coefficients(k, m, have, lost))
        expected[:, b] = shards
    zone = there(short)
    rebuild(zone, k, m, sets)
    assert np.array_equal(back(zone), expected)
    return expected


def test_all_66_survivor_sets_of_ten_and_two_give_the_data_back_in_one_launch() -> None:
    sets = list(itertools.combinations(range(12), 10))
    assert len(sets) == 66
    whole, short = broken(np.random.default_rng(6), 10, 2, 352, sets)
    assert np.array_equal(rebuilt(short, 10, 2, sets)[:10], whole[:10])


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 0), (3, 2), (5, 3), (7, 4), (17, 1), (32, 4)])
def test_other_codes_are_rebuilt_too_however_many_are_lost(k: int, m: int) -> None:
    rng = np.random.default_rng(k)
    sets = [tuple(sorted(rng.permutation(k + m)[:k].tolist())) for _ in range(5)]
    whole, short = broken(rng, k, m, 96, sets)
    assert np.array_equal(rebuilt(short, k, m, sets)[:k], whole[:k])


def test_blocks_without_a_set_and_survivors_that_no_decoder_must_see() -> None:
    whole, short = broken(np.random.default_rng(7), 4, 2, 32, [(0, 1, 2, 3), (1, 2, 3, 5), (0, 1, 2, 3)])
    zone = there(short)
    rebuild(zone, 4, 2, [None, (1, 2, 3, 5), (0, 1, 2, 3)])
    assert np.array_equal(back(zone)[:4], whole[:4])
    for wrong in ((0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 6), (3, 2, 1, 5), (0, 1, 2, 4, 5)):
        with pytest.raises(CodecError):
            rebuild(zone, 4, 2, [None, wrong, None])


PIECE_BYTES = [*range(32, 289, 32), 992, 1024, 1056, 2048, 2304, 4576]  # both sides of each of xxh3's ways


def test_sums_are_those_that_records_carry() -> None:
    rng = np.random.default_rng(8)
    for shard_bytes in PIECE_BYTES:
        zone = rng.integers(0, 256, (3, 5, shard_bytes), np.uint8)
        names = [(Identity(rng.bytes(16), rng.bytes(32), 2**64 - 1 - n, 61 * n), 2 + n) for n in range(2)]
        pieces = rng.permutation(15)[:11]
        shards, rows = (pieces // 5).astype(np.int32), (pieces % 5).astype(np.int32)
        found = back(piece_sums(there(zone), there(shards), there(rows), 254, names))
        for at, (shard, row) in enumerate(zip(shards, rows, strict=True)):
            name, block = (names[0][0], row) if row < 2 else (names[1][0], 61 + row - 2)
            seed = hash_reference.shard_seed(name.owner, name.extent_key, name.write_id, int(shard), 254, int(block))
            assert found[at] == hash_reference.shard_sum(zone[shard, row].tobytes(), seed), (shard_bytes, at)


def test_digests_are_those_that_records_carry() -> None:
    """Both sides of each of xxh3's ways."""
    rng = np.random.default_rng(9)
    for k in (1, 3, 4, 7, 8, 10, 11, 12, 16, 25, 26, 32):
        sums = rng.integers(0, 2**64, (k, 3), np.uint64)
        keys, write_ids = [rng.bytes(32) for _ in range(3)], [0, 2**64 - 1, int(rng.integers(0, 2**63))]
        found = back(plane_digests(keys, write_ids, there(sums)))
        for b in range(3):
            assert tuple(found[b]) == hash_reference.plane_digest(keys[b], write_ids[b], sums[:, b]), (k, b)


def test_without_triton_the_package_imports_and_a_kernel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.modules['triton'] = None; import kvstore.kernels.gpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MisuseError, match=r"error\[E507\].*triton cannot be imported.*pip install 'kvstore\[gpu\]'"):
        rebuild(torch.zeros((12, 1, 32), dtype=torch.uint8), 10, 2, [tuple(range(1, 11))])


def compiled(tmp_path: Path, words: list[str]) -> None:
    """In a process of its own, where triton is not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    child = Path(__file__).parent / "gpu_compile_child.py"
    subprocess.run([sys.executable, "-W", "error", str(child), *words], env=environment, check=True, timeout=390)


def test_kernels_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    """What the interpreter takes the compiler may refuse: to machine code of compute capability 9.0, without spilled registers."""
    compiled(tmp_path, ["move", "rebuild"])


@pytest.mark.long
@pytest.mark.timeout(400)
def test_all_kernels_compile_for_several_gpus(tmp_path: Path) -> None:
    compiled(tmp_path, ["all"])


@pytest.mark.gpu
def test_full_prompts_are_equal_on_the_gpu() -> None:
    """600 blocks of v41: every plane's shards rebuilt, summed, scattered."""
    rng = np.random.default_rng(10)
    layout = PRESETS["v41"]
    sets = list(itertools.combinations(range(12), 10))
    for plane in layout.planes():
        whole, short = broken(rng, 10, 2, plane.shard_bytes, [sets[b % 66] for b in range(600)])
        zone = there(short)
        rebuild(zone, 10, 2, [sets[b % 66] for b in range(600)])
        assert np.array_equal(back(zone[:10]), whole[:10])
        rows = 64 if plane.bytes < 40_000 else 128
        pages = np.zeros((5000, 16, 288), np.uint8)
        table = rng.permutation(5000)[: 600 * rows // 16]
        part = Part(plane.offset_bytes + rows * 68, rows, 288)
        there_pages = there(pages)
        scatter(zone[:10], part, there_pages, PageTable(table.tolist(), 5000, DEVICE), plane_offset_bytes=plane.offset_bytes)
        scatter_reference(whole[:10], part, pages, table, plane_offset_bytes=plane.offset_bytes)
        assert np.array_equal(back(there_pages), pages)


@pytest.mark.gpu
def test_blocks_in_pinned_host_memory_are_scattered_and_gathered_across_the_bus() -> None:
    rng = np.random.default_rng(11)
    blocks = torch.from_numpy(rng.integers(0, 256, (40, 4352), np.uint8)).pin_memory()
    pages = torch.zeros((200, 16, 68), dtype=torch.uint8, device="cuda")
    part, table = Part(0, 64, 68), PageTable(rng.permutation(200)[:160].tolist(), 200, "cuda")
    scatter(blocks, part, pages, table)
    assert torch.equal(pages[table.pages].cpu().reshape(40, 4352), blocks)
    returned = torch.zeros_like(blocks).pin_memory()
    gather(returned, part, pages, table)
    torch.cuda.synchronize()
    assert torch.equal(returned, blocks)


def test_what_the_benchmark_times_moves_the_bytes_that_it_counts() -> None:
    """On the device at hand, with blocks enough for each step to be real; its speed is measured where there is a GPU."""
    for take in bench_gpu.takes(DEVICE, blocks_count=1).values():
        take.run()
        assert take.moved_bytes > 0
        take.check()
