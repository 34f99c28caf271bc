"""Trace readers: what they accept, what they refuse, and how they name the wrong line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from kvstore.errors import InputError
from kvstore.replay.requests import Request, runs_of, split_blocks
from kvstore.replay.trace import open_trace

DATA = Path(__file__).parent / "data"
MOONCAKE = DATA / "mooncake_head.jsonl"
WEKA = DATA / "weka_head.jsonl"
GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [3, 9]}\n'
GOOD_WEKA = '{"t":5,"s":1,"in":300,"out":7,"runs":[[4,2]]}\n'


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def packed(source: Path, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(source.read_bytes())
    return bytes(sink.getvalue())


@pytest.mark.parametrize("source", [MOONCAKE, WEKA])
def test_packing_and_file_name_do_not_matter(source: Path, tmp_path: Path) -> None:
    plain = list(open_trace(source))
    assert len(plain) == len(source.read_text().splitlines())
    (tmp_path / "a.bin").write_bytes(packed(source, "gzip"))
    (tmp_path / "b.bin").write_bytes(packed(source, "zstd"))
    (tmp_path / "c.bin").write_bytes(packed(source, "gzip") * 2)
    assert list(open_trace(tmp_path / "a.bin")) == list(open_trace(tmp_path / "b.bin")) == plain
    with pytest.raises(InputError, match=f":{len(plain) + 1}: time 0 ms is before"):
        list(open_trace(tmp_path / "c.bin"))  # both members of the archive are read


def test_mooncake_line_becomes_128_token_blocks() -> None:
    first = next(iter(open_trace(MOONCAKE)))
    published = json.loads(MOONCAKE.read_text().splitlines()[0])
    assert first.input_tokens == published["input_length"] == 6758
    assert first.ids().tolist() == list(range(52))  # 13 full blocks; the last one holds 102 tokens, no whole block of 128
    assert next(iter(open_trace(MOONCAKE, block_tokens=512))).ids().tolist() == published["hash_ids"]


@pytest.mark.parametrize(
    ("tokens", "ids", "expected"),
    [
        (0, [], []),
        (127, [7], []),
        (128, [7], [28]),
        (511, [7], [28, 29, 30]),
        (512, [7], [28, 29, 30, 31]),
        (513, [7, 2], [28, 29, 30, 31]),
        (640, [7, 2], [28, 29, 30, 31, 8]),
        (1535, [7, 8, 2], [28, 29, 30, 31, 32, 33, 34, 35, 8, 9, 10]),
    ],
)
def test_partial_last_block_gives_its_whole_quarters(tokens: int, ids: list[int], expected: list[int]) -> None:
    assert Request(0, tokens, 0, split_blocks(runs_of(ids), tokens)).ids().tolist() == expected


def test_busy_hour_packs_conversations_by_a_hash_of_their_number() -> None:
    plain, busy = list(open_trace(WEKA)), list(open_trace(WEKA, variant="busy1h"))
    first_ms: dict[int, int] = {}
    for request in plain:
        first_ms.setdefault(request.session, request.time_ms)
    expected = [r.time_ms - first_ms[r.session] + (r.session * 2654435761 % 2**32) * 3600000 // 2**32 for r in plain]
    assert [r.time_ms for r in busy] == sorted(expected)
    assert sorted(r.ids().tolist() for r in busy) == sorted(r.ids().tolist() for r in plain)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{\n", "not JSON"),
        ("\xff\n", "not JSON"),
        ("[" * 100_000 + "\n", "nested too deep"),
        ("[1]\n", "not a JSON object"),
        ('{"timestamp": 5, "output_length": 1, "hash_ids": []}\n', '"input_length" is missing'),
        ('{"timestamp": 5, "input_length": -5, "output_length": 1, "hash_ids": []}\n', '"input_length" is -5'),
        ('{"timestamp": 5, "input_length": 1099511627776, "output_length": 1, "hash_ids": []}\n', '"input_length" is 1099511627776'),
        ('{"timestamp": 5, "input_length": true, "output_length": 1, "hash_ids": [1]}\n', '"input_length" is true'),
        ('{"timestamp": 5, "input_length": 1e3, "output_length": 1, "hash_ids": [1, 2]}\n', '"input_length" is 1000.0'),
        ('{"timestamp": "5", "input_length": 5, "output_length": 1, "hash_ids": [1]}\n', '"timestamp" is "5"'),
        ('{"timestamp": 5, "input_length": 1000, "output_length": 1, "hash_ids": [1]}\n', '"hash_ids" has 1 ids, 1000 tokens need 2'),
        ('{"timestamp": 5, "input_length": 5, "output_length": 1, "hash_ids": [-1]}\n', '"hash_ids" is not a list of whole numbers'),
        (
            '{"timestamp": 5, "input_length": 5, "output_length": 1, "hash_ids": [1152921504606846976]}\n',
            '"hash_ids" is not a list of whole numbers',
        ),
        ('{"timestamp": 4, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n', "time 4 ms is before 5 ms"),
        (GOOD_WEKA, '"input_length" is missing'),
    ],
)
def test_wrong_line_is_named_and_can_be_skipped(line: str, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD.encode() + line.encode("latin-1") + GOOD.encode())
    with pytest.raises(InputError) as raised:
        list(open_trace(path))
    text = str(raised.value)
    assert text.startswith(f"error[E110] {path}:2: ") and cause in text and text.endswith("or --skip-bad") and "\n" not in text
    assert raised.value.exit_code == 2
    trace = open_trace(path, skip_bad=True)
    assert len(list(trace)) == 2 and trace.count_skipped() == 1


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"t":5,"s":1,"in":300,"out":7,"runs":[[4,3]]}\n', '"runs" has 3 blocks, 300 tokens hold 2'),
        ('{"t":5,"s":1,"in":300,"out":7,"runs":[[4]]}\n', '"runs" is not a list'),
        ('{"t":5,"s":1,"in":300,"out":7,"runs":[[4,0],[5,2]]}\n', '"runs" is not a list'),
        ('{"t":5,"in":300,"out":7,"runs":[[4,2]]}\n', '"s" is missing'),
    ],
)
def test_wrong_weka_line_is_named(line: str, cause: str, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD_WEKA, "\n", line)
    with pytest.raises(InputError) as raised:
        list(open_trace(path))
    assert f"{path}:3: " in str(raised.value) and cause in str(raised.value)


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_cut_archive_is_an_error_with_its_place_never_a_shorter_trace(codec: str, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(packed(MOONCAKE, codec)[:-200])
    with pytest.raises(InputError, match=r"error\[E110\] .*cut:\d+"):
        list(open_trace(path, skip_bad=True))


def test_a_file_without_one_good_line_names_the_first_bad_one(tmp_path: Path) -> None:
    for content, cause in (("\n\ngarbage\n[]\n", "line 3 is not JSON"), ("", "it is empty"), ("\n[]\n", "line 2 is not a JSON object")):
        path = write(tmp_path / "trace.jsonl", content)
        for skip_bad in (False, True):
            with pytest.raises(InputError, match=rf"error\[E111\] .*trace.jsonl has no request: {cause}\. Fix: "):
                open_trace(path, skip_bad=skip_bad)
    with pytest.raises(InputError, match=r'trace.jsonl:2 has no "hash_ids" or "runs" field'):
        open_trace(write(tmp_path / "trace.jsonl", '\n{"messages": []}\n'))


def test_files_that_are_no_trace_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        open_trace(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="has no request"):
        open_trace(write(tmp_path / "empty.jsonl"))
    with pytest.raises(InputError, match=r'E111.*has no "hash_ids" or "runs" field'):
        open_trace(write(tmp_path / "sharegpt.jsonl", '{"conversations": []}\n'))
    with pytest.raises(InputError, match="E111"):
        open_trace(MOONCAKE, block_tokens=64)
    with pytest.raises(InputError, match="busy1h"):
        open_trace(MOONCAKE, variant="busy1h")
    with pytest.raises(InputError, match="cannot be read"):
        open_trace(tmp_path)


def test_request_limit_takes_the_first_requests() -> None:
    assert list(open_trace(MOONCAKE, request_limit=3)) == list(open_trace(MOONCAKE))[:3]
    assert list(open_trace(MOONCAKE, request_limit=0)) == []
