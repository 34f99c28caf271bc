"""RDMA, in a guest whose kernel has it (tests/verbs/guest.py): one start for the small sizes, others with SIZE=full."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from native_tools import build_native, build_stub
from verbs.guest import folder_in_guest, pytest_in_guest, run_in_guest

RDMA = ("KVSTORE_TRANSPORT=rdma", "KVSTORE_RDMA_DEVICE=rxe1")  # of clients; daemons take the first device, rxe0
GUEST_SECONDS = 6000 if os.environ.get("SIZE") == "full" else 1200

# Of the clients' suite, which runs whole below: a load by plane, a decode, a fence.
FAST = (
    "tests/test_client_faults.py::test_up_to_two_bad_shards_are_read_around[flip-(0, 10)-lazy]",
    "tests/test_client_faults.py::test_late_shards_are_not_waited_for_and_never_land_late[(2, 6)-lazy]",
    "tests/test_client_roundtrip.py::test_planes_come_in_order_and_whole",
)
# Whole, a guest for each file: all that stores and loads through the client. test_client_walk.py moves nothing.
SUITE = (
    "test_client_asyncio.py",
    "test_client_back.py",
    "test_client_epochs.py",
    "test_client_faults.py",
    "test_client_lookup.py",
    "test_client_misuse.py",
    "test_client_nodes.py",
    "test_client_planes.py",
    "test_client_roundtrip.py",
    "test_client_store_faults.py",
    "test_client_streams.py",
    "test_client_tracing.py",
    "test_client_transport.py",
    "test_two_writers.py",
)


@pytest.mark.timeout(GUEST_SECONDS + 100)
def test_verbs_in_a_guest() -> None:
    with folder_in_guest() as programs:
        cycles = build_native("verbs_cycles", ("verbs", "verbs_zone"), programs)
        cuda = build_stub("libcuda_stub", programs, "libcuda.so.1")
        env = (f"KVSTORE_VERBS_CYCLES={cycles}", f"KVSTORE_CUDA_STUB={cuda}")
        report = pytest_in_guest("tests/verbs", *FAST, seconds=GUEST_SECONDS, env=env)
    assert " passed" in report, report


def test_every_file_of_the_clients_suite_runs_by_rdma() -> None:
    here = {path.name for path in Path(__file__).parent.glob("test_client_*.py")}
    assert here - set(SUITE) == {"test_client_walk.py"}


@pytest.mark.long
@pytest.mark.timeout(700)
def test_a_client_in_one_guest_loads_from_daemons_in_another() -> None:
    env = ("KVSTORE_TRANSPORT=rdma", "KVSTORE_RDMA_DEVICE=rxe0")
    ended = run_in_guest(sys.executable, "tests/verbs/two_hosts.py", seconds=600, hosts=2, env=env)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-8000:]}"
    assert "all right" in ended.stdout
    assert "written to the other host's zones" in ended.stdout


@pytest.mark.long
@pytest.mark.timeout(7300)
def test_the_clients_suite_in_one_guest_with_daemons_in_another() -> None:
    """The files whose daemons need not stand still, nor fail on purpose."""
    files = [f"tests/test_{name}.py" for name in ("client_roundtrip", "client_misuse", "client_tracing", "two_writers")]
    suite = f"tests/verbs/far.py run {sys.executable} -m pytest -q -p no:cacheprovider --timeout 1200 {' '.join(files)}"
    both = f'[ "$RDMA_VM_HOST" = 0 ] && exec {sys.executable} tests/verbs/far.py serve || exec {sys.executable} {suite}'
    ended = run_in_guest("sh", "-c", both, seconds=7200, hosts=2, env=("KVSTORE_TRANSPORT=rdma", "KVSTORE_RDMA_DEVICE=rxe0"))
    assert ended.returncode == 0 and " passed" in ended.stdout, f"{ended.stdout[-8000:]}\n{ended.stderr[-4000:]}"


@pytest.mark.long
@pytest.mark.timeout(7300)
@pytest.mark.parametrize("file", SUITE)
def test_the_clients_suite_by_rdma_in_a_guest(file: str) -> None:
    """The same files as over TCP, at a pace that suits an emulator (client_tools.paced); by RDMA alone, never TCP."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "1200", f"tests/{file}")
    ended = run_in_guest(*command, seconds=7200, env=RDMA)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}\n{ended.stderr[-4000:]}"
