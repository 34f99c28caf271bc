"""up_seconds: from typing `kvstore up` (12 daemons) to the first request served to a client of another process."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Bench, Figure, at_most, measures
from benchmarks.prompts import LAYOUT, chain_keys
from kvstore.client import Client
from kvstore.clustermap import ClusterMap
from kvstore.errors import KvstoreError

GIVE_UP_SECONDS = 60.0


def first_request_seconds(folder: Path) -> float:
    """Starts the command on an empty folder, asks until a lookup is answered, ends it."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "kvstore", "up", "--dir", str(folder), "--port", "0"]
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        up = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
    try:
        map_path = folder / "map.toml"
        while time.perf_counter() - begin < GIVE_UP_SECONDS and up.poll() is None:
            try:
                with Client(ClusterMap.load(map_path), layout=LAYOUT) as client:
                    client.lookup(chain_keys(1, 4))
                    if client.stats()["connected_nodes"]:
                        return time.perf_counter() - begin
            except (KvstoreError, OSError):
                time.sleep(0.01)  # not there yet
        raise RuntimeError(f"kvstore up did not serve: {log.read_text()[-400:]}")
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(30)


@measures("up_seconds")
def up_seconds(bench: Bench) -> dict[str, Figure]:
    times = [first_request_seconds(bench.directory / f"up-{number}") for number in range(1 if bench.scale.name == "smoke" else 3)]
    return {"up_seconds": Figure(statistics.median(times), at_most(15), f"n={len(times)}, worst {max(times):.1f} s")}
