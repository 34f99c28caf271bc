"""How much of its rated life the disk under a directory has used, by its own word: SMART through `smartctl` (Debian's smartmontools; needs
the right to open the device), or the eMMC's file in sysfs. Where neither tells, nobody knows, and nothing is exported.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

LOOK_SECONDS: Final = 3600.0
ANSWER_SECONDS: Final = 10.0
SYS: Final = Path("/sys")


def wear_ratio(directory: Path, sys: Path = SYS) -> float | None:
    """0..1, and above where a disk outlives its rating; of several disks under one file system the most. None: not known."""
    try:
        known = [wear for disk in disks_of(directory.stat().st_dev, sys) if (wear := _of_disk(disk, sys)) is not None]
    except OSError:  # no directory, or no descriptor left to look with
        return None
    return max(known, default=None)


def disks_of(device: int, sys: Path = SYS) -> list[str]:
    """Names of the whole disks that a device number stands on: through partitions, LVM and RAID. [] for what is no disk."""
    place = sys / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    return sorted(set(_whole(place.resolve()))) if place.exists() else []


def _whole(place: Path) -> Iterator[str]:
    if (place / "partition").exists():
        place = place.parent
    below = sorted((place / "slaves").iterdir()) if (place / "slaves").is_dir() else []
    for part in below:
        yield from _whole(part.resolve())
    if not below:
        yield place.name


def _of_disk(disk: str, sys: Path) -> float | None:
    try:
        return emmc_wear((sys / "class" / "block" / disk / "device" / "life_time").read_text())
    except OSError:
        return _smart(f"/dev/{disk}")


def _smart(device: str) -> float | None:
    tool = shutil.which("smartctl", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")  # a service's PATH may lack them
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, "--json", "--attributes", device], capture_output=True, timeout=ANSWER_SECONDS)
        return smart_wear(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def smart_wear(answer: Any) -> float | None:
    """From the JSON of smartctl: NVMe's percentage used, else what newer versions tell of any disk."""
    if not isinstance(answer, dict):
        return None
    for part, field in (("nvme_smart_health_information_log", "percentage_used"), ("endurance_used", "current_percent")):
        inner = answer.get(part)
        if isinstance(inner, dict) and isinstance(inner.get(field), int | float):
            return float(inner[field]) / 100
    return None


def emmc_wear(text: str) -> float | None:
    """From "0x01 0x02": tenths of the life of two kinds of cells, rounded up; 0x0B is beyond it, 0x00 is not told."""
    try:
        tenths = [int(word, 16) for word in text.split()]
    except ValueError:
        return None
    known = [each for each in tenths if 0 < each <= 11]
    return max(known) / 10 if known else None
