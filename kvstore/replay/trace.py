"""Trace files: Mooncake and weka JSON lines, plain, gzip or zstd; recognised by content, never by name.

    mooncake  {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, ...]}      blocks of 512, the last one partial
    weka      {"t": ms, "s": conversation, "in": n, "out": n, "runs": [[first id, count], ...]}    whole blocks of 128

A line that breaks its format raises InputError with file and line, or is skipped and counted when asked. Reading streams.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa

from kvstore.errors import InputError
from kvstore.replay.requests import BLOCK_TOKENS, Request, Runs, busy_hour_ms, runs_of, split_blocks

MOONCAKE_BLOCK_TOKENS = 512
LINE_BYTES_MAX = 16 << 20  # a prompt of 100 million tokens still fits
ID_MAX = 2**48  # ids times four stay exact in 64 bits
TOKENS_MAX = 2**40
INPUT_TOKENS_MAX = 2**28  # of one prompt: its blocks are held in memory

Format = Literal["mooncake", "weka"]
Variant = Literal["plain", "busy1h"]


@dataclass(frozen=True)
class Trace:
    """A trace file, opened anew by each iteration. `block_tokens` is 128, or 512 for the Mooncake format as published."""

    path: Path
    format: Format
    block_tokens: int
    variant: Variant
    skip_bad: bool
    request_limit: int | None

    def __iter__(self) -> Iterator[Request]:
        return self.read(lambda _: None)

    def read(self, on_skip: Callable[[InputError], None]) -> Iterator[Request]:
        """Requests in time order. `on_skip` is called for each bad line that was skipped."""
        requests = self._in_file_order(on_skip)
        if self.variant == "busy1h":
            requests = iter(sorted(_packed_into_an_hour(requests), key=lambda request: request.time_ms))
        for number, request in enumerate(requests):
            if number == self.request_limit:
                return
            yield request

    def count_skipped(self) -> int:
        """Lines that a full reading skips."""
        skipped: list[InputError] = []
        for _ in self.read(skipped.append):
            pass
        return len(skipped)

    def _in_file_order(self, on_skip: Callable[[InputError], None]) -> Iterator[Request]:
        parse = _PARSERS[self.format]
        last_ms = 0
        for number, line in _lines(self.path):
            try:
                request = parse(_object(line))
                if request.time_ms < last_ms:
                    raise _BadLine(f"time {request.time_ms} ms is before {last_ms} ms of an earlier line", "sort the trace by time")
            except _BadLine as bad:
                error = InputError("E110", f"{self.path}:{number}", str(bad), f"{bad.fix}, or --skip-bad")
                if not self.skip_bad:
                    raise error from None
                on_skip(error)
                continue
            last_ms = request.time_ms
            if self.format == "mooncake" and self.block_tokens == BLOCK_TOKENS:
                request = replace(request, runs=split_blocks(request.runs, request.input_tokens))
            yield request


def open_trace(
    path: Path | str,
    *,
    block_tokens: int = BLOCK_TOKENS,
    variant: Variant = "plain",
    skip_bad: bool = False,
    request_limit: int | None = None,
) -> Trace:
    """Look at the first line, decide the format. Raises InputError: no such file, empty, unknown fields, wrong block size for it."""
    path = Path(path)
    found = _format_of(path)
    allowed = (BLOCK_TOKENS, MOONCAKE_BLOCK_TOKENS) if found == "mooncake" else (BLOCK_TOKENS,)
    if block_tokens not in allowed:
        raise InputError("E111", f"{path} cannot be read with blocks of {block_tokens} tokens", "", f"use {' or '.join(map(str, allowed))}")
    if variant == "busy1h" and found != "weka":
        raise InputError("E111", f"{path} has no conversations to pack into an hour", "", "use the busy1h variant with a weka trace")
    return Trace(path, found, block_tokens, variant, skip_bad, request_limit)


class _BadLine(Exception):
    def __init__(self, cause: str, fix: str = "drop the line") -> None:
        super().__init__(cause)
        self.fix = fix


def _format_of(path: Path) -> Format:
    wrong = None
    for number, line in _lines(path):
        try:
            fields = _object(line)
        except _BadLine as bad:
            wrong = wrong or f"line {number} is {bad}"
            continue  # the reading itself names the line
        if "hash_ids" in fields:
            return "mooncake"
        if "runs" in fields:
            return "weka"
        raise InputError(
            "E111", f'{path}:{number} has no "hash_ids" or "runs" field', "", "convert it to the Mooncake or weka format (docs/REPLAY.md)"
        )
    raise InputError("E111", f"{path} has no request", wrong or "it is empty", "name a trace with one JSON object a line")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines with their numbers (from 1)."""
    number = 0
    try:
        with path.open("rb") as raw, _unpacked(raw) as stream:
            while line := stream.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise InputError("E110", f"{path}:{number}", f"line is longer than {LINE_BYTES_MAX} bytes", "split or drop it")
                if not line.isspace():
                    yield number, line
    except FileNotFoundError:
        raise InputError("E111", f"{path} does not exist", "", "name a trace file") from None
    except OSError as error:
        raise InputError(
            "E110", f"{path}:{number + 1}", f"cannot be read ({error.strerror or error})", "copy or pack the file again"
        ) from None


