"""GPU memory by the copy engine: pinned host memory, one stream for each direction, strided copies that return at once.

Rows whose pages follow each other go as one two-dimensional copy. A table in pieces goes as one batch of copies where CUDA has that (12.8),
else copy by copy; the copy engine is slow at either, and `cuda-kernel` is made for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.client.movers.interface import Event, Mover, held_in, poll_until, runs_of, torch_cuda
from kvstore.client.native import U8
from kvstore.errors import ConfigError, Unreachable

if TYPE_CHECKING:
    from torch import Tensor

HOST_TO_DEVICE: Final = 1  # cudaMemcpyKind
DEVICE_TO_HOST: Final = 2
REGISTER_PORTABLE: Final = 0x01  # cudaHostRegister...
REGISTER_MAPPED: Final = 0x02
REGISTER_READ_ONLY: Final = 0x08
ORDER_STREAM: Final = 1  # cudaMemcpySrcAccessOrderStream
RUNS_FOR_BATCH: Final = 8  # fewer are quicker as strided copies


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes: order, where source and destination are (type, id; zeros: as the addresses say), flags."""

    _fields_ = (("order", ctypes.c_int), ("places", ctypes.c_int * 4), ("flags", ctypes.c_uint))


assert ctypes.sizeof(_CopyAttributes) == 24


class CudaRuntime:
    """The CUDA runtime that torch came with, for what torch.cuda has no face for. Raises ConfigError E156 where there is none."""

    def __init__(self) -> None:
        import torch

        self.version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        try:
            self._lib = ctypes.CDLL(f"libcudart.so.{self.version[0]}")
        except OSError as error:
            raise ConfigError("E156", "mover cuda", str(error), "install torch with CUDA") from None
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._lib.cudaMemcpy2DAsync.argtypes = (pointer, size, pointer, size, size, size, ctypes.c_int, pointer)
        self.batches = self.version >= (12, 8) and hasattr(self._lib, "cudaMemcpyBatchAsync")

    def copy_2d(self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int) -> None:
        self._check("cudaMemcpy2DAsync", self._lib.cudaMemcpy2DAsync(to, to_pitch, source, pitch, width, height, kind, stream))

    def copy_batch(self, to: U8 | Any, sources: U8 | Any, width: int, stream: int) -> None:
        """`to`, `sources`: uint64 addresses of pieces of `width` bytes each."""
        count = len(to)
        sizes, first = np.full(count, width, np.uint64), np.zeros(1, np.uint64)
        attributes = _CopyAttributes(order=ORDER_STREAM)
        addresses = [ctypes.c_void_p(array.ctypes.data) for array in (to, sources, sizes)]
        arguments = [*addresses, ctypes.c_size_t(count), ctypes.byref(attributes), ctypes.c_void_p(first.ctypes.data), ctypes.c_size_t(1)]
        if self.version < (13, 0):  # which copy failed; 13 has no such argument
            arguments.append(ctypes.byref(ctypes.c_size_t()))
        self._check("cudaMemcpyBatchAsync", self._lib.cudaMemcpyBatchAsync(*arguments, ctypes.c_void_p(stream)))

    def _check(self, name: str, code: int) -> None:
        if code:
            self._lib.cudaGetErrorString.restype = ctypes.c_char_p
            text = self._lib.cudaGetErrorString(ctypes.c_int(code)) or b"no text"
            raise Unreachable("E221", "gpu", f"{name}: {text.decode(errors='replace')} ({code})", "look at nvidia-smi and dmesg")


class CudaMover(Mover):
    name = "cuda"
    pins = True

    def __init__(self, pages: Tensor) -> None:
        super().__init__(pages)
        if not self.device.startswith("cuda"):
            raise ConfigError("E156", f"mover {self.name}", f"pages are on {self.device}", "use mover cpu")
        self.runtime = CudaRuntime()
        self.into_device, self.into_host = torch_cuda().Stream(self.device), torch_cuda().Stream(self.device)
        self._pinned: list[U8] = []

    def adopt(self, memory: U8) -> None:
        """Pins it in place."""
        flags = REGISTER_PORTABLE | REGISTER_MAPPED | (0 if memory.flags.writeable else REGISTER_READ_ONLY)
        with torch_cuda().device(self.device):
            code = int(torch_cuda().cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, flags))
        if code:
            fix = "ulimit -l unlimited; kvstore doctor shows what may be locked"
            raise Unreachable("E221", f"pinning {memory.nbytes} bytes", f"cudaHostRegister: error {code}", fix)
        self._pinned.append(memory)

    def _way(self, rows: U8, places: np.ndarray[Any, np.dtype[np.int64]], to_device: bool) -> CudaWay:
        held_in(self._pinned, rows, self.row_bytes)  # a copy from other memory would make the caller wait
        return _Copies(self, rows, places, to_device)

    def close(self) -> None:
        if not self._closed:
            super().close()
            with torch_cuda().device(self.device):
                for memory in self._pinned:
                    torch_cuda().cudart().cudaHostUnregister(memory.ctypes.data)
            self._pinned = []


