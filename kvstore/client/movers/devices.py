"""RDMA devices as sysfs tells of them: ports, GIDs, where they sit; and which of them memory is registered with. Nothing is opened."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.client.movers.libcuda import LibCuda
from kvstore.errors import KvstoreError
from kvstore.sysfs import text_of

AUTO: Final = "auto"
DEVICE_VARIABLE: Final = "KVSTORE_RDMA_DEVICE"
GIDS_MAX: Final = 1024  # read of a port; hardware has up to 256
GIDS_GAP: Final = 32  # empty entries in a row end the table: it is filled from below, and each costs a system call
ROCE_V2: Final = "RoCE v2"
NIL_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"
# How far apart two PCI functions are, nearest first; the names are those of `nvidia-smi topo -m`.
DISTANCES: Final = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "one root complex",
    "NODE": "one NUMA node",
    "SYS": "different NUMA nodes",
    "?": "not told by sysfs",
}


@dataclass(frozen=True, slots=True)
class Gid:
    index: int
    gid: str  # eight groups of four hex digits
    kind: str  # "RoCE v2", "IB/RoCE v1"
    interface: str  # its network interface, "" where it has none

    @property
    def is_v2_ipv4(self) -> bool:
        return self.kind == ROCE_V2 and self.gid.startswith("0000:0000:0000:0000:0000:ffff:")

    @property
    def rank(self) -> int:
        """As kernels/verbs.cpp has it: what is routed comes first."""
        if self.kind != ROCE_V2:
            return 1
        link_local = self.gid[:3] in ("fe8", "fe9", "fea", "feb")
        return 4 if self.is_v2_ipv4 else 2 if link_local else 3


@dataclass(frozen=True, slots=True)
class Port:
    number: int
    state: str  # "ACTIVE", "DOWN", ...
    link_layer: str  # "Ethernet", "InfiniBand"
    rate: str  # "400 Gb/sec (4X NDR)"
    mtu_bytes: int  # of its network interface; 0: unknown
    gids: tuple[Gid, ...]

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def usable(self) -> bool:
        """Up, and on Ethernet with a RoCE v2 GID: what a queue pair needs."""
        return self.active and (self.link_layer == "InfiniBand" or any(gid.kind == ROCE_V2 for gid in self.gids))

    def gid_in_use(self, index: int = -1) -> Gid | None:
        """`index`: the setting, -1: the port's best."""
        wanted = [gid for gid in self.gids if index in (-1, gid.index) and gid.index <= 255]
        return max(wanted, key=lambda gid: gid.rank, default=None)  # of several of a rank the first


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    name: str
    ports: tuple[Port, ...]
    driver: str  # of the PCI function; "soft" for soft-RoCE and the like
    pci: str  # "0000:1b:00.0"; "" for one without hardware
    firmware: str
    node_file: str  # /dev/infiniband/uverbsN, "" where there is none
    node_usable: bool

    def data(self, gid_index: int = -1) -> dict[str, Any]:
        """For programs; `gid_index`: the setting."""
        return {
            "name": self.name,
            "driver": self.driver,
            "pci": self.pci or None,
            "firmware": self.firmware or None,
            "device_file": self.node_file or None,
            "device_file_usable": self.node_usable,
            "ports": [
                {
                    "port": port.number,
                    "state": port.state,
                    "link_layer": port.link_layer,
                    "rate": port.rate,
                    "mtu_bytes": port.mtu_bytes or None,
                    "gid_in_use": used.index if (used := port.gid_in_use(gid_index)) else None,
                    "gids": [
                        {"index": gid.index, "gid": gid.gid, "type": gid.kind, "interface": gid.interface or None} for gid in port.gids
                    ],
                }
                for port in self.ports
            ],
        }


def device_for(asked: str, memory: str, root: Path = Path("/")) -> str:
    """The device for memory on `memory`, as torch names it: `asked`, unless it is "auto"; then KVSTORE_RDMA_DEVICE; then the usable one
    nearest to the GPU; else "auto", which is the first that is active."""
    named = os.environ.get(DEVICE_VARIABLE) or AUTO if asked == AUTO else asked
    if named != AUTO or memory == "cpu":
        return named
    try:
        pci = LibCuda().gpu(int(memory.partition(":")[2] or 0)).pci
    except (OSError, KvstoreError):
        return AUTO  # who registers the GPU's memory says what is amiss
    return nearest(pci, rdma_devices(root), root)


