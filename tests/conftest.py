"""What all tests share: which sizes run, and that a test which needs hardware says so when it is left out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A shell that starts us in the background has SIGINT ignored, and our daemons and commands would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

FULL_SIZE = os.environ.get("SIZE", "") == "full"

# No deadline for one example: the first of a test pays for imports, and machines are shared. pytest's own timeout stands.
settings.register_profile("kvstore", deadline=None, max_examples=100 if FULL_SIZE else 40)
settings.load_profile("kvstore")

# For this process, before torch is imported, and for the hundreds that tests start. Two threads that share two processors with the other
# worker and with daemons wait for each other, spinning: up to ten times the processor time of one. SIZE=full takes all there are.
if not FULL_SIZE:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a tenth to a fifth of each start would be compiling
sys.dont_write_bytecode = False


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`long` runs with SIZE=full only, `gpu` where there is one; torch is imported only if some test asks for it.

    The guest comes first where it runs with the others: at the end one worker would wait for it with nothing left to steal.
    """
    items.sort(key=lambda item: item.path.name != "test_verbs_guest.py")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    for item in items:
        if item.get_closest_marker("long") and not FULL_SIZE:
            item.add_marker(pytest.mark.skip(reason="long: run with SIZE=full"))
