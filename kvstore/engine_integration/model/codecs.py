"""Rows of floats to stored bytes and back. Every reader of the cache, the run that made it included, sees what `decode` gives.

    v41 main     dim/2 bytes of FP4 e2m1, low nibble first | dim/16 scales, FP8 e4m3: largest of 16 over 6, rounded
    v41 index    dim/2 bytes of FP4 e2m1                   | dim/32 scales, ue8m0: least power of two >= largest of 32 over 6
    v41 window   dim bytes of FP8 e4m3                     | dim/32 scales, ue8m0: least power of two >= largest of 32 over 448
    bf16, f32    dim little-endian numbers

Rounding is to nearest, ties to even. A power of two is stored as exponent + 127. Decoding is one exact product: no rounding,
no shape in which it could differ. None of this can change: stored blocks would be read wrongly. A new form is a new codec name, and that is
in every key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from kvstore.errors import MisuseError

FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_MAX: Final = 6.0
FP8_MAX: Final = 448.0
EXPONENT_MIN: Final = -126  # below, the power of two itself is subnormal
# A number goes to code c when it lies above c of these. Ties go to the even code: every other bound is pulled just below its midpoint.
_MIDPOINTS: Final = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_BOUNDS: Final = torch.where(torch.arange(7) % 2 == 1, torch.nextafter(_MIDPOINTS, torch.zeros(7)), _MIDPOINTS)
_FP4: Final = torch.tensor(FP4_VALUES + tuple(-value for value in FP4_VALUES))


class RowCodec(Protocol):
    """Of the last dimension: (..., dim) float32 <-> (..., row_bytes(dim)) uint8."""

    def row_bytes(self, dim: int) -> int: ...
    def encode(self, rows: Tensor) -> Tensor: ...
    def decode(self, codes: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Raw:
    """Numbers as they are, in `dtype`."""

    dtype: torch.dtype

    def row_bytes(self, dim: int) -> int:
        return dim * self.dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.contiguous().view(self.dtype).to(torch.float32)


@dataclass(frozen=True)
class Fp4:
    """FP4 with one scale for `group` numbers: e4m3, or a power of two."""

    group: int
    power_of_two: bool

    def row_bytes(self, dim: int) -> int:
        return dim // 2 + dim // self.group

    def encode(self, rows: Tensor) -> Tensor:
        grouped = _grouped(rows, self.group)
        largest = grouped.abs().amax(-1, keepdim=True) / FP4_MAX
        codes, scale = _power_of_two(largest) if self.power_of_two else _e4m3(largest)
        scaled = torch.where(scale > 0, grouped / scale, torch.zeros_like(grouped))
        magnitude = torch.bucketize(scaled.abs(), _BOUNDS)
        nibbles = (magnitude + 8 * ((scaled < 0) & (magnitude > 0))).to(torch.uint8).flatten(-2)
        return torch.cat([nibbles[..., 0::2] | nibbles[..., 1::2] << 4, codes.flatten(-2)], -1)

    def decode(self, codes: Tensor) -> Tensor:
        dim = codes.shape[-1] * 2 * self.group // (self.group + 2)
        packed, scales = codes[..., : dim // 2], codes[..., dim // 2 :]
        nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        scale = _from_power_of_two(scales) if self.power_of_two else _from_e4m3(scales)
        return (_grouped(_FP4[nibbles.long()], self.group) * scale.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class Fp8:
    """FP8 e4m3 with one power of two for `group` numbers."""

    group: int

    def row_bytes(self, dim: int) -> int:
        return dim + dim // self.group

    def encode(self, rows: Tensor) -> Tensor:
        grouped = _grouped(rows, self.group)
        codes, scale = _power_of_two(grouped.abs().amax(-1, keepdim=True) / FP8_MAX)
        return torch.cat([_e4m3(grouped / scale)[0].flatten(-2), codes.flatten(-2)], -1)

    def decode(self, codes: Tensor) -> Tensor:
        dim = codes.shape[-1] * self.group // (self.group + 1)
        values = _grouped(_from_e4m3(codes[..., :dim]), self.group)
        return (values * _from_power_of_two(codes[..., dim:]).unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class Codec:
    """How the three kinds of cached rows are stored."""

    name: str
    main: RowCodec
    index: RowCodec
    window: RowCodec


CODECS: Final = {
    codec.name: codec
    for codec in (
        Codec("v41", Fp4(16, power_of_two=False), Fp4(32, power_of_two=True), Fp8(32)),
        Codec("bf16", Raw(torch.bfloat16), Raw(torch.bfloat16), Raw(torch.bfloat16)),
        Codec("f32", Raw(torch.float32), Raw(torch.float32), Raw(torch.float32)),
    )
}


def codec_of(name: str) -> Codec:
    if name not in CODECS:
        raise MisuseError("E583", f"codec {name!r}", "is not known", f"use one of {', '.join(CODECS)}")
    return CODECS[name]


def straight_through(codec: RowCodec, rows: Tensor) -> Tensor:
    """What a reader will see of `rows`, with the gradient of `rows` themselves: for training."""
    rows = rows.float()
    with torch.no_grad():
        moved = codec.decode(codec.encode(rows)) - rows
    return rows + moved


def _grouped(rows: Tensor, group: int) -> Tensor:
    return rows.reshape(*rows.shape[:-1], -1, group)


def _e4m3(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and what they stand for. Clamped: beyond 448 the format has only NaN."""
    rounded = numbers.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return rounded.contiguous().view(torch.uint8), rounded.to(torch.float32)


def _from_e4m3(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def _power_of_two(numbers: Tensor) -> tuple[Tensor, Tensor]:
    mantissa, exponent = torch.frexp(numbers)  # mantissa in [1/2, 1): a power of two has exactly 1/2
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1).clamp(EXPONENT_MIN, 127)
    exponent = torch.where(numbers > 0, exponent, torch.full_like(exponent, EXPONENT_MIN))
    codes = (exponent + 127).to(torch.uint8)
    return codes, _from_power_of_two(codes)


def _from_power_of_two(codes: Tensor) -> Tensor:
    return (codes.to(torch.int32) << 23).view(torch.float32)  # the exponent field of a float is this very code
