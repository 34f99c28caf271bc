"""Compiles the kernels for GPUs that need not be there; fails where one spills registers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvstore.kernels.gpu import coding_kernel, paging_kernel, sums_kernel

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {"zone": "*i32", "masks": "*i64", "extents": "*i64", "secret": "*i64", "out": "*i64", "messages": "*i64", "table": "*i64"}
POINTERS |= {
    "good": "*u8",
    "blocks": "*i32",
    "sets": "*i32",
    "have": "*i32",
    "lost": "*i32",
    "shards": "*i32",
    "rows": "*i32",
    "of_row": "*i32",
}


def compile_for(kernel: object, capability: int, pointers: dict[str, str], widest: str, **sizes: object) -> None:
    """`widest`: the loads that the code must have, of 16 bytes where it can."""
    names = kernel.arg_names
    kinds = POINTERS | pointers
    signature = {name: "constexpr" if name in sizes else kinds.get(name, "i32") for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in kinds}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in sizes.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert f"ld.global.{widest}" in made.asm["ptx"], (made.name, sizes)
    binary = Path(triton.knobs.cache.dir) / "last.cubin"
    binary.write_bytes(made.asm["cubin"])
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"STACK:(\d+)", usage) == ["0"], (made.name, sizes, usage)


def main(words: list[str]) -> None:
    everything = "all" in words
    for capability in (80, 90, 100) if everything else (90,):
        sizes: dict[str, object] = {"ROWS": 64, "ROW": 36, "PAGE_ROWS": 16, "SHARD": 288, "TILES": 5, "TILE": 512}
        wide, narrow = {"pages": "*i64", "planes": "*i64"}, {"pages": "*u8", "planes": "*u8"}
        compile_for(paging_kernel.move_part, capability, wide, "v2.b64", UNIT=2, CHECKED=True, GATHER=False, **sizes)
        compile_for(paging_kernel.move_part, capability, narrow, "b8", UNIT=1, CHECKED=False, GATHER=True, **sizes)
        for k, pairs in ((10, 1), (32, 2)) if everything else ((10, 1),):
            sizes = {"UNIT": 8, "WORDS": 576, "K": k, "PAIRS": pairs, "TILES": 2, "BLOCKS": 1, "UNROLL": 5, "TILE": 512}
            compile_for(coding_kernel.rebuild, capability, {}, "v4.b32", **sizes)
        if everything:
            zone = {"zone": "*i64"}
            for piece_words, widest in ((4, "b64"), (28, "b64"), (288, "v2.b64")):
                compile_for(sums_kernel.piece_sums, capability, zone, widest, UNIT=4, WORDS=piece_words, PIECES=4)
            for message_words in (15, 30, 37):
                compile_for(sums_kernel.wide_sums, capability, {}, "b64", WORDS=message_words, ROWS=32)


if __name__ == "__main__":
    main(sys.argv[1:])
