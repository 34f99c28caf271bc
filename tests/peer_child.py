"""An agent's serving side in a process of its own: windows whose bytes follow from their keys; prints its port, ends at end of input.

python peer_child.py ENTRY_BYTES [stop]    `stop`: the process stands still (SIGSTOP) once it has printed
"""

from __future__ import annotations

import os
import random
import signal
import sys

from kvstore.client.agent.peer_server import PeerServer


def entry_of(key: bytes, size: int) -> bytes:
    return random.Random(key).randbytes(size)


if __name__ == "__main__":
    size = int(sys.argv[1])
    server = PeerServer("127.0.0.1", 0, windows=lambda owner, key: None if key[0] == 0 else entry_of(key, size))
    print(server.port, flush=True)
    if "stop" in sys.argv:
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.stdin.read()
    server.close()
