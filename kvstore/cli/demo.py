"""`kvstore demo`: a cluster, a real trace, two nodes lost on the way, every byte checked; then the engine on a cluster of its own, cold and
warm; then all is removed."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.output import Output
from kvstore.cli.signals import interrupted_by_signals
from kvstore.errors import ConfigError
from kvstore.replay.report import Latency, ReplayReport
from kvstore.replay.story import REQUESTS, Step, StoryReport, run_story
from kvstore.replay.trace import open_trace
from kvstore.units import format_bytes, format_seconds

if TYPE_CHECKING:  # it imports torch
    from kvstore.engine_integration.story import EngineStory

DISK_BYTES = 4_000_000_000


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="a cluster on a real trace, two nodes killed on the way, every byte checked",
        description="12 daemons serve 300 requests of a real trace with true-sized blocks, and lose two nodes on the way. Then the bundled "
        "engine answers three conversations and an agent's loop, with and without what the cache holds.",
        epilog="""\
examples:
  kvstore demo                       about a minute, 4 GB of disk, 2 GB of memory; all is removed at the end
  kvstore demo --no-engine           the store alone, some ten seconds
  kvstore demo --data DIR --keep     leaves the nodes' data in DIR
  kvstore demo --json                every step and figure for programs

exit code 1 if one byte was wrong or one promise was not kept
""",
    )
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="another trace; its first 300 requests are played")
    add("--data", type=Path, metavar="DIR", help="where the cluster keeps its data (default: a temporary directory)")
    add("--no-engine", action="store_true", help="leave the engine out (so does a Python without torch)")
    add("--model", metavar="SIZE", default="mini", choices=("mini", "tiny"), help="of the engine: mini, or tiny (for tests) (default mini)")
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
        _table(story, out)
        engine = _engine(args, directory, out)
    seconds = time.perf_counter() - began
    checked = format_bytes(story.whole.checked_bytes + story.read_back.checked_bytes)
    wrong = story.whole.wrong_bytes + story.read_back.wrong_bytes
    out.line(f"{checked} read and checked, {wrong} wrong bytes; {format_bytes(disk_bytes)} on disk at the end; {format_seconds(seconds)}")
    if args.keep:
        out.line(f"data kept in {directory}; look at it with kvstore fsck {directory}/node-00")
    ok = story.ok and (engine is None or engine.ok)
    out.line("every promise kept" if ok else "A PROMISE WAS NOT KEPT", "green" if ok else "bold red")
    data = {"seconds": seconds, "disk_bytes": disk_bytes, "directory": str(directory) if args.keep else None, **story.to_dict()}
    out.result({**data, "engine": None if engine is None else engine.to_dict()})
    return 0 if ok else 1


def _engine(args: argparse.Namespace, directory: Path, out: Output) -> EngineStory | None:
    """None where it is not wanted, or cannot be had."""
    if args.no_engine:
        return None
    if importlib.util.find_spec("torch") is None:
        out.step("skip", "engine", "torch is not installed: pip install 'kvstore[engine]'")
        return None
    from kvstore.engine_integration.models import load_model
    from kvstore.engine_integration.story import run_engine_story, turns_count

    model, weights = load_model(args.model)
    with out.progress("turns", turns_count()) as bar:
        story = run_engine_story(directory / "engine", model, weights, lambda step: _tell(step, out), bar.advance)
    _engine_table(story, out)
    return story


def _engine_table(story: EngineStory, out: Output) -> None:
    """The last turn of each script in every run, and the sum of all turns."""
    columns = ("last turn", "prompt tokens", "cold", "window hit", "cached", "no window: exact", "bounded", "two nodes down", "saved")
    rows = []
    for name, cold in story.turns["cold"].items():
        last = {run: scripts[name][-1] for run, scripts in story.turns.items()}
        spans = {run: turn.ttft_seconds for run, turn in last.items()}
        faster = f"{spans['cold'] / spans['warm']:.1f} x" if spans["warm"] else "-"
        times = {run: format_seconds(seconds) for run, seconds in spans.items()}
        found = (times["warm"], f"{last['warm'].cached_tokens:,}", times["exact"], times["bounded"], times["two down"], faster)
        rows.append((name, f"{cold[-1].prompt_tokens:,}", times["cold"], *found))
    out.line()
    out.table(columns, rows)
    out.line("seconds to the first token; saved: cold over window hit")
    out.line()


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