class CudaWay:
    """One move on the stream of its direction; what the caller's stream was told before comes first."""

    def __init__(self, mover: CudaMover, rows: U8, to_device: bool) -> None:
        self.mover, self.rows, self.to_device = mover, rows, to_device
        self.stream = mover.into_device if to_device else mover.into_host
        self._last: CudaEvent | None = None
        self.stream.wait_stream(torch_cuda().current_stream(mover.device))

    def start(self, columns: slice, end: float) -> Event:
        with torch_cuda().device(self.mover.device), torch_cuda().stream(self.stream):
            if len(self.rows):
                self.put(columns)
            event = torch_cuda().Event()
            event.record(self.stream)
        self._last = CudaEvent(event)
        return self._last

    def put(self, columns: slice) -> None:
        """Gives the copies of one layer to `stream`."""
        raise NotImplementedError

    def settle(self, seconds: float) -> bool:
        """A stream does what it was told in order: its last event tells for all. A GPU that failed touches nothing more."""
        with contextlib.suppress(Unreachable):
            return self._last is None or self._last.wait(seconds)
        return True


class _Copies(CudaWay):
    def __init__(self, mover: CudaMover, rows: U8, places: np.ndarray[Any, np.dtype[np.int64]], to_device: bool) -> None:
        super().__init__(mover, rows, to_device)
        self._runs = runs_of(places)
        self._pitches = (int(rows.strides[0]), mover.page_stride)
        self._host, self._device = int(rows.ctypes.data), mover.address
        self._batch = mover.runtime.batches and len(self._runs) > RUNS_FOR_BATCH
        if self._batch:
            self._mine = np.uint64(self._host) + np.arange(len(rows), dtype=np.uint64) * np.uint64(self._pitches[0])
            self._theirs = np.uint64(self._device) + places.astype(np.uint64) * np.uint64(self._pitches[1])

    def put(self, columns: slice) -> None:
        width, at, runtime, stream = columns.stop - columns.start, columns.start, self.mover.runtime, self.stream.cuda_stream
        if self._batch:
            mine, theirs = self._mine + np.uint64(at), self._theirs + np.uint64(at)
            runtime.copy_batch(*((theirs, mine) if self.to_device else (mine, theirs)), width, stream)
            return
        row_pitch, page_pitch = self._pitches
        for row, page, count in self._runs:
            mine, theirs = self._host + row * row_pitch + at, self._device + page * page_pitch + at
            if self.to_device:
                runtime.copy_2d(theirs, page_pitch, mine, row_pitch, width, count, HOST_TO_DEVICE, stream)
            else:
                runtime.copy_2d(mine, row_pitch, theirs, page_pitch, width, count, DEVICE_TO_HOST, stream)


def wait_for_all(device: str) -> None:
    """Until what any stream of the GPU was told so far is over. Raises Unreachable E221."""
    try:
        torch_cuda().synchronize(device)
    except RuntimeError as error:
        raise _failed(error) from None


def told_so_far(device: str) -> CudaEvent:
    """That what this thread's current stream of the GPU was told so far is over. Raises Unreachable E221."""
    try:
        event = torch_cuda().Event()
        event.record(torch_cuda().current_stream(device))
    except RuntimeError as error:
        raise _failed(error) from None
    return CudaEvent(event)


def _failed(error: RuntimeError) -> Unreachable:
    return Unreachable("E221", "gpu", str(error).partition("\n")[0], "look at nvidia-smi and dmesg")


class CudaEvent:
    """A CUDA event; `cuda` is torch's."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def done(self) -> bool:
        try:
            return bool(self.cuda.query())
        except RuntimeError as error:
            raise _failed(error) from None

    def wait(self, seconds: float) -> bool:
        return poll_until(self.done, time.monotonic() + seconds)

    def before(self, stream: Any) -> None:
        stream.wait_event(self.cuda)
