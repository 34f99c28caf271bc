"""Is each RDMA device sound, and does it write? What sysfs tells of it is read by kvstore/client/movers/devices.py."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.client.movers.devices import Gid, Port, RdmaDevice, rdma_devices
from kvstore.doctor.finding import Finding, Word
from kvstore.errors import KvstoreError
from kvstore.units import format_seconds

LIBRARY: Final = "libibverbs.so.1"
TRIAL_BYTES: Final = 1 << 20
TRIAL_SECONDS: Final = 10.0  # soft-RoCE under emulation takes tenths of a second


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


def rdma(root: Path = Path("/"), gid_index: int = -1) -> list[Finding]:
    """One line for each device, or one that there is none. `gid_index`: the setting."""
    devices = rdma_devices(root)
    if not devices:
        return [Finding("rdma", Word.OK, "no RDMA device: loads go by TCP", "", {"devices": 0})]
    fault = library_fault()
    if fault:
        names = ", ".join(device.name for device in devices)
        return [Finding("rdma", Word.BAD, f"{names}, but no {LIBRARY} ({fault})", "install libibverbs1 and ibverbs-providers", {})]
    findings = []
    for device in devices:
        findings.append(_judged(device, gid_index))
        if findings[-1].word is Word.OK:
            findings.append(writes_to_itself(device.name, gid_index))
    return findings


def writes_to_itself(device: str, gid_index: int = -1) -> Finding:
    """Opens the device, registers memory, joins two queue pairs and has it write: what no file of sysfs can promise."""
    from kvstore.kernels._native import Loopback

    source = np.random.default_rng(3).integers(0, 256, TRIAL_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    began = time.monotonic()
    try:
        core = Loopback(device, gid_index)
        mine = core.add(int(source.ctypes.data), source.nbytes, False)
        theirs = core.add(int(target.ctypes.data), target.nbytes, True)
        piece = np.array([[source.ctypes.data, target.ctypes.data, TRIAL_BYTES]], np.uint64)
        number = core.copy(mine, theirs, piece, TRIAL_SECONDS)
        came = bool(number) and core.wait(number, TRIAL_SECONDS)
        core.settle(0.0)
    except KvstoreError as error:
        return Finding("verbs", Word.BAD, f"{device}: {error.what}: {error.cause}", error.fix or "look at dmesg", {"device": device})
    seconds = time.monotonic() - began
    equal = came and bool((source == target).all())
    measured = {"device": device, "gid_index": core.gid_index, "bytes": TRIAL_BYTES, "seconds": seconds, "equal": equal}
    if not came:
        fix = "its address may not be routed to itself: look at the GID and at rp_filter"
        return Finding("verbs", Word.BAD, f"{device}: a write to itself did not arrive in {TRIAL_SECONDS:g} s", fix, measured)
    if not measured["equal"]:
        return Finding("verbs", Word.BAD, f"{device}: what it wrote to itself differs", "do not use it; look at dmesg", measured)
    text = f"{device}: opened with GID {core.gid_index}, {TRIAL_BYTES >> 20} MiB registered, written to itself and equal, "
    text += f"{format_seconds(seconds)} in all"
    return Finding("verbs", Word.OK, text, "", measured)


def _judged(device: RdmaDevice, gid_index: int = -1) -> Finding:
    data = device.data(gid_index)
    what = f"{device.name} ({device.driver}{', ' + device.pci if device.pci else ''}): "
    what += "; ".join(_port_text(port, gid_index) for port in device.ports) or "no ports"
    if not device.node_file:
        fix = "modprobe ib_uverbs; in a container, give it /dev/infiniband"
        return Finding("rdma", Word.BAD, f"{what}; no device file", fix, data)
    if not device.node_usable:
        fix = f"give this user read and write of {device.node_file} (udev rule, or a container's device cgroup)"
        return Finding("rdma", Word.BAD, f"{what}; {device.node_file} may not be opened", fix, data)
    if not any(port.active for port in device.ports):
        return Finding("rdma", Word.WARN, what, "no port is up: look at the cable, the switch port and `ip link`", data)
    if not any(port.usable for port in device.ports):
        fix = "no RoCE v2 GID: give the port's interface an IPv4 address, and cma_roce_mode -m 2 on old drivers"
        return Finding("rdma", Word.WARN, what, fix, data)
    if not any(port.active and port.gid_in_use(gid_index) for port in device.ports):
        return Finding("rdma", Word.WARN, what, f"rdma_gid_index is {gid_index}: give one that it has, or auto", data)
    return Finding("rdma", Word.OK, what, "", data)


def _port_text(port: Port, gid_index: int) -> str:
    used = port.gid_in_use(gid_index)
    text = f"port {port.number} {port.state.lower()}, {port.link_layer}, {port.rate}"
    if port.mtu_bytes:
        text += f", MTU {port.mtu_bytes}"
    if used is None:
        return f"{text}, no GID{f' {gid_index}' if gid_index >= 0 else ''}"
    return f"{text}, {used.kind} GID {used.index} {_gid_text(used)} in use" + ("" if port.usable or not port.active else ", no RoCE v2 GID")


def _gid_text(gid: Gid) -> str:
    """An IPv4-mapped one as the address that it is."""
    if not gid.is_v2_ipv4:
        return gid.gid
    try:
        high, low = (int(part, 16) for part in gid.gid.split(":")[-2:])
    except ValueError:  # a driver's mistake: shown as it is
        return gid.gid
    return f"{high >> 8}.{high & 255}.{low >> 8}.{low & 255}"
