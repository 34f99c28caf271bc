"""What all launchers share: triton when it is first needed, and whether it can run where a tensor lies."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING

from kvstore.errors import LayoutError, MisuseError

if TYPE_CHECKING:
    from torch import Tensor


def kernels(name: str, tensor: Tensor) -> ModuleType:
    """The module `name` of this package, able to run on `tensor`. MisuseError E507 without triton, or for a tensor it cannot reach."""
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        raise MisuseError("E507", "GPU kernels", f"triton cannot be imported ({error})", "pip install 'kvstore[gpu]'") from error
    module = importlib.import_module(f"kvstore.kernels.gpu.{name}")
    if not tensor.is_cuda and isinstance(module.PROBE, triton.JITFunction):
        raise MisuseError(
            "E507",
            "GPU kernels",
            f"a tensor lies on {tensor.device}",
            "use one on a GPU, or set TRITON_INTERPRET=1 before triton is imported",
        )
    return module


def on(tensor: Tensor) -> AbstractContextManager[None]:
    """Within, kernels start on the GPU of `tensor`, on its current stream; on the CPU nothing changes."""
    import torch

    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]  # torch has no types for it
    return guard


def whole_programs(tensor: Tensor) -> bool:
    """Whether few large programs beat many small ones: so it is where they are interpreted, one after the other."""
    return not tensor.is_cuda


def power_of_two(count: int) -> int:
    """The least power of two that is at least `count`: sizes of Triton's tiles."""
    return 1 << max(0, count - 1).bit_length()


def require(holds: bool, what: str, why: str) -> None:
    """LayoutError E508 unless a buffer fits."""
    if not holds:
        raise LayoutError("E508", what, why)


def check_zone(zone: Tensor) -> None:
    """A landing zone of one plane: uint8 (shards, n, shard_bytes); each piece contiguous, at a multiple of 8 bytes, some times 32 long."""
    shape, strides = tuple(zone.shape), tuple(zone.stride())
    require(
        str(zone.dtype) == "torch.uint8" and len(shape) == 3, "landing zone", f"{zone.dtype} {shape}, not uint8 (shards, n, shard_bytes)"
    )
    require(shape[2] > 0 and shape[2] % 32 == 0, "landing zone", f"pieces of {shape[2]} bytes; a shard is a multiple of 32")
    sound = strides[2] == 1 and strides[0] % 8 == 0 and strides[1] % 8 == 0 and zone.data_ptr() % 8 == 0
    require(sound, "landing zone", f"strides {strides}: pieces must be contiguous and begin at multiples of 8 bytes")
