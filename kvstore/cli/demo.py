"""`kvstore demo`: a cluster, a real trace, two nodes lost on the way, every byte checked; then all is removed."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from kvstore.cli.output import Output
from kvstore.cli.signals import interrupted_by_signals
from kvstore.errors import ConfigError
from kvstore.replay.report import Latency, ReplayReport
from kvstore.replay.story import REQUESTS, Step, StoryReport, run_story
from kvstore.replay.trace import open_trace
from kvstore.units import format_bytes, format_seconds

DISK_BYTES = 4_000_000_000


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="a cluster on a real trace, two nodes killed on the way, every byte checked",
        description="12 daemons serve 300 requests of a real trace with true-sized blocks, and lose two nodes on the way.",
        epilog="""\
examples:
  kvstore demo                       some ten seconds, 4 GB of disk, 2 GB of memory; all is removed at the end
  kvstore demo --data DIR --keep     leaves the nodes' data in DIR
  kvstore demo --json                every step and figure for programs

exit code 1 if one byte was wrong or one promise was not kept
""",
    )
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="another trace; its first 300 requests are played")
    add("--data", type=Path, metavar="DIR", help="where the cluster keeps its data (default: a temporary directory)")
    add("--keep", action="store_true", help="leave the data there, to look at with kvstore fsck")


def run(args: argparse.Namespace) -> int:
    out: Output = args.out
    began = time.perf_counter()
    with interrupted_by_signals(), ExitStack() as stack:
        path = args.trace or stack.enter_context(as_file(files("kvstore.replay") / "conversation_300.jsonl.gz"))
        requests = list(open_trace(path, request_limit=REQUESTS))
        directory = stack.enter_context(_directory(args.data, args.keep))
        out.line(f"kvstore demo   {len(requests)} requests of {Path(path).name}, 113,920 bytes a block, in {directory}")
        with out.progress("requests", len(requests)) as bar:
            story = run_story(directory, requests, lambda step: _tell(step, out), bar.advance)
        disk_bytes = sum(file.stat().st_blocks * 512 for file in directory.rglob("*") if file.is_file())
    seconds = time.perf_counter() - began
    _table(story, out)
    checked = format_bytes(story.whole.checked_bytes + story.read_back.checked_bytes)
    wrong = story.whole.wrong_bytes + story.read_back.wrong_bytes
    out.line(f"{checked} read and checked, {wrong} wrong bytes; {format_bytes(disk_bytes)} on disk at the end; {format_seconds(seconds)}")
    if args.keep:
        out.line(f"data kept in {directory}; look at it with kvstore fsck {directory}/node-00")
    out.line("every promise kept" if story.ok else "A PROMISE WAS NOT KEPT", "green" if story.ok else "bold red")
    out.result({"seconds": seconds, "disk_bytes": disk_bytes, "directory": str(directory) if args.keep else None, **story.to_dict()})
    return 0 if story.ok else 1


@contextmanager
def _directory(named: Path | None, keep: bool) -> Iterator[Path]:
    """An empty directory with room for the demo; what the demo put there is removed again unless `keep`."""
    if named is not None and named.exists() and any(named.iterdir()):
        raise ConfigError("E143", f"{named} is not empty", fix="name a new directory, or leave --data out")
    created = named is None or not named.exists()
    directory = Path(tempfile.mkdtemp(prefix="kvstore-demo-")) if named is None else named
    directory.mkdir(parents=True, exist_ok=True)
    try:
        free = shutil.disk_usage(directory).free
        if free < DISK_BYTES:
            what = f"the demo needs {format_bytes(DISK_BYTES)} in {directory}, {format_bytes(free)} are free"
            raise ConfigError("E143", what, fix="free some, or name a larger disk with --data DIR")
        yield directory
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            for entry in directory.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            if created:
                directory.rmdir()


def _tell(step: Step, out: Output) -> None:
    out.step("ok" if step.ok else "FAIL", step.name, f"{step.text}   {format_seconds(step.seconds)}")


def _table(story: StoryReport, out: Output) -> None:
    parts: dict[str, ReplayReport] = {**story.phases, "all": story.whole, "read back": story.read_back}

    def row(name: str, cell: Callable[[ReplayReport], str]) -> tuple[str, ...]:
        return name, *(cell(part) for part in parts.values())

    first_pass = [*story.phases.values(), story.whole]
    rows = [
        row("requests", lambda part: f"{part.requests:,}"),
        row("hit tokens", lambda part: f"{part.hit_tokens:,}"),
        ("infinite cache", *(f"{part.ideal_hit_tokens:,}" for part in first_pass), "-"),
        ("exact LRU, 9/10 room", *(f"{part.lru_hit_tokens or 0:,}" for part in first_pass), "-"),
        row("stored", lambda part: format_bytes(part.stored_bytes)),
        row("loaded, checked", lambda part: format_bytes(part.checked_bytes)),
        row("wrong bytes", lambda part: f"{part.wrong_bytes:,}"),
        row("decodes", lambda part: f"{part.decodes:,}"),
        row("degraded stores", lambda part: f"{part.store_outcomes.get('degraded', 0):,}"),
        row("lookup p50 / p99 ms", lambda part: _p50_p99(part.lookup)),
        row("load p50 / p99 ms", lambda part: _p50_p99(part.load)),
        row("store p50 / p99 ms", lambda part: _p50_p99(part.store)),
    ]
    out.line()
    out.table(("", *parts), rows)
    out.line()


def _p50_p99(latency: Latency) -> str:
    if latency.p50_seconds is None or latency.p99_seconds is None:
        return "-"
    return f"{1000 * latency.p50_seconds:.1f} / {1000 * latency.p99_seconds:.1f}"
