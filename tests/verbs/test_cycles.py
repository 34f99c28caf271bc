"""Both native ends in one process, connected and destroyed again and again (tests/native/verbs_cycles.cpp): nothing is left behind."""

from __future__ import annotations

import os
import subprocess

import pytest

PROGRAM = os.environ.get("KVSTORE_VERBS_CYCLES", "")  # built by the host's test
CYCLES = "10000" if os.environ.get("SIZE") == "full" else "60"


@pytest.mark.skipif(not PROGRAM, reason="tests/test_verbs_guest.py builds it")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("fence", ["windows", "registrations"])
def test_descriptors_pinned_memory_and_queue_pairs_stay_flat(fence: str) -> None:
    ran = subprocess.run([PROGRAM, CYCLES, "rxe1", "rxe0", fence], capture_output=True, text=True, timeout=2900)
    print(ran.stdout)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr[-4000:]
