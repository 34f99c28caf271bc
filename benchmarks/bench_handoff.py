"""handoff_vs_loopback: all that prefill knows of 131,072 tokens, at the original's sizes, to a decode process, beside what loopback moves.

Ours: offer, parts, checks of every part at both ends, commit; from memory to memory, of two processes. Raw: as many streams of as many
bytes from a hot buffer to their place, unchecked.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import xxhash

from benchmarks.harness import ROOT, Bench, Figure, at_least, interleaved, measures, ratio_of_medians, seconds, spread
from benchmarks.raw import Loopback
from kvstore.client.agent.frames import PeerConfig
from kvstore.client.agent.handoff import STREAMS, HandoffOutcome, send_handoff
from kvstore.client.agent.peers import Peers

TOKENS = 131_072
PLANES = 4  # of the global rows, one per source layer
TOKEN_BYTES = 890
RING_BYTES = 1_415_040  # 134 rows of 20 layers: the encoder's, and as much for the decoder's
STATE_BYTES = 1 << 20  # half-done rows of compressors, the draft layer's rows, sampler: about this much
BAR = 0.6


def sections_of(tokens: int) -> dict[str, memoryview]:
    dice = np.random.default_rng(1)
    sizes = {f"rows.{plane}": tokens * TOKEN_BYTES // PLANES for plane in range(PLANES)}
    sizes |= {"rings.encoder": RING_BYTES, "rings.decoder": RING_BYTES, "state": STATE_BYTES}
    return {name: dice.integers(0, 256, size, np.uint8).data for name, size in sizes.items()}


@measures("handoff_vs_loopback")
def handoff(bench: Bench) -> dict[str, Figure]:
    sections = sections_of(TOKENS if bench.scale.name != "smoke" else TOKENS // 32)
    total = sum(map(len, sections.values()))
    whole = xxhash.xxh3_64()
    for data in sections.values():
        whole.update(data)
    told = f"{whole.intdigest():016x}"
    taker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.taker", str(2 * total)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert taker.stdin and taker.stdout
    output = taker.stdout
    address = f"127.0.0.1:{int(output.readline())}"

    def send(peers: Peers) -> None:
        outcome = send_handoff(peers, address, sections, deadline_seconds=60)
        if outcome is not HandoffOutcome.DONE:
            raise RuntimeError(f"handoff: {outcome.value}")

    def rate(peers: Peers) -> float:
        took = seconds(lambda: send(peers))
        if output.readline().strip() != told:  # after the clock has stopped, and before the next one starts
            raise RuntimeError("wrong bytes")
        return total / took

    try:
        with (
            Peers(config=PeerConfig(congestion_control="cubic")) as peers,
            Loopback(STREAMS, total // STREAMS, each_to_its_place=True) as plain,
            Loopback(STREAMS, total // STREAMS, "cubic", each_to_its_place=True) as alike,
        ):
            ours, wire, alike_wire = interleaved(
                bench.scale.rounds, lambda: rate(peers), plain.round_bytes_per_second, alike.round_bytes_per_second
            )
    finally:
        taker.communicate()
    median = float(np.median(ours))
    note = f"{total / 1e6:.1f} MB in {total / median * 1e3:.0f} ms, {median / 1e9:.2f} of {np.median(wire) / 1e9:.2f} GB/s; "
    note += f"{ratio_of_medians(ours, alike_wire):.2f} of {np.median(alike_wire) / 1e9:.2f} with our congestion control; {spread(ours)}"
    return {"handoff_vs_loopback": Figure(ratio_of_medians(ours, wire), at_least(BAR), note)}
