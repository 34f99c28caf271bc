"""When the mover `loopback` says that a layer is there: a device that moves nothing acknowledges, and tells its receiver, when told to.

In a process of its own, whose libibverbs is tests/native/libibverbs_stub.cpp. With bytes that move: tests/verbs/test_loopback.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from native_tools import build_stub

LAYERS = """
import ctypes, threading
import numpy as np
from kvstore.kernels._native import Loopback
verbs = ctypes.CDLL("libibverbs.so.1")
verbs.stub_record.restype = ctypes.c_char_p
core, memory = Loopback("fake0"), np.zeros(4096, np.uint8)
region, at = core.add(memory.ctypes.data, 4096, True), memory.ctypes.data
pieces = lambda count: np.full((count, 3), [at, at, 64], np.uint64)
number = core.copy(region, region, pieces(200), 1.0)
verbs.stub_acknowledge()
print("acknowledged", core.wait(number, 0.05))
print("told of", verbs.stub_arrive(), core.wait(number, 1.0))
for _ in range(3):  # each ends in mid-way, without its mark: nothing is acknowledged
    before = verbs.stub_posted()
    print("cut", core.copy(region, region, pieces(2000), 0.0), verbs.stub_posted() - before)
    verbs.stub_acknowledge()
    settled = []
    thread = threading.Thread(target=lambda: settled.append(core.settle(20.0)))
    thread.start()
    while verbs.stub_posted() == before + 1024 and thread.is_alive():
        thread.join(0.01)
    print("waits", thread.is_alive(), "for", verbs.stub_arrive())
    verbs.stub_acknowledge()
    thread.join(20)
    print("settled", settled, verbs.stub_record().decode().count("reset"))
print("again", core.wait(number, 0.0))
for _ in range(300):  # more marks than there are receive requests
    number = core.copy(region, region, pieces(1), 1.0)
    verbs.stub_acknowledge()
    assert number and verbs.stub_arrive() == 1
print("all", core.wait(number, 1.0))
marks = 0
while core.copy(region, region, pieces(1), 0.0):
    verbs.stub_acknowledge()
    marks += 1
print("at once", marks, verbs.stub_arrive())
core.copy(region, region, pieces(1), 1.0)
print("cut off", core.settle(0.0), verbs.stub_record().decode().count("reset"))
"""


def test_a_layer_of_loopback_is_there_when_the_receiver_was_told_and_not_when_it_was_acknowledged(tmp_path: Path) -> None:
    """And a copy that ran out of time is settled by a late mark, without a reset that would cut off others."""
    build_stub("libibverbs_stub", tmp_path, "libibverbs.so.1")
    env = {"LD_LIBRARY_PATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", LAYERS], env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    cut = ["cut 0 1024", "waits True for 1", "settled [True] 0"]
    expected = ["acknowledged False", "told of 1 True", *cut * 3, "again True", "all True", "at once 256 256", "cut off True 2"]
    assert ran.stdout.splitlines() == expected
