"""report_50m_seconds, report_50m_memory_gb: `kvstore report` as a process over 50 million invented rows, in files as the writer cuts them.

Making the log is not timed; its `blocks` are empty lists, which the report never reads. Memory is the process's largest resident set.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.access_rows import write_log
from benchmarks.harness import ROOT, Bench, Figure, at_most, measures

ROWS = {"smoke": 250_000, "ci": 50_000_000, "full": 50_000_000}
START_MS = 1_795_000_000_000


@measures("report_50m_seconds", "report_50m_memory_gb")
def report_50m(bench: Bench) -> dict[str, Figure]:
    rows = ROWS[bench.scale.name]
    directory = bench.directory / "access-log"
    try:
        log_bytes = write_log(directory, rows, start_ms=START_MS)
        seconds, cpu, peak_bytes = reported(directory, rows, bench.directory / "report.json")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    busy = f"{cpu:.1f} s of CPU, load {os.getloadavg()[0]:.1f}"  # seconds on a shared machine tell of the others, too
    note = f"{rows / 1e6:g} M rows, {log_bytes / 1e9:.2f} GB in {-(-rows // 100_000)} files; {busy}"
    return {
        "report_50m_seconds": Figure(seconds, at_most(60), note),
        "report_50m_memory_gb": Figure(peak_bytes / 1e9, at_most(2), "largest resident set of the process"),
    }


def reported(log: Path, rows: int, answer: Path) -> tuple[float, float, int]:
    """Seconds, CPU seconds and peak resident bytes of one run; raises where its answer is wrong."""
    command = [sys.executable, "-m", "kvstore", "report", "--log", str(log), "--json"]
    with answer.open("wb") as out:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        _, status, used = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"kvstore report ended with {child.returncode}")
    measured = json.loads(answer.read_text())["data"]["measured"]
    if measured["log"]["requests"] != rows or measured["log"]["rows_that_do_not_add_up"]:
        raise RuntimeError(f"kvstore report counted {measured['log']}")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
