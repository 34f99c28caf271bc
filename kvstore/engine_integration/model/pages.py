"""Room for compressed rows, in pages of one block: stored bytes, and what they decode to. Requests share one `Pages`, which bounds memory.

A request's blocks lie in any pages; attention gathers them in position order, which is the copy it needs anyway beside the window's rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.engine_integration.model.codecs import Codec, RowCodec
from kvstore.engine_integration.model.config import ModelConfig
from kvstore.engine_integration.model.layout import block_layout
from kvstore.errors import MisuseError


@dataclass(frozen=True, slots=True)
class Section:
    """One kind of rows of one source, in every block."""

    source: int
    main: bool  # else index rows
    offset_bytes: int  # in a block
    rows: int  # of one block
    row_bytes: int
    codec: RowCodec

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


def sections_of(config: ModelConfig, codec: Codec) -> list[Section]:
    """In the order of a block's bytes."""
    found, offset = [], 0
    for source, (_, ratio) in enumerate(config.sources):
        for main, dim, rows in ((False, config.index_dim, codec.index), (True, config.latent, codec.main)):
            if dim:
                section = Section(source, main, offset, config.block // ratio, rows.row_bytes(dim), rows)
                found.append(section)
                offset += section.bytes
    assert offset == block_layout(config, codec).block_bytes
    return found


def page_bytes(config: ModelConfig, codec: Codec) -> int:
    """Memory of one page: the block's bytes, and float32 values of the rows that attention reads."""
    values = sum(config.block // ratio * (config.latent + (config.index_dim if config.top_k else 0)) * 4 for _, ratio in config.sources)
    return block_layout(config, codec).block_bytes + values


class Pages:
    """`capacity` pages, or as many as are asked for where it is None (one request of its own). Safe to share between threads."""

    def __init__(self, config: ModelConfig, codec: Codec, capacity: int | None) -> None:
        self.sections = sections_of(config, codec)
        self.capacity = capacity
        self._lock = threading.Lock()
        self._block_bytes = block_layout(config, codec).block_bytes
        self._index_dim = config.index_dim if config.top_k else 0  # a dense model never reads its index rows
        self._latent = config.latent
        count = capacity or 0
        # Not touched until a page is taken: memory that the system has not given yet costs nothing.
        self.codes = torch.empty(count, self._block_bytes, dtype=torch.uint8)
        self.values = {(s.source, s.main): torch.empty(count, s.rows, self._dim(s)) for s in self.sections if self._dim(s)}
        self._free = list(range(count - 1, -1, -1))

    def __deepcopy__(self, memo: dict[int, object]) -> Pages:
        """For a copy of a request's state, to try several ways on from one place: its own pages are copied, shared ones cannot be."""
        if self.capacity is not None:
            raise MisuseError("E599", "pages", "are shared by many requests", "copy the state of a request with pages of its own")
        copied = copy(self)
        copied._lock = threading.Lock()
        copied.codes, copied._free = self.codes.clone(), list(self._free)
        copied.values = {name: values.clone() for name, values in self.values.items()}
        return copied

    def _dim(self, section: Section) -> int:
        return self._latent if section.main else self._index_dim

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """So many pages, their values zero; None where there are not as many."""
        with self._lock:
            if count > len(self._free):
                if self.capacity is not None:
                    return None
                self._grow(count - len(self._free))
            taken = [self._free.pop() for _ in range(count)]
        if taken:
            at = torch.tensor(taken)
            for values in self.values.values():
                values[at] = 0.0  # rows nobody wrote are masked, but 0 x NaN is NaN
        return taken

    def give(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._free.extend(reversed(pages))

    def _grow(self, count: int) -> None:
        old = len(self.codes)
        new = max(old + count, 2 * old)
        self.codes = _grown(self.codes, new)
        self.values = {name: _grown(values, new) for name, values in self.values.items()}
        self._free = [*range(new - 1, old - 1, -1), *self._free]


def _grown(old: Tensor, rows: int) -> Tensor:
    new = torch.empty(rows, *old.shape[1:], dtype=old.dtype)
    new[: len(old)] = old
    return new