def nearest(pci: str, devices: Iterable[RdmaDevice], root: Path = Path("/")) -> str:
    """Of those with a usable port; "auto" where none is on PCIe."""
    near = by_distance(pci, (device for device in devices if any(port.usable for port in device.ports)), root)
    return near[0][1] if near else AUTO


def by_distance(pci: str, devices: Iterable[RdmaDevice], root: Path = Path("/")) -> list[tuple[str, str]]:
    """(a key of DISTANCES, name) of the devices on PCIe, the nearest to that function first."""
    order = list(DISTANCES)
    far = [(distance(pci, device.pci, root), device.name) for device in devices if device.pci]
    return sorted(far, key=lambda each: (order.index(each[0]), each[1]))


def distance(one: str, other: str, root: Path = Path("/")) -> str:
    """A key of DISTANCES, from where sysfs hangs the two functions."""
    paths = [root / "sys/bus/pci/devices" / each for each in (one, other)]
    if not all(path.exists() for path in paths):
        return "?"
    below = [[part for part in path.resolve().parts if part.startswith("pci") or part.count(":") == 2] for path in paths]
    shared = 0
    while shared < min(map(len, below)) and below[0][shared] == below[1][shared]:
        shared += 1
    if shared > 1:  # the root complex, and at least one bridge; below it each may have a port of that switch to itself, but no other switch
        return "PIX" if max(map(len, below)) - shared <= 2 else "PXB"
    if shared == 1:
        return "PHB"
    nodes = [text_of(path / "numa_node") for path in paths]
    if "" in nodes or "-1" in nodes:
        return "?"
    return "NODE" if nodes[0] == nodes[1] else "SYS"


def rdma_devices(root: Path = Path("/")) -> list[RdmaDevice]:
    """Sorted by name. `root`: where sys/ and dev/ are."""
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*")):
        hardware = (folder / "device").resolve() if (folder / "device").exists() else None
        pci = hardware.name if hardware is not None and hardware.name.count(":") == 2 else ""
        driver = (hardware / "driver").resolve().name if hardware is not None and (hardware / "driver").exists() else "soft"
        numbers = sorted(int(path.name) for path in (folder / "ports").glob("[0-9]*") if path.name.isdecimal())
        ports = tuple(_port(folder / "ports" / str(number), root) for number in numbers)
        node_file = _node_file(root, folder.name)
        usable = bool(node_file) and os.access(root / node_file.lstrip("/"), os.R_OK | os.W_OK)
        found.append(RdmaDevice(folder.name, ports, driver, pci, text_of(folder / "fw_ver"), node_file, usable))
    return found


def _port(folder: Path, root: Path) -> Port:
    gids: list[Gid] = []
    for index in range(GIDS_MAX):
        if index - (gids[-1].index if gids else 0) > GIDS_GAP:
            break
        gid = text_of(folder / f"gids/{index}")
        if not gid:
            if not (folder / f"gids/{index}").exists():
                break
            continue
        if gid == NIL_GID:
            continue
        kind = text_of(folder / f"gid_attrs/types/{index}")
        gids.append(Gid(index, gid, kind, text_of(folder / f"gid_attrs/ndevs/{index}")))
    interface = next((gid.interface for gid in gids if gid.interface), "")
    mtu = text_of(root / f"sys/class/net/{interface}/mtu") if interface else ""
    state = text_of(folder / "state").rpartition(":")[2].strip()
    return Port(
        int(folder.name), state or "unknown", text_of(folder / "link_layer") or "unknown", text_of(folder / "rate") or "rate unknown",
        int(mtu) if mtu.isdecimal() else 0, tuple(gids),
    )  # fmt: skip


def _node_file(root: Path, device: str) -> str:
    for each in sorted((root / "sys/class/infiniband_verbs").glob("uverbs*")):
        if text_of(each / "ibdev") == device and (root / f"dev/infiniband/{each.name}").exists():
            return f"/dev/infiniband/{each.name}"
    return ""
