"""`python -m benchmarks [--only ID ...] [--smoke | --full] [--list] [--out FILE] [--json]`.

Measures, prints one row a figure and writes bench-results.json (a smoke run writes nothing unless --out is given).
Exit: 0 all bars met, 1 some not met or a measurement failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    REGISTRY,
    RESULTS,
    SCALES,
    Bench,
    Figure,
    Measure,
    NotMeasurable,
    commit,
    machine,
    merge_results,
    rows_of,
    with_worst,
)


def load_registry() -> None:
    """Imports every bench_*.py: each registers what it measures."""
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        importlib.import_module(f"benchmarks.{path.stem}")


def chosen(only: Sequence[str]) -> dict[Measure, list[str]]:
    """Measurements to run with the ids of each, in the registry's order; `id.part` chooses its id."""
    wanted = {name.split(".")[0] for name in only}
    picked: dict[Measure, list[str]] = {}
    for name, measure in REGISTRY.items():
        if not wanted or name in wanted:
            picked.setdefault(measure, []).append(name)
    return picked


def show(console: Console, figures: Mapping[str, Figure]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading, justify in [("ID", "left"), ("VALUE", "right"), ("BAR", "left"), ("OK", "left"), ("NOTE", "left")]:
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    for name, figure in figures.items():
        table.add_row(
            name, f"{figure.value:.5g}", f"{figure.bar.sense} {figure.bar.limit:g}", "ok" if figure.ok else "NOT MET", figure.note
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures kvstore beside what this machine can do.")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="measure this id alone; may be given again")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--smoke", action="store_true", help="the same code at a tiny size: says whether it runs, not how fast")
    size.add_argument("--full", action="store_true", help="more rounds, 1,000 kills: an hour or more")
    parser.add_argument("--out", type=Path, help=f"results file (default: {RESULTS.name} beside the sources; none with --smoke)")
    parser.add_argument(
        "--directory", type=Path, help="where the clusters keep their data (default: a new folder in the system's temporary one)"
    )
    parser.add_argument("--json", action="store_true", help="rows as one JSON list on stdout, nothing else")
    parser.add_argument("--list", action="store_true", help="ids, and what measures them")
    options = parser.parse_args(arguments)
    load_registry()
    unknown = [name for name in options.only if name.split(".")[0] not in REGISTRY]
    if unknown:
        parser.error(f"unknown id {unknown[0]!r}. Fix: one of {', '.join(REGISTRY)}")
    picked = chosen(options.only)
    if options.list:
        listed = [{"ids": ids, "measured_by": f"{measure.__module__}.{measure.__name__}"} for measure, ids in picked.items()]
        if options.json:
            print(json.dumps(listed))
        else:
            print("\n".join(f"{', '.join(each['ids']):<60} {each['measured_by']}" for each in listed))
        return 0

    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 160)
    console.print(f"rig     {machine()}\ncommit  {commit()}", highlight=False)
    scale = SCALES["smoke" if options.smoke else "full" if options.full else "ci"]
    out = options.out or (None if options.smoke else RESULTS)
    everything: dict[str, Figure] = {}
    failed: list[str] = []
    unmeasured: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.directory) as scratch:
        bench = Bench(scale, Path(scratch))
        try:
            for measure, ids in picked.items():
                console.print(f"measuring {', '.join(ids)}", highlight=False)
                try:
                    figures = with_worst(measure(bench))
                except NotMeasurable as missing:
                    unmeasured += [f"{name} ({missing})" for name in ids]
                    continue
                except Exception:
                    # One measurement that fails must not hide the others; its trace and the exit code tell of it.
                    traceback.print_exc()
                    failed += ids
                    continue
                everything.update(figures)
                show(console, figures)
                if out:
                    merge_results(out, figures)
        finally:
            bench.close()
    if options.json:
        print(json.dumps(list(rows_of(everything))))
    missed = [name for name, figure in everything.items() if not figure.ok]
    console.print(f"{len(everything) - len(missed)} of {len(everything)} figures meet their bar", highlight=False)
    if unmeasured:
        console.print(f"not measured on this machine: {', '.join(unmeasured)}", highlight=False)
    if missed:
        console.print(f"not met: {', '.join(missed)}", highlight=False)
    if failed:
        console.print(f"failed: {', '.join(failed)}", highlight=False)
    return int(bool(failed or missed))


if __name__ == "__main__":
    sys.exit(main())
