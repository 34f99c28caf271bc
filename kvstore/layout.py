"""What lies where in a block, and how a block is cut into planes.

A block is opaque to the store but for its sections: consecutive runs of bytes in the order an engine needs them (layer order). Sections are
gathered into planes, the step of coding and fetching: one plane of all blocks of a prompt can be used before the next arrives.

    block    | section | section | section | section | ...      sections lie back to back from byte 0
    planes   |      plane 0      |  plane 1 | ...               each closes at a section boundary
    shards   plane zero-padded to k x 32 B, cut into k data shards

A plane closes once a full extent's shard of it is 64 KiB or more: smaller reads from a disk cost as much as one of that size.
Never changes: `Layout.digest()` (it is part of every key) and `shard_bytes_of` (it decides every shard). The plane rule may: records carry
their own plane table.
"""

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache

from kvstore import tagged
from kvstore.errors import LayoutError

BLOCKS_PER_EXTENT_MAX = 64
EXTENT_BYTES_MAX = 8 << 20  # more only when one block alone is larger
BLOCK_BYTES_MAX = 64 << 20
PLANES_MAX = 255
SHARD_ALIGN_BYTES = 32
PLANE_SHARD_BYTES_MIN = 64 << 10
K_DEFAULT = 10
K_MAX = 32
LAYOUT_DOMAIN = "kvstore.layout.v1"


