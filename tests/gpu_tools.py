"""Where kernels are tested: on a GPU where there is one, else on the CPU by Triton's interpreter.

The interpreter is chosen by an environment variable while triton is imported and while a test of this kind runs (triton imports some of its
parts late); it is taken back at once, nothing else sees it. Import this before anything that imports triton; pytest does, as it collects.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def chosen() -> Iterator[None]:
    """Within, triton interprets if there is no GPU."""
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        os.environ.pop("TRITON_INTERPRET", None)


assert DEVICE == "cuda" or "triton" not in sys.modules, "triton was imported before its interpreter could be chosen"
with chosen():
    import kvstore.kernels.gpu.coding_kernel
    import kvstore.kernels.gpu.paging_kernel
    import kvstore.kernels.gpu.sums_kernel  # noqa: F401 - imported for how it is imported


@pytest.fixture
def kernels_run(one_torch_thread: None) -> Iterator[None]:
    with chosen():
        yield


def there(array: np.ndarray) -> torch.Tensor:
    """A copy of a numpy array on the device of the tests; u64 as int64, bit by bit."""
    return torch.from_numpy(array.view(np.int64).copy() if array.dtype == np.uint64 else array.copy()).to(DEVICE)


def back(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as numpy; int64 as u64."""
    array = tensor.cpu().numpy()
    return array.view(np.uint64) if array.dtype == np.int64 else array
