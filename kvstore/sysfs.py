"""Files in which the kernel tells of the host."""

from __future__ import annotations

from typing import Any


def text_of(path: Any) -> str:
    """What a file of sysfs or procfs says, stripped; "" where there is none, or it cannot be read."""
    try:
        return str(path.read_text(errors="replace")).strip()
    except OSError:
        return ""
