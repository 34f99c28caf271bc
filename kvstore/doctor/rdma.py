"""RDMA devices as sysfs tells of them: ports, GIDs, where they sit. Nothing is opened but the library."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.doctor.finding import Finding, Word, text_of
from kvstore.errors import KvstoreError
from kvstore.units import format_seconds

LIBRARY: Final = "libibverbs.so.1"
TRIAL_BYTES: Final = 1 << 20
TRIAL_SECONDS: Final = 10.0  # soft-RoCE under emulation takes tenths of a second
GIDS_MAX: Final = 1024  # read of a port; hardware has up to 256
GIDS_GAP: Final = 32  # empty entries in a row end the table: it is filled from below, and each costs a system call
ROCE_V2: Final = "RoCE v2"
NIL_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True, slots=True)
class Gid:
    index: int
    gid: str  # eight groups of four hex digits
    kind: str  # "RoCE v2", "IB/RoCE v1"
    interface: str  # its network interface, "" where it has none

    @property
    def is_v2_ipv4(self) -> bool:
        return self.kind == ROCE_V2 and self.gid.startswith("0000:0000:0000:0000:0000:ffff:")


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


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    name: str
    ports: tuple[Port, ...]
    driver: str  # of the PCI function; "soft" for soft-RoCE and the like
    pci: str  # "0000:1b:00.0"; "" for one without hardware
    firmware: str
    node_file: str  # /dev/infiniband/uverbsN, "" where there is none
    node_usable: bool

    def data(self) -> dict[str, Any]:
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
                    "gids": [
                        {"index": gid.index, "gid": gid.gid, "type": gid.kind, "interface": gid.interface or None} for gid in port.gids
                    ],
                }
                for port in self.ports
            ],
        }


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


def library_fault() -> str:
    """Why libibverbs cannot be used, "" where it can."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return str(error).splitlines()[0]
    return ""


def can_register_dma_buf() -> bool:
    """Does this host's libibverbs know ibv_reg_dmabuf_mr (rdma-core 34)?"""
    try:
        return hasattr(ctypes.CDLL(LIBRARY), "ibv_reg_dmabuf_mr")
    except OSError:
        return False


def rdma(root: Path = Path("/")) -> list[Finding]:
    """One line for each device, or one that there is none."""
    devices = rdma_devices(root)
    if not devices:
        return [Finding("rdma", Word.OK, "no RDMA device: loads go by TCP", "", {"devices": 0})]
    fault = library_fault()
    if fault:
        names = ", ".join(device.name for device in devices)
        return [Finding("rdma", Word.BAD, f"{names}, but no {LIBRARY} ({fault})", "install libibverbs1 and ibverbs-providers", {})]
    findings = []
    for device in devices:
        findings.append(_judged(device))
        if findings[-1].word is Word.OK:
            findings.append(writes_to_itself(device.name))
    return findings


def writes_to_itself(device: str) -> Finding:
    """Opens the device, registers memory, joins two queue pairs and has it write: what no file of sysfs can promise."""
    from kvstore.kernels._native import Loopback

    source = np.random.default_rng(3).integers(0, 256, TRIAL_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    began = time.monotonic()
    try:
        core = Loopback(device)
        mine = core.add(int(source.ctypes.data), source.nbytes, False)
        theirs = core.add(int(target.ctypes.data), target.nbytes, True)
        piece = np.array([[source.ctypes.data, target.ctypes.data, TRIAL_BYTES]], np.uint64)
        number = core.copy(mine, theirs, piece, TRIAL_SECONDS)
        came = bool(number) and core.wait(number, TRIAL_SECONDS)
        core.settle(0.0)
    except KvstoreError as error:
        return Finding("verbs", Word.BAD, f"{device}: {error.what}: {error.cause}", error.fix or "look at dmesg", {"device": device})
    seconds = time.monotonic() - began
    measured = {"device": device, "bytes": TRIAL_BYTES, "seconds": seconds, "equal": came and bool((source == target).all())}
    if not came:
        fix = "its address may not be routed to itself: look at the GID and at rp_filter"
        return Finding("verbs", Word.BAD, f"{device}: a write to itself did not arrive in {TRIAL_SECONDS:g} s", fix, measured)
    if not measured["equal"]:
        return Finding("verbs", Word.BAD, f"{device}: what it wrote to itself differs", "do not use it; look at dmesg", measured)
    text = f"{device}: opened, {TRIAL_BYTES >> 20} MiB registered, written to itself and equal, {format_seconds(seconds)} in all"
    return Finding("verbs", Word.OK, text, "", measured)


def _judged(device: RdmaDevice) -> Finding:
    what = f"{device.name} ({device.driver}{', ' + device.pci if device.pci else ''}): "
    what += "; ".join(_port_text(port) for port in device.ports) or "no ports"
    if not device.node_file:
        fix = "modprobe ib_uverbs; in a container, give it /dev/infiniband"
        return Finding("rdma", Word.BAD, f"{what}; no device file", fix, device.data())
    if not device.node_usable:
        fix = f"give this user read and write of {device.node_file} (udev rule, or a container's device cgroup)"
        return Finding("rdma", Word.BAD, f"{what}; {device.node_file} may not be opened", fix, device.data())
    if not any(port.active for port in device.ports):
        return Finding("rdma", Word.WARN, what, "no port is up: look at the cable, the switch port and `ip link`", device.data())
    if not any(port.usable for port in device.ports):
        fix = "no RoCE v2 GID: give the port's interface an IPv4 address, and cma_roce_mode -m 2 on old drivers"
        return Finding("rdma", Word.WARN, what, fix, device.data())
    return Finding("rdma", Word.OK, what, "", device.data())


def _port_text(port: Port) -> str:
    v2 = [gid for gid in port.gids if gid.kind == ROCE_V2]
    best = next((gid for gid in v2 if gid.is_v2_ipv4), v2[0] if v2 else None)
    text = f"port {port.number} {port.state.lower()}, {port.link_layer}, {port.rate}"
    if port.mtu_bytes:
        text += f", MTU {port.mtu_bytes}"
    if port.link_layer == "InfiniBand":
        return text
    return text + (f", RoCE v2 GID {best.index} {_gid_text(best)}" if best is not None else ", no RoCE v2 GID")


def _gid_text(gid: Gid) -> str:
    """An IPv4-mapped one as the address that it is."""
    if not gid.is_v2_ipv4:
        return gid.gid
    try:
        high, low = (int(part, 16) for part in gid.gid.split(":")[-2:])
    except ValueError:  # a driver's mistake: shown as it is
        return gid.gid
    return f"{high >> 8}.{high & 255}.{low >> 8}.{low & 255}"


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
