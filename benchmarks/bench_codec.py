"""Coding and decoding on one core: ours in place over true blocks, bare ISA-L over padded shards, zfec over the same shards.

Every take codes one full extent of the v41 layout (64 blocks of 113,920 B, four planes), or rebuilds two lost data shards of each block.
Each is given what suits it: ISA-L and zfec find their shards padded and contiguous, made before the clock starts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import numpy as np
import zfec

from benchmarks.harness import Bench, Figure, at_least, interleaved, measures, ratio_of_medians, seconds
from kvstore.erasure import cut_plane
from kvstore.erasure.isal import IsalCodec
from kvstore.layout import PRESETS

K, M = 10, 2
LOST = [0, 1]
HAVE = [*range(2, K + M)]


def _takes(blocks_count: int) -> dict[str, dict[str, Callable[[], float]]]:
    """{"encode" | "decode": {"ours" | "isal" | "zfec": seconds of one take}}. Results of all three are compared first."""
    layout = PRESETS["v41"]
    codec = IsalCodec(K, M)
    blocks = np.random.default_rng(0).integers(0, 256, (blocks_count, layout.block_bytes), np.uint8)
    planes = layout.planes(K)
    parity = [codec.encode_plane(blocks, plane) for plane in planes]
    data = [np.ascontiguousarray(cut_plane(blocks, plane, K).swapaxes(0, 1)) for plane in planes]  # (n, K, shard_bytes)
    survivors = [np.ascontiguousarray(np.concatenate([d[:, 2:], p.swapaxes(0, 1)], axis=1)) for d, p in zip(data, parity, strict=True)]
    coded = [np.empty((blocks_count, M, plane.shard_bytes), np.uint8) for plane in planes]
    rebuilt = [np.empty_like(c) for c in coded]
    encoder, decoder = zfec.Encoder(K, K + M), zfec.Decoder(K, K + M)
    # Shards of each (plane, block) as zfec takes them. Its decoder wants each data shard that it has at that shard's own index.
    # Its own copies: what one take has just read is in the cache for the next one that reads it.
    rows = [[block.data for block in part] for plane in data for part in plane.copy()]
    left = [[part[10 - 2].data, part[11 - 2].data, *[row.data for row in part[:8]]] for plane in survivors for part in plane.copy()]
    broken = blocks.copy()
    parity_lists = [list(part) for part in parity]

    def ours_encode() -> None:
        for plane, out in zip(planes, parity, strict=True):
            codec.native.encode_plane(blocks, plane.offset_bytes, plane.bytes, out)

    def ours_decode() -> None:
        for plane, given in zip(planes, parity_lists, strict=True):
            codec.native.rebuild_plane(broken, plane.offset_bytes, plane.bytes, plane.shard_bytes, HAVE, given)

    def isal(have: list[int], want: list[int], inputs: Iterable[np.ndarray], outputs: Iterable[np.ndarray]) -> None:
        for given, out in zip(inputs, outputs, strict=True):
            codec.native.bare_isal(have, want, given, out)

    def zfec_encode() -> list[list[bytes]]:
        return [encoder.encode(shards, [10, 11]) for shards in rows]

    def zfec_decode() -> list[list[bytes]]:
        return [decoder.decode(shards, [10, 11, *range(2, 10)]) for shards in left]

    for plane in planes:
        broken[:, plane.offset_bytes : plane.offset_bytes + 2 * plane.shard_bytes] = 0
    ours_decode()
    isal([*range(K)], [10, 11], data, coded)
    isal(HAVE, LOST, survivors, rebuilt)
    assert np.array_equal(broken, blocks)
    assert all(np.array_equal(c.swapaxes(0, 1), p) for c, p in zip(coded, parity, strict=True))
    assert all(np.array_equal(r, d[:, :2]) for r, d in zip(rebuilt, data, strict=True))
    assert [shard for pair in zfec_encode() for shard in pair] == [row.tobytes() for c in coded for part in c for row in part]
    assert [shard for whole in zfec_decode() for shard in whole[:2]] == [row.tobytes() for r in rebuilt for part in r for row in part]
    return {
        "encode": {
            "ours": lambda: seconds(ours_encode),
            "isal": lambda: seconds(lambda: isal([*range(K)], [10, 11], data, coded)),
            "zfec": lambda: seconds(zfec_encode),
        },
        "decode": {
            "ours": lambda: seconds(ours_decode),
            "isal": lambda: seconds(lambda: isal(HAVE, LOST, survivors, rebuilt)),
            "zfec": lambda: seconds(zfec_decode),
        },
    }


def measure(rounds: int = 15, blocks_count: int = 64) -> dict[str, float]:
    """Speed of ours over that of the others, medians of `rounds` interleaved rounds.

    Ids: `codec_vs_isal` and `codec_vs_zfec`, each .encode, .decode and the worse of the two; for people also, .encode and .decode,
    `codec_gb_per_second`: user bytes a second on this core; `codec_isal_vs_zfec`: what the bare library reaches; `codec_in_cache` and
    `codec_isal_in_cache`: both over zfec where each has just read the same bytes (else each finds them in memory, which bounds the fast).
    """
    figures: dict[str, float] = {}
    user_bytes = blocks_count * PRESETS["v41"].block_bytes
    for verb, takes in _takes(blocks_count).items():
        ours, isal, of_zfec = interleaved(rounds, takes["ours"], takes["isal"], takes["zfec"])
        figures[f"codec_vs_isal.{verb}"] = ratio_of_medians(isal, ours)
        figures[f"codec_vs_zfec.{verb}"] = ratio_of_medians(of_zfec, ours)
        figures[f"codec_gb_per_second.{verb}"] = user_bytes / statistics.median(ours) / 1e9
        figures[f"codec_isal_vs_zfec.{verb}"] = ratio_of_medians(of_zfec, isal)
        again = {name: [takes[name]() for _ in range(rounds + 1)][1:] for name in takes}
        figures[f"codec_in_cache.{verb}"] = ratio_of_medians(again["zfec"], again["ours"])
        figures[f"codec_isal_in_cache.{verb}"] = ratio_of_medians(again["zfec"], again["isal"])
    for name in ("codec_vs_isal", "codec_vs_zfec"):
        figures[name] = min(figures[f"{name}.encode"], figures[f"{name}.decode"])
    return figures


@measures("codec_vs_isal", "codec_vs_zfec")
def codec(bench: Bench) -> dict[str, Figure]:
    bars = {"codec_vs_isal": at_least(0.9), "codec_vs_zfec": at_least(15)}
    figures = measure(bench.scale.rounds, 4 if bench.scale.name == "smoke" else 64)

    def note(verb: str) -> str:
        told = {name.split(".")[0]: value for name, value in figures.items() if name.endswith(f".{verb}")}
        return (
            f"{told['codec_gb_per_second']:.1f} GB/s; bare ISA-L is {told['codec_isal_vs_zfec']:.1f} times zfec; in cache ours is "
            f"{told['codec_in_cache']:.1f}, bare ISA-L {told['codec_isal_in_cache']:.1f}"
        )

    return {
        name: Figure(value, bars[name.split(".")[0]], note(name.split(".")[1]) if "." in name else "")
        for name, value in figures.items()
        if name.split(".")[0] in bars
    }


if __name__ == "__main__":
    for name, value in sorted(measure().items()):
        print(f"{name:28} {value:10.2f}")
