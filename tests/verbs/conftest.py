"""These files need RDMA devices. Where there are none they are left out, and tests/test_verbs_guest.py runs them in a guest that has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # server_tools and the like

from verbs.guest import device_or_first, has_devices

if has_devices():  # what clients of these tests use; their daemons take the first device
    os.environ.setdefault("KVSTORE_TRANSPORT", "rdma")
    os.environ.setdefault("KVSTORE_RDMA_DEVICE", device_or_first("rxe1"))
collect_ignore_glob = [] if has_devices() else ["test_*.py"]


def _has_gpu() -> bool:
    """Asks torch only where there is a driver: a guest takes minutes to import it."""
    if not Path("/proc/driver/nvidia/version").exists():
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As tests/conftest.py, which a guest does not load: its imports cost seconds there."""
    has_gpu = any(item.get_closest_marker("gpu") for item in items) and _has_gpu()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("long") and os.environ.get("SIZE") != "full":
            item.add_marker(pytest.mark.skip(reason="long: run with SIZE=full"))
