"""A decode process of bench_handoff: `python -m benchmarks.taker CAPACITY_BYTES`. Prints its port; then for each handoff, once it is
whole and released, one line: xxh3-64 of its bytes. Ends when its stdin closes.
"""

from __future__ import annotations

import sys
import threading

import xxhash

from kvstore.client.agent.inbox import ArrivalState, HandoffInbox
from kvstore.client.agent.peer_server import PeerServer

WAIT_SECONDS = 60.0


def main() -> int:
    inbox = HandoffInbox(int(sys.argv[1]))
    server = PeerServer("127.0.0.1", 0, handoffs=inbox)
    ending = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ending.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    print(server.port, flush=True)
    while not ending.is_set():
        arrival = inbox.take(None, 0.2)
        if arrival is None:
            continue
        whole = xxhash.xxh3_64()
        state = arrival.wait(WAIT_SECONDS)
        for name, _ in arrival.offer.sections if state is ArrivalState.COMPLETE else ():
            section = arrival.section(name)
            assert section is not None
            whole.update(section)
            del section
        inbox.release(arrival)
        print(f"{whole.intdigest():016x}", flush=True)
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