def shard_bytes_of(plane_bytes: int, k: int) -> int:
    """Bytes of one shard of one (block, plane): the plane zero-padded to k x 32 B, over k."""
    return -(-plane_bytes // (k * SHARD_ALIGN_BYTES)) * SHARD_ALIGN_BYTES


@dataclass(frozen=True)
class Section:
    """A run of bytes that an engine reads at once; `name` is part of the layout's identity, as "layer.3.kv"."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Plane:
    """Bytes [offset_bytes, offset_bytes + bytes) of every block, coded as k shards of shard_bytes (padding included)."""

    offset_bytes: int
    bytes: int
    shard_bytes: int

    @property
    def columns(self) -> slice:
        """Of rows of block_bytes."""
        return slice(self.offset_bytes, self.offset_bytes + self.bytes)


@dataclass(frozen=True)
class Layout:
    """Sections of a block, back to back. Equal sections are equal layouts."""

    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", tuple(self.sections))
        if not self.sections:
            raise LayoutError("E501", "layout", "has no sections")
        for section in self.sections:
            if type(section.bytes) is not int or section.bytes < 1:
                raise LayoutError("E502", f"section {section.name!r}", f"{section.bytes!r} is not a positive number of bytes")
        names = {section.name for section in self.sections}
        if len(names) != len(self.sections):
            raise LayoutError("E503", "layout", "two sections have one name")
        if self.block_bytes > BLOCK_BYTES_MAX:
            raise LayoutError(
                "E504", "layout", f"a block of {self.block_bytes} bytes; at most {BLOCK_BYTES_MAX}", "split it by rank or by KV group"
            )

    @classmethod
    def single(cls, block_bytes: int) -> "Layout":
        """A block of opaque bytes: one section, one plane."""
        return cls((Section("block", block_bytes),))

    @cached_property
    def block_bytes(self) -> int:
        return sum(section.bytes for section in self.sections)

    @property
    def blocks_per_extent_max(self) -> int:
        """Blocks of a full extent: 64, fewer where 8 MiB are less, at least 1."""
        return max(1, min(BLOCKS_PER_EXTENT_MAX, EXTENT_BYTES_MAX // self.block_bytes))

    def planes(self, k: int = K_DEFAULT) -> tuple[Plane, ...]:
        """The planes that k data shards ask for, in order; they cover the block without gap or overlap."""
        return _planes(self, k)

    def digest(self) -> bytes:
        """32 bytes that stand for the layout: names, sizes and order of its sections."""
        each = [tagged.message("section", [s.name.encode(), struct.pack("<Q", s.bytes)]) for s in self.sections]
        return tagged.digest(LAYOUT_DOMAIN, [struct.pack("<I", len(each)), b"".join(each)])


@lru_cache(maxsize=1024)
def _planes(layout: Layout, k: int) -> tuple[Plane, ...]:
    if not 1 <= k <= K_MAX:
        raise LayoutError("E505", f"{k} data shards", f"must be 1 to {K_MAX}")
    planes: list[Plane] = []
    offset = length = 0
    for section in layout.sections:
        length += section.bytes
        shard_bytes = shard_bytes_of(length, k)
        if shard_bytes * layout.blocks_per_extent_max >= PLANE_SHARD_BYTES_MIN:
            planes.append(Plane(offset, length, shard_bytes))
            offset, length = offset + length, 0
    if length:
        planes.append(Plane(offset, length, shard_bytes_of(length, k)))
    if len(planes) > PLANES_MAX:
        raise LayoutError("E506", "layout", f"{len(planes)} planes; at most {PLANES_MAX}", "make sections of several layers each")
    return tuple(planes)


def gqa(*, layers: int, kv_heads: int, head_dim: int, element_bytes: int = 2, block_tokens: int = 128) -> Layout:
    """Llama-type grouped-query attention: per layer one section, keys then values of all tokens and heads of this rank."""
    return Layout(tuple(Section(f"layer.{i}.kv", block_tokens * kv_heads * head_dim * 2 * element_bytes) for i in range(layers)))


def mla(*, layers: int, row_bytes: int, index_row_bytes: int = 0, block_tokens: int = 128) -> Layout:
    """Multi-head latent attention: per layer the rows of a sparse indexer where there is one, then latent rows with their rotary part."""
    sections = []
    for i in range(layers):
        if index_row_bytes:
            sections.append(Section(f"layer.{i}.index", block_tokens * index_row_bytes))
        sections.append(Section(f"layer.{i}.latent", block_tokens * row_bytes))
    return Layout(tuple(sections))


def shared_latent(*, sources: tuple[tuple[int, int], ...], row_bytes: int, index_row_bytes: int, block_tokens: int = 128) -> Layout:
    """Layers that share the KV of a few source layers; `sources` = (layer, tokens per row). Per source: index rows, then main rows."""
    sections = []
    for layer, ratio in sources:
        rows = block_tokens // ratio
        sections += [Section(f"source.{layer}.index", rows * index_row_bytes), Section(f"source.{layer}.main", rows * row_bytes)]
    return Layout(tuple(sections))


PRESETS: dict[str, Layout] = {
    # 40 layers; sources 2, 8, 14 pool pairs of tokens, source 20 none. Main row: 512 x FP4 + 32 scales = 288 B; index row 128 x FP4 + 4.
    # 3 x 64 x 356 + 128 x 356 = 113,920 B in four planes.
    "v41": shared_latent(sources=((2, 2), (8, 2), (14, 2), (20, 1)), row_bytes=288, index_row_bytes=68),
    # 32 layers x 8 KV heads x 128, bf16: 16 MiB a block.
    "llama-gqa-8b": gqa(layers=32, kv_heads=8, head_dim=128),
    # 80 layers, one KV head on each of 8 ranks, bf16: 5 MiB a block and rank.
    "llama-gqa-70b-tp8": gqa(layers=80, kv_heads=1, head_dim=128),
    # 61 layers x (512 latent + 64 rotary), bf16: 8,994,816 B a block.
    "mla-bf16": mla(layers=61, row_bytes=2 * 576),
    # The same with FP8 latent, 4 scales of 4 B, bf16 rotary part, and an indexer of 128 x FP8 + one 4 B scale: 6,152,704 B a block.
    "mla-fp8-sparse": mla(layers=61, row_bytes=512 + 16 + 128, index_row_bytes=128 + 4),
}
