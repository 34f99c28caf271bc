"""Verifies a data directory that no daemon holds: every sum of every record, the index against the segments, bytes that nobody owns.

Reads only. With `repair`, what is bad is dropped by the store itself, in the way it drops it while running: bad records through
report_corrupt(), a damaged index or footer by the rebuild that follows a power loss. What is dropped is a miss, never a loss of truth.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import xxhash

from kvstore.entry import SEGMENT_SYNTHETIC, decode
from kvstore.errors import ConfigError
from kvstore.filter import Filter, load
from kvstore.kernels import _native
from kvstore.record import ALIGN, Head, padded_bytes, parse_head
from kvstore.segment import data_runs, read_footer
from kvstore.server.fsck_index import FREED, ROW, STATE
from kvstore.server.owned import held
from kvstore.version import module_command

FINDINGS_MAX: Final = 1000  # told one by one; past it they are only counted
START_SECONDS_MAX: Final = 3600.0
FILTER: Final = "filter"

Kind = Literal["record", "missing", "index", "footer", "orphan", "state", "filter"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Finding:
    """`orphan`: bytes that no entry owns; after an unclean stop the next start frees those by itself."""

    kind: Kind
    text: str
    segment: int = 0
    offset_bytes: int = 0


@dataclass
class FsckReport:
    """`ok`: nothing is wrong. Counts go on past FINDINGS_MAX findings. After a repair `findings` still says what was found."""

    data_dir: str
    clean_stop: bool = False
    index_trusted: bool = False
    filter_stop: int = 0  # the saved filter that the state names; 0: none
    segments: int = 0
    segments_sealed: int = 0
    records: int = 0
    records_bad: int = 0
    record_bytes: int = 0
    orphan_bytes: int = 0
    freed_bytes: int = 0  # deleted, not yet punched: no fault
    findings: list[Finding] = field(default_factory=list)
    findings_count: int = 0
    repaired: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.findings_count == 0

    def add(self, kind: Kind, text: str, segment: int = 0, offset_bytes: int = 0) -> None:
        self.findings_count += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(kind, text, segment, offset_bytes))


@dataclass
class _Place:
    offset_bytes: int
    record_bytes: int
    key: bytes  # of the extents row; empty: freed

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + padded_bytes(self.record_bytes)


def fsck(data_dir: str | Path, repair: bool = False, progress: Progress | None = None) -> FsckReport:
    """Raises DirectoryInUse while a daemon holds it, ConfigError for what is no data directory. `progress(done, all)` in bytes."""
    directory = Path(data_dir)
    if not (directory / "segments").is_dir():
        raise ConfigError("E122", f"data directory {directory}", "no kvstore data in it", "name the directory given to kvstore node --data")
    report = FsckReport(str(directory))
    with _held(directory):
        _read_state(directory, report)
        places, bad = _read_index(directory, report), list[_Place]()
        _check_segments(directory, places, report, bad, progress)
    if repair and not report.ok:
        _repair(directory, report, bad)
    return report


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(directory))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError("E122", f"data directory {directory}", reason, "run it as the user of the daemon") from None
        yield


def _read_state(directory: Path, report: FsckReport) -> None:
    """Whether the next start would believe the index (kernels/store_start.cpp decides the same way)."""
    try:
        text = (directory / "state").read_bytes()
    except OSError:
        report.add("state", "no state file: the next start rebuilds the index")
        return
    body, _, last = text.rpartition(b"sum ")
    if last != f"{xxhash.xxh3_64_intdigest(body):016x}\n".encode():
        report.add("state", "the state file is damaged: the next start rebuilds the index")
        return
    words = dict(line.split(" ", 1) for line in body.decode().splitlines() if " " in line)
    report.clean_stop = words.get("running") == "0"
    report.filter_stop = int(words.get("filter", "0"), 16) if report.clean_stop else 0
    same_boot = words.get("boot") == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    rebuilding = (directory / "index.rebuild").exists()
    report.index_trusted = not rebuilding and (report.clean_stop or same_boot or words.get("mode") == "strict")


def _read_index(directory: Path, report: FsckReport) -> dict[int, list[_Place]]:
    """Places by segment. A process of its own reads the index: a damaged one can take its reader down."""
    places: dict[int, list[_Place]] = {}
    if not report.index_trusted:
        return places
    saved = load(directory / FILTER) if report.filter_stop else None
    denied, state = 0, (0, 0)
    reader = [*module_command("kvstore.server.fsck_index"), str(directory / "index")]
    with subprocess.Popen(reader, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        while len(row := process.stdout.read(ROW.size)) == ROW.size:
            kind, key, segment, offset_4k, size_bytes = ROW.unpack(row)
            if kind == STATE:
                state = struct.unpack_from("<QQ", key)
                continue
            denied += kind != FREED and saved is not None and not saved.maybe(key[:48])
            place = _Place(offset_4k * ALIGN, size_bytes, b"" if kind == FREED else key)
            if kind == FREED:
                report.freed_bytes += size_bytes
            if segment != SEGMENT_SYNTHETIC:
                places.setdefault(segment, []).append(place)
        said = process.stderr.read().decode(errors="replace").splitlines()
    if process.returncode:
        report.add("index", said[-1] if process.returncode == 1 and said else f"the index cannot be read (status {process.returncode})")
        report.index_trusted = False
        return {}
    if report.filter_stop:
        _check_filter(report, saved, state, denied)
    return places


def _check_filter(report: FsckReport, saved: Filter | None, state: tuple[int, int], denied: int) -> None:
    """What the next start will not believe costs only time; what it would believe and is wrong would hide what is stored."""
    if saved is None:
        report.add("filter", "the saved filter is missing or damaged: the next start builds another")
    elif (saved.stop, saved.last_txn) != state or saved.stop != report.filter_stop:
        report.add("filter", "the saved filter is of another state of the index: the next start builds another")
    elif denied:
        report.add("filter", f"the saved filter denies {denied} entries of the index")


def _check_segments(
    directory: Path, places: dict[int, list[_Place]], report: FsckReport, bad: list[_Place], progress: Progress | None
) -> None:
    files = {int(path.stem, 16): path for path in sorted((directory / "segments").glob("????????.seg"))}
    for number in sorted(places.keys() - files.keys()):
        for place in places[number]:
            if place.key:
                report.add("missing", f"segment {number} is gone, and a record with it", number, place.offset_bytes)
                bad.append(place)
    total, done = sum(path.stat().st_size for path in files.values()), 0
    for number, path in files.items():
        with path.open("rb") as file:
            _check_segment(file.fileno(), number, places.get(number, []), report, bad)
        done += path.stat().st_size
        if progress is not None:
            progress(done, total)


def _check_segment(fd: int, number: int, places: list[_Place], report: FsckReport, bad: list[_Place]) -> None:
    report.segments += 1
    size = os.fstat(fd).st_size
    footer = read_footer(fd, number)
    end = size
    if footer is not None:
        report.segments_sealed += 1
        end = footer.data_end_bytes
        if not report.index_trusted:
            places = [_Place(offset, _record_bytes(head), b"-") for offset, head in footer.entries if _is_there(fd, offset, head)]
    elif report.clean_stop:
        report.add("footer", f"segment {number} has no sound footer after a clean stop", number)
    if footer is None and not report.index_trusted:
        return  # the next start looks at each 4 KiB of it
    places.sort(key=lambda place: place.offset_bytes)
    at = 0
    for place in places:
        if place.offset_bytes < at:
            report.add("index", f"two records overlap in segment {number}", number, place.offset_bytes)
        _count_orphans(fd, number, at, place.offset_bytes, report)
        at = max(at, place.end_bytes)
        if place.key and not _check_record(fd, number, place, report):
            bad.append(place)
    _count_orphans(fd, number, at, end, report)


def _record_bytes(head: bytes) -> int:
    parsed = parse_head(head)
    return parsed.record_bytes if isinstance(parsed, Head) else ALIGN


def _is_there(fd: int, offset: int, head: bytes) -> bool:
    """Whether a record named by a footer is still there; freed ones are holes, or, where a copy filled those, no longer have their head."""
    end = offset + _record_bytes(head)
    return list(data_runs(fd, offset, end)) == [(offset, end)] and os.pread(fd, len(head), offset) == head


def _check_record(fd: int, number: int, place: _Place, report: FsckReport) -> bool:
    report.records += 1
    report.record_bytes += place.record_bytes
    problem = ""
    try:
        raw = os.pread(fd, place.record_bytes, place.offset_bytes)
    except OSError as error:
        raw, problem = b"", f"cannot be read: {(error.strerror or str(error)).lower()}"
    if not problem and (status := _native.check_record(raw)):
        problem = f"fails its checks (status {status})"
    if not problem and place.key != b"-":
        head = parse_head(raw)
        assert isinstance(head, Head)
        if head.owner + head.extent_key + struct.pack("<QB", head.write_id, head.shard) != place.key:
            problem = "is not the one the index names"
    if problem:
        report.records_bad += 1
        report.add("record", f"the record at {place.offset_bytes} of segment {number} {problem}", number, place.offset_bytes)
    return not problem


def _count_orphans(fd: int, number: int, start: int, end: int, report: FsckReport) -> None:
    orphans = sum(stop - begin for begin, stop in data_runs(fd, start, end))
    report.orphan_bytes += orphans
    if orphans and report.clean_stop:
        report.add("orphan", f"{orphans} bytes at {start} of segment {number} belong to no record", number, start)


def _repair(directory: Path, report: FsckReport, bad: list[_Place]) -> None:
    kinds = {finding.kind for finding in report.findings}
    if kinds & {"index", "footer", "orphan", "state"}:
        (directory / "index.rebuild").touch()
        report.repaired.append("the index was rebuilt from the segments, and every byte that no record owns was freed")
    if "filter" in kinds:
        (directory / FILTER).unlink(missing_ok=True)
        report.repaired.append("the filter was built again")
    store = _native.Store(str(directory))
    try:
        store.wait_started(START_SECONDS_MAX)
        dropped = store.stats()["recovery_dropped_total"]
        for place in bad:
            if len(place.key) == _KEY_BYTES:
                store.report_corrupt(place.key[:16], place.key[16:48], struct.unpack("<Q", place.key[48:56])[0], place.key[56])
        dropped += store.stats()["corrupt_found_total"]
        if dropped:
            report.repaired.append(f"{dropped} bad records were dropped")
        store.flush()
    finally:
        store.close()


_KEY_BYTES: Final = 57
assert decode(bytes(_KEY_BYTES), b"") is None