def _unpacked(raw: IO[bytes]) -> IO[bytes]:
    # Arrow's streams say where an archive was cut; other readers of zstd end there as if the file did.
    magic = raw.read(4)
    raw.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return io.BufferedReader(pa.CompressedInputStream(raw, "gzip"))
    if magic == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))
    return raw


def _object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        raise _BadLine("not JSON") from None
    except RecursionError:
        raise _BadLine("nested too deep") from None
    if not isinstance(fields, dict):
        raise _BadLine("not a JSON object")
    return fields


def _number(fields: dict[str, Any], name: str, maximum: int) -> int:
    if name not in fields:
        raise _BadLine(f'"{name}" is missing')
    value = fields[name]
    if type(value) is not int or not 0 <= value <= maximum:
        raise _BadLine(f'"{name}" is {_short(value)}, not a whole number from 0 to {maximum}')
    return value


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _mooncake(fields: dict[str, Any]) -> Request:
    input_tokens = _number(fields, "input_length", INPUT_TOKENS_MAX)
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < ID_MAX for one in ids):
        raise _BadLine('"hash_ids" is not a list of whole numbers')
    needed = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
    if len(ids) != needed:
        raise _BadLine(f'"hash_ids" has {len(ids)} ids, {input_tokens} tokens need {needed}')
    return Request(_number(fields, "timestamp", TOKENS_MAX), input_tokens, _number(fields, "output_length", TOKENS_MAX), runs_of(ids))


def _weka(fields: dict[str, Any]) -> Request:
    input_tokens = _number(fields, "in", INPUT_TOKENS_MAX)
    found = fields.get("runs")
    if not isinstance(found, list) or not all(_is_run(run) for run in found):
        raise _BadLine('"runs" is not a list of [first id, count]')
    runs: Runs = tuple((first, count) for first, count in found)
    blocks, needed = sum(count for _, count in runs), input_tokens // BLOCK_TOKENS
    if blocks != needed:
        raise _BadLine(f'"runs" has {blocks} blocks, {input_tokens} tokens hold {needed}')
    return Request(_number(fields, "t", TOKENS_MAX), input_tokens, _number(fields, "out", TOKENS_MAX), runs, _number(fields, "s", ID_MAX))


def _is_run(run: object) -> bool:
    return (
        isinstance(run, list)
        and len(run) == 2
        and all(type(number) is int for number in run)
        and 0 <= run[0] < ID_MAX
        and 0 < run[1] < ID_MAX
    )


_PARSERS: dict[Format, Callable[[dict[str, Any]], Request]] = {"mooncake": _mooncake, "weka": _weka}


def _packed_into_an_hour(requests: Iterator[Request]) -> Iterator[Request]:
    first_ms: dict[int, int] = {}
    for request in requests:
        first = first_ms.setdefault(request.session, request.time_ms)
        yield replace(request, time_ms=request.time_ms - first + busy_hour_ms(request.session))
