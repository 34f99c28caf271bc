"""`kvstore bench`: measures this machine's kvstore beside what the machine can do. The measurements live in benchmarks/ of a checkout."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.cli.output import Output
from kvstore.errors import ConfigError, UsageError
from kvstore.tomlfile import suggestion

CHECKOUT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = """\
examples:
  kvstore bench                              everything, half an hour: table, and bench-results.json in the checkout
  kvstore bench --only load_warm_vs_loopback one figure
  kvstore bench --smoke                      does it run here at all?
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("bench", help="measure load, store, lookup and faults against this machine's limits", epilog=EXAMPLES)
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="measure this figure alone; may be given again")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--smoke", action="store_true", help="tiny sizes: says whether it runs, not how fast")
    size.add_argument("--full", action="store_true", help="more rounds, 1,000 kills: an hour or more")
    parser.add_argument("--results", metavar="FILE", help="results file (default bench-results.json of the checkout; none with --smoke)")
    parser.add_argument("--list", action="store_true", help="what can be measured")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: all bars met; 1: some not met, or a measurement failed."""
    if not (CHECKOUT / "benchmarks" / "__main__.py").exists():
        raise ConfigError(
            "E151", "bench", "an installed package has no measurements in it", "run it in a checkout of the sources: make bench"
        )
    if args.list or args.only:  # what there is, is known to the checkout alone
        listed = json.loads(_benchmarks("--list", "--json", stdout=subprocess.PIPE).stdout)
        known = [name for each in listed for name in each["ids"]]
        if unknown := next((name for name in args.only if name.split(".")[0] not in known), None):
            raise UsageError("E140", f'--only "{unknown}" is no figure', fix=suggestion(unknown, known))
    if args.list:
        return _list(args.out, listed, {name.split(".")[0] for name in args.only} or set(known))
    words = [word for name in args.only for word in ("--only", name)]
    words += [f"--{flag}" for flag in ("smoke", "full") if getattr(args, flag)]
    words += ["--out", str(Path(args.results).absolute())] if args.results else []
    if not args.json:
        return _benchmarks(*words).returncode
    done = _benchmarks(*words, "--json", stdout=subprocess.PIPE)
    args.out.result({"figures": json.loads(done.stdout) if done.stdout.strip() else []})
    return done.returncode


def _benchmarks(*words: str, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "benchmarks", *words], cwd=CHECKOUT, check=False, stdout=stdout, text=True)


def _list(out: Output, listed: Sequence[dict[str, Any]], wanted: set[str]) -> int:
    rows = [(name, each["measured_by"]) for each in listed for name in each["ids"] if name in wanted]
    out.table(("figure", "measured by"), rows)
    out.result({"figures": [{"id": name, "measured_by": measured_by} for name, measured_by in rows]})
    return 0
