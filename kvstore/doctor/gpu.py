"""GPUs, their driver, how an RDMA device would reach their memory, and how close the two sit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final, Literal

from kvstore.client.movers.devices import DISTANCES, RdmaDevice, by_distance
from kvstore.client.movers.libcuda import LIBRARY, Gpu, LibCuda
from kvstore.doctor.finding import Finding, Word
from kvstore.doctor.rdma import can_register_dma_buf
from kvstore.errors import KvstoreError
from kvstore.sysfs import text_of
from kvstore.units import format_bytes

NVIDIA: Final = "0x10de"
DISPLAY_CLASSES: Final = ("0x0300", "0x0302")  # VGA and 3D controllers
PEER_MODULES: Final = ("nvidia_peermem", "nv_peer_mem")
Registration = Literal["dma-buf", "nvidia-peermem", "none"]


def look_for_gpus(root: Path = Path("/")) -> tuple[Finding, list[Gpu]]:
    """`root`: where sys/ and proc/ are; the driver library is this process's own."""
    cards = nvidia_cards(root)
    version = text_of(root / "proc/driver/nvidia/version").partition("\n")[0]
    try:
        cuda = LibCuda()
        gpus = [cuda.gpu(ordinal) for ordinal in range(cuda.devices_count)]
    except OSError:
        return _without_library(cards, version), []
    except KvstoreError as error:
        return Finding("gpu", Word.BAD, f"{len(cards)} in PCI, {error.cause}", error.fix, {"pci": cards, "driver": version or None}), []
    if not gpus:
        word = Word.BAD if cards else Word.OK
        fix = "nvidia-smi says why; CUDA_VISIBLE_DEVICES may hide them" if cards else ""
        return Finding("gpu", word, f"the driver shows none ({len(cards)} in PCI)", fix, {"pci": cards, "driver": version or None}), []
    names = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes)}, {gpu.pci})" for gpu in gpus)
    measured = {"pci": cards, "driver": version or None, "gpus": [asdict(gpu) for gpu in gpus]}
    return Finding("gpu", Word.OK, f"{len(gpus)}: {names}", "", measured), gpus


def _without_library(cards: list[str], version: str) -> Finding:
    measured = {"pci": cards, "driver": version or None, "gpus": []}
    if cards:
        fix = f"install NVIDIA's driver; in a container, its toolkit mounts {LIBRARY}"
        return Finding("gpu", Word.BAD, f"{', '.join(cards)} in PCI, but no {LIBRARY}", fix, measured)
    return Finding("gpu", Word.OK, "none: blocks are moved within host RAM", "", measured)


def nvidia_cards(root: Path) -> list[str]:
    """PCI addresses."""
    functions = sorted((root / "sys/bus/pci/devices").glob("*"))
    return [each.name for each in functions if text_of(each / "vendor") == NVIDIA and text_of(each / "class")[:6] in DISPLAY_CLASSES]


def peer_module(root: Path = Path("/")) -> str:
    """The kernel module that lets ibv_reg_mr take GPU addresses, "" where none is loaded."""
    return next((name for name in PEER_MODULES if (root / "sys/module" / name).exists()), "")


def registration_of(gpu: Gpu, dma_buf_library: bool, module: str) -> Registration:
    """How this GPU's memory would be registered: dma-buf needs no extra module, so it comes first. As client/movers/registering.py does."""
    if not gpu.writes_ordered and not gpu.flushes:
        return "none"
    if gpu.dma_buf and dma_buf_library:
        return "dma-buf"
    return "nvidia-peermem" if module and gpu.rdma else "none"


def gpu_direct(gpus: list[Gpu], devices: list[RdmaDevice], root: Path = Path("/")) -> list[Finding]:
    """One line for each GPU: how its memory would be registered. Nothing is registered here; `--measure` does."""
    if not gpus or not devices:
        missing = "no GPU" if not gpus else "no RDMA device"
        return [Finding("gpudirect", Word.SKIP, f"{missing}: nothing to register")]
    module, library = peer_module(root), can_register_dma_buf()
    findings = []
    for gpu in gpus:
        chosen = registration_of(gpu, library, module)
        reasons = [
            "the GPU exports dma-buf" if gpu.dma_buf else "the GPU exports no dma-buf",
            "libibverbs registers it" if library else "libibverbs has no ibv_reg_dmabuf_mr",
            f"{module} is loaded" if module else "nvidia-peermem is not loaded",
        ]
        if not gpu.rdma:
            reasons.append("the GPU lets no device in by address")
        if not gpu.writes_ordered:
            has = "which the driver does" if gpu.flushes else "which the driver cannot"
            reasons.append(f"writes need a flush before kernels see them, {has}")
        measured = {
            "gpu": gpu.ordinal, "dma_buf": gpu.dma_buf, "library": library, "module": module or None, "rdma": gpu.rdma,
            "writes_ordered": gpu.writes_ordered, "flushes": gpu.flushes, "chosen": chosen,
        }  # fmt: skip
        found = f"gpu {gpu.ordinal}: {chosen} would be chosen ({'; '.join(reasons)})"
        fix = "" if chosen != "none" else _way_in(gpu)
        findings.append(Finding("gpudirect", Word.OK if chosen != "none" else Word.WARN, found, fix, measured))
    return findings


def _way_in(gpu: Gpu) -> str:
    if not gpu.writes_ordered and not gpu.flushes:
        return "update the driver; until then blocks go through host RAM"
    if gpu.rdma:
        return "modprobe nvidia-peermem, or the open kernel modules of the driver and rdma-core 34 or later"
    return "the open kernel modules of the driver and rdma-core 34 or later; or go through host RAM: not every GPU lets a NIC in"


def locality(gpus: list[Gpu], devices: list[RdmaDevice], root: Path = Path("/")) -> list[Finding]:
    """One line for each GPU: the RDMA device nearest to it."""
    hardware = [device for device in devices if device.pci]
    if not gpus or not hardware:
        missing = "no GPU" if not gpus else "no RDMA device on PCIe"
        return [Finding("locality", Word.SKIP, f"{missing}: nothing to compare")]
    findings = []
    for gpu in gpus:
        near = by_distance(gpu.pci, hardware, root)
        code, name = near[0]
        node = text_of(root / "sys/bus/pci/devices" / gpu.pci / "numa_node")
        number = int(node) if node.lstrip("-").isdecimal() else None
        measured = {"gpu": gpu.ordinal, "numa_node": number, "devices": {device: far for far, device in near}}
        word = Word.WARN if code == "SYS" else Word.OK
        fix = "put the NIC beside the GPU, or pin the agent to the NIC's NUMA node and expect less" if code == "SYS" else ""
        findings.append(Finding("locality", word, f"gpu {gpu.ordinal}: {name} is nearest, {code} ({DISTANCES[code]})", fix, measured))
    return findings
