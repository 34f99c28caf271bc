"""Run by scripts/build-wheel inside an environment that has nothing but the wheel: twelve daemons, one prompt stored and loaded."""

from __future__ import annotations

import sys
import tempfile

import numpy as np

from kvstore.client import Client
from kvstore.keys import KeyChain, Namespace
from kvstore.layout import PRESETS
from kvstore.server.local import LocalCluster


def main() -> int:
    layout = PRESETS["v41"]
    chain = KeyChain(Namespace(weights="trial", kv_dtype="v41", layout_digest=layout.digest()))
    rng = np.random.default_rng(1)
    chain.extend(rng.integers(0, 128_000, 70 * 128, dtype=np.uint32))
    data = rng.integers(0, 256, (70, layout.block_bytes), dtype=np.uint8)
    loaded = np.zeros_like(data)
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(directory, capacity_bytes=256 << 20) as cluster,
        Client(cluster.map, layout=layout) as client,
    ):
        stored = client.store(chain.keys, data, first_block=0).result(60)
        ticket = client.lookup(chain.keys)
        result = client.load(ticket, loaded)
    same = result.blocks == 70 and np.array_equal(data, loaded)
    print(
        f"stored {stored.outcome.name}, promised {ticket.hit_blocks} blocks, loaded {result.blocks}, bytes {'equal' if same else 'DIFFER'}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
