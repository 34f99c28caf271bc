"""Run in each of two guests, with KVSTORE_TRANSPORT=rdma: host 0 serves twelve nodes, host 1 loads from them and checks each byte."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from client_tools import NO_REUSE, V41, bytes_of, chain, load, store, until, until_whole
from verbs.nodes import cluster

from kvstore.client import Client, LoadOutcome
from kvstore.clustermap import ClusterMap

HOST, PORT, DEVICE = "10.77.0.1", 5000, "rxe0"
SECONDS = 240.0
BLOCKS = 64


def serve() -> None:
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), host=HOST, device=DEVICE) as (nodes, map_, _):
        map_.save(Path(folder) / "map.toml")
        with socket.create_server((HOST, PORT)) as listener:
            listener.settimeout(SECONDS)
            peer = listener.accept()[0]
        peer.settimeout(SECONDS)
        with peer, peer.makefile("rw") as file:
            print(json.dumps((Path(folder) / "map.toml").read_text()), file=file, flush=True)
            loaded_bytes = int(file.readline())
        until(lambda: all(node.stats["verbs_queue_pairs"] == 0 for node in nodes), "all queue pairs are gone")
        written = sum(node.stats["verbs_bytes"] for node in nodes)
        assert written >= loaded_bytes > 0, (written, loaded_bytes)
        print(f"{written} bytes written to the other host's zones")


def connected() -> socket.socket:
    end = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection((HOST, PORT), SECONDS)
        except OSError:
            assert time.monotonic() < end, "host 0 does not listen"
            until(lambda: True, "another try")


def read() -> None:
    with connected() as peer, peer.makefile("rw") as file, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map.toml"
        path.write_text(json.loads(file.readline()))
        with Client(ClusterMap.load(path), layout=V41, config=NO_REUSE) as client:
            keys = chain(BLOCKS, V41)
            store(client, keys)
            until_whole(client, keys)
            began = time.monotonic()
            result, place = load(client, client.lookup(keys))
            seconds = time.monotonic() - began
            stats = client.stats()
        assert (result.outcome, result.blocks) == (LoadOutcome.COMPLETE, BLOCKS), result
        assert (place == bytes_of(keys, V41)).all()
        assert stats["read_bytes_tcp"] == 0
        print(f"{place.nbytes} bytes in {seconds:.2f} s, all right")
        print(int(stats["read_bytes_rdma"]), file=file, flush=True)


if __name__ == "__main__":
    serve() if os.environ["RDMA_VM_HOST"] == "0" else read()
