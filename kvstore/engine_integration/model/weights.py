"""Tensors in a file, in the safetensors format: u64 LE length | JSON header | bytes back to back.

Own reader and writer, since 60 lines are less than a dependency. A file is whole or absent: written beside, synced, renamed.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kvstore.errors import InputError

HEADER_BYTES_MAX: Final = 1 << 20
DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def save(path: Path, tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    header: dict[str, object] = {"__metadata__": meta}
    parts, offset = [], 0
    for name, tensor in sorted(tensors.items()):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + len(raw)]}
        parts.append(raw)
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata. InputError for a file that is not there, cut off or of another format."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError("E170", str(path), (error.strerror or str(error)).lower(), "name a file of weights") from None
    try:
        (length,) = struct.unpack_from("<Q", raw)
        if length > min(HEADER_BYTES_MAX, len(raw) - 8):
            raise ValueError("its header is cut off or too long")
        header = json.loads(raw[8 : 8 + length])
        meta = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            if not 0 <= begin <= end <= len(raw) - 8 - length or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"tensor {name!r} is cut off or of another size")
            tensors[name] = torch.frombuffer(bytearray(raw[8 + length + begin : 8 + length + end]), dtype=dtype).view(shape)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError("E171", str(path), f"is no file of weights: {error}", "take one that this package wrote, or safetensors") from None
    return tensors, meta
