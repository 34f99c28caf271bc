"""Callers' memory as rows of bytes: numpy arrays, torch CPU tensors, and whatever else has a buffer. Nothing is copied."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvstore.client.native import U8
from kvstore.errors import LayoutError


def as_rows(buffer: Any, blocks: int | None, block_bytes: int, *, writable: bool) -> U8:
    """A (n, block_bytes) view of `buffer`, rows any distance apart; n >= `blocks` where that is given.

    Takes arrays and tensors of one row a block (whatever their type, as long as a row is block_bytes of contiguous memory), and flat
    contiguous memory of whole blocks. Raises LayoutError E520 to E523.
    """
    rows = _rows(buffer, block_bytes)
    if blocks is not None and len(rows) < blocks:
        fix = f"pass at least {blocks} x {block_bytes} bytes"
        raise LayoutError("E521", "buffer", f"has room for {len(rows)} blocks, {blocks} are needed", fix)
    if writable and not rows.flags.writeable:
        raise LayoutError("E522", "destination", "is read-only", "pass memory that may be written")
    return rows


def _rows(buffer: Any, block_bytes: int) -> U8:
    array = _array(buffer)
    if array.ndim >= 2 and len(array):
        row_bytes = array.itemsize * math.prod(array.shape[1:])
        if row_bytes == block_bytes:
            if not array[0].flags.c_contiguous:
                raise LayoutError("E523", "buffer", f"rows are not contiguous (strides {array.strides})", "pass rows of contiguous bytes")
            if len(array) > 1 and array.strides[0] < block_bytes:
                cause = f"rows overlap or go backwards (strides {array.strides})"
                raise LayoutError("E523", "buffer", cause, "pass rows in ascending order")
            if array.ndim == 2 and array.dtype == np.uint8:
                return np.asarray(array)
            elements = block_bytes // array.itemsize
            strides = (array.strides[0], array.itemsize)
            flat = np.lib.stride_tricks.as_strided(array, (len(array), elements), strides, writeable=array.flags.writeable)
            return flat.view(np.uint8)
    if not array.flags.c_contiguous or array.nbytes % block_bytes:
        cause = f"{array.dtype} {array.shape} is not rows of {block_bytes} bytes"
        raise LayoutError("E520", "buffer", cause, f"pass (n, {block_bytes}) bytes, or n x {block_bytes} flat")
    return array.reshape(-1).view(np.uint8).reshape(-1, block_bytes)


def _array(buffer: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(buffer, np.ndarray):
        array = buffer
    elif type(buffer).__module__.partition(".")[0] == "torch":
        array = _tensor(buffer)
    else:
        try:
            array = np.asarray(memoryview(buffer))
        except (TypeError, ValueError, BufferError) as fault:
            cause = f"{type(buffer).__name__} has no memory to use"
            raise LayoutError("E520", "buffer", cause, "pass an array, a CPU tensor or a buffer") from fault
    if array.dtype.hasobject:
        raise LayoutError("E520", "buffer", "holds Python objects", "pass numbers or bytes")
    return array


def _tensor(tensor: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if tensor.device.type != "cpu":
        raise LayoutError("E520", "tensor", f"is on {tensor.device}", "pass a CPU tensor")
    try:
        import torch

        bare = tensor.detach()
        if bare.dtype != torch.uint8:
            bare = bare.view(torch.uint8)  # numpy has no bfloat16
        array: np.ndarray[Any, np.dtype[Any]] = bare.numpy()
    except (RuntimeError, TypeError) as fault:
        raise LayoutError("E523", "tensor", str(fault).splitlines()[0].lower(), "pass a dense tensor of contiguous rows") from fault
    return array
