"""Wear of disks: what smartctl and sysfs say, in the forms that they say it, and silence where nobody tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvstore.server.wear import disks_of, emmc_wear, smart_wear, wear_ratio


@pytest.mark.parametrize(
    ("answer", "wear"),
    [
        ({"nvme_smart_health_information_log": {"percentage_used": 12, "data_units_written": 1}}, 0.12),
        ({"nvme_smart_health_information_log": {"percentage_used": 255}}, 2.55),
        ({"endurance_used": {"current_percent": 3}, "ata_smart_attributes": {"table": []}}, 0.03),
        ({"nvme_smart_health_information_log": {}}, None),
        ({"nvme_smart_health_information_log": {"percentage_used": None}}, None),
        ({"smartctl": {"exit_status": 2, "messages": [{"string": "Permission denied"}]}}, None),
        ([], None),
        (None, None),
    ],
)
def test_smartctl_is_read_in_each_of_its_forms(answer: Any, wear: float | None) -> None:
    assert smart_wear(answer) == wear


@pytest.mark.parametrize(
    ("text", "wear"),
    [("0x01 0x03\n", 0.3), ("0x00 0x02", 0.2), ("0x0b 0x01", 1.1), ("0x00 0x00", None), ("0xff 0x00", None), ("x", None)],
)
def test_an_emmc_tells_tenths(text: str, wear: float | None) -> None:
    assert emmc_wear(text) == wear


def tree(root: Path) -> Path:
    """A sysfs with a partition of an eMMC, and a logical volume over two of its partitions and another eMMC."""
    devices = root / "devices"
    for disk, life in (("mmcblk0", "0x04 0x01"), ("mmcblk1", "0x09 0x01")):
        (devices / disk / "device").mkdir(parents=True)
        (devices / disk / "device" / "life_time").write_text(life)
        (devices / disk / "slaves").mkdir()
        (root / "class" / "block").mkdir(parents=True, exist_ok=True)
        (root / "class" / "block" / disk).symlink_to(devices / disk)
    for part in ("mmcblk0p1", "mmcblk0p2"):
        (devices / "mmcblk0" / part).mkdir()
        (devices / "mmcblk0" / part / "partition").write_text("1")
    (devices / "dm-0" / "slaves").mkdir(parents=True)
    for below in (devices / "mmcblk0" / "mmcblk0p1", devices / "mmcblk0" / "mmcblk0p2", devices / "mmcblk1"):
        (devices / "dm-0" / "slaves" / below.name).symlink_to(below)
    (root / "dev" / "block").mkdir(parents=True)
    for number, place in (("179:1", devices / "mmcblk0" / "mmcblk0p1"), ("254:0", devices / "dm-0")):
        (root / "dev" / "block" / number).symlink_to(place)
    return root


def test_disks_are_found_through_partitions_and_volumes(tmp_path: Path) -> None:
    sys = tree(tmp_path)
    assert disks_of(os.makedev(179, 1), sys) == ["mmcblk0"]
    assert disks_of(os.makedev(254, 0), sys) == ["mmcblk0", "mmcblk1"]
    assert disks_of(os.makedev(0, 55), sys) == []


def test_of_several_disks_the_most_worn_counts_and_no_disk_tells_nothing(tmp_path: Path) -> None:
    sys = tree(tmp_path / "sys")
    here = tmp_path.stat().st_dev
    number = f"{os.major(here)}:{os.minor(here)}"
    (sys / "dev" / "block" / number).unlink(missing_ok=True)
    (sys / "dev" / "block" / number).symlink_to(sys / "devices" / "dm-0")
    assert wear_ratio(tmp_path, sys) == 0.9
    (sys / "dev" / "block" / number).unlink()
    assert wear_ratio(tmp_path, sys) is None
    assert wear_ratio(tmp_path / "absent", sys) is None


def test_on_this_machine_it_is_known_or_not_and_never_an_error(tmp_path: Path) -> None:
    found = wear_ratio(tmp_path)
    assert found is None or 0 <= found < 5
    assert all((Path("/sys/class/block") / disk).exists() for disk in disks_of(tmp_path.stat().st_dev))
