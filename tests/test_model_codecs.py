"""Rows to stored bytes and back: the formats of kvstore/engine_integration/model/codecs.py, against plain Python."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine_integration.model import MINI, SIZES, TINY
from kvstore.engine_integration.model.codecs import CODECS, FP4_VALUES, Fp4, Fp8, RowCodec, codec_of, straight_through
from kvstore.engine_integration.model.layout import block_layout, entry_bytes
from kvstore.errors import MisuseError
from kvstore.layout import PRESETS

NUMBERS = (
    st.floats(-1e4, 1e4, width=32)
    | st.floats(-(2.0**-10), 2.0**-10, width=32)
    | st.sampled_from([0.0, -0.0, 6.0, -448.0, 1e-30, 1e30, -1e30])
)
ROWS = st.lists(NUMBERS, min_size=64, max_size=64).map(lambda row: torch.tensor([row], dtype=torch.float32))
SCALED: list[RowCodec] = [Fp4(16, power_of_two=False), Fp4(32, power_of_two=True), Fp8(32)]


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code & 128 else magnitude


def single(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def nearest_even(value: float, values: list[float]) -> float:
    """Of `values` in the order of their codes."""
    return min(enumerate(values), key=lambda coded: (abs(abs(value) - coded[1]), coded[0] % 2))[1]


def test_stored_sizes_are_those_of_the_document() -> None:
    blocks = {(size, codec): block_layout(SIZES[size], CODECS[codec]).block_bytes for size in SIZES for codec in CODECS}
    assert [blocks["mini", codec] for codec in ("v41", "bf16", "f32")] == [13_568, 49_152, 98_304]
    assert [blocks["tiny", codec] for codec in ("v41", "bf16", "f32")] == [432, 1_536, 3_072]
    assert [entry_bytes(MINI, CODECS[codec]) for codec in ("v41", "bf16", "f32")] == [53_184, 102_912, 205_824]
    assert [entry_bytes(TINY, CODECS[codec]) for codec in ("v41", "bf16", "f32")] == [2_944, 5_632, 11_264]


def test_rows_of_the_true_model_have_its_bytes() -> None:
    """288, 68 and 528 bytes: with them the layout that the store is measured with."""
    v41 = CODECS["v41"]
    assert (v41.main.row_bytes(512), v41.index.row_bytes(128), v41.window.row_bytes(512)) == (288, 68, 528)
    assert [section.bytes for section in PRESETS["v41"].sections[:2]] == [64 * 68, 64 * 288]


def test_sections_lie_in_layer_order_index_before_main() -> None:
    names = [section.name for section in block_layout(MINI, CODECS["v41"]).sections]
    assert names == [f"source.{layer}.{part}" for layer in (1, 3, 6) for part in ("index", "main")]
    assert [section.name for section in block_layout(TINY, CODECS["v41"]).sections] == ["source.1.main", "source.4.main"]


@settings(max_examples=30)
@given(ROWS, st.sampled_from(SCALED))
def test_what_is_read_is_the_nearest_number_its_scale_has(row: torch.Tensor, codec: RowCodec) -> None:
    codes = codec.encode(row)
    assert codes.shape == (1, codec.row_bytes(64)) and codes.dtype == torch.uint8
    decoded = codec.decode(codes)[0].tolist()
    raw = codes[0].tolist()
    assert isinstance(codec, Fp4 | Fp8)
    scales = raw[32:] if isinstance(codec, Fp4) else raw[64:]
    for group, code in enumerate(scales):
        part = row[0, group * codec.group : (group + 1) * codec.group].tolist()
        by_power = isinstance(codec, Fp8) or codec.power_of_two
        scale = 2.0 ** (code - 127) if by_power else e4m3(code)
        limit = 448.0 if isinstance(codec, Fp8) else 6.0
        largest = max(abs(value) for value in part)
        if by_power and largest / limit > 2.0**-126:
            assert largest / limit / scale * (1 + 1e-6) > 0.5 and largest / limit <= scale * (1 + 1e-6)
        values = [e4m3(c) for c in range(127)] if isinstance(codec, Fp8) else list(FP4_VALUES)
        for i, value in enumerate(part):
            got = decoded[group * codec.group + i]
            scaled = single(value / scale) if scale else 0.0
            want = math.copysign(nearest_even(min(abs(scaled), limit), values), value) * scale
            assert got == single(want), (value, scale, got, want)


@settings(max_examples=20)
@given(ROWS)
def test_plain_codecs_keep_the_number_or_round_it_to_bf16(row: torch.Tensor) -> None:
    assert torch.equal(CODECS["f32"].main.decode(CODECS["f32"].main.encode(row)), row)
    assert torch.equal(CODECS["bf16"].main.decode(CODECS["bf16"].main.encode(row)), row.to(torch.bfloat16).float())


@given(st.binary(min_size=64, max_size=64))
def test_decoding_any_bytes_twice_or_in_other_company_gives_the_same_floats(raw: bytes) -> None:
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[None]
    for codec in SCALED:
        row = torch.nn.functional.pad(codes, (0, 2))[:, : codec.row_bytes(64)]
        many = codec.decode(row.expand(7, -1))
        assert torch.equal(many[3:4].view(torch.int32), codec.decode(row).view(torch.int32))


def test_a_gradient_passes_through_rounding_unchanged() -> None:
    row = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    codec = CODECS["v41"].main
    seen = straight_through(codec, row)
    assert torch.allclose(seen, codec.decode(codec.encode(row.detach())), atol=1e-6)
    seen.sum().backward()  # type: ignore[no-untyped-call]  # torch gives it no types
    assert row.grad is not None and torch.equal(row.grad, torch.ones_like(row))


def test_an_unknown_codec_is_told_which_there_are() -> None:
    with pytest.raises(MisuseError, match="use one of v41, bf16, f32"):
        codec_of("fp8")
