"""RDMA, in a guest whose kernel has it (tests/verbs/guest.py): one start for the small sizes, others with SIZE=full."""

from __future__ import annotations

import os
import sys

import pytest
from verbs.guest import ROOT, pytest_in_guest, run_in_guest

RDMA = ("KVSTORE_TRANSPORT=rdma", "KVSTORE_RDMA_DEVICE=rxe1")  # of clients; daemons take the first device, rxe0
GUEST_SECONDS = 6000 if os.environ.get("SIZE") == "full" else 600


@pytest.mark.timeout(GUEST_SECONDS + 100)
def test_verbs_in_a_guest() -> None:
    report = pytest_in_guest("tests/verbs", seconds=GUEST_SECONDS)
    assert " passed" in report, report


@pytest.mark.long
@pytest.mark.timeout(700)
def test_a_client_in_one_guest_loads_from_daemons_in_another() -> None:
    env = ("KVSTORE_TRANSPORT=rdma", "KVSTORE_RDMA_DEVICE=rxe0")
    ended = run_in_guest(sys.executable, "tests/verbs/two_hosts.py", seconds=600, hosts=2, env=env)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-8000:]}"
    assert "all right" in ended.stdout
    assert "written to the other host's zones" in ended.stdout


@pytest.mark.long
@pytest.mark.timeout(5000)
@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "tests").glob("test_client_*.py")))
def test_the_clients_suite_by_rdma_in_a_guest(file: str) -> None:
    """With daemons as processes, as on TCP; a guest for each file."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "1200", f"tests/{file}")
    ended = run_in_guest(*command, seconds=4800, env=RDMA)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}\n{ended.stderr[-4000:]}"
