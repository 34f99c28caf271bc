"""`kvstore doctor`: what this host offers the store, what is amiss, and what to do. Changes nothing."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from kvstore.cli.output import Output
from kvstore.client.movers import devices
from kvstore.client.movers.choose import Measured, chosen, device_here, measure
from kvstore.doctor import disk, gpu, host, memory, rdma
from kvstore.doctor.finding import Finding, Word
from kvstore.errors import KvstoreError
from kvstore.units import format_bytes, parse_bytes

PINNED_BYTES: Final = 1 << 30  # what `kvstore agent` locks by default


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what this host offers, what is amiss, and what to do",
        description="Looks at RDMA devices, GPUs and how near they sit, memory limits, huge pages, io_uring, the erasure code, clock, TCP "
        "and limits of this host, and at the filesystem of a data directory. Each line is ok, warn, bad, or skip: not looked at, and why. "
        "Exit 0: nothing bad; 1: something is.",
        epilog="""\
examples:
  kvstore doctor                         on each host, before anything else runs there
  kvstore doctor --data /data/nvme0      a node's disk, too: O_DIRECT, holes, fsync are tried on a file of 1 MiB
  kvstore doctor --pinned 64GiB          will an agent with --memory 64GiB get its memory locked?
  kvstore doctor --measure               GB/s of each way from host RAM to the GPU, and which one is chosen
  kvstore doctor --settings              each setting, its value and where it comes from
  kvstore doctor --json | jq '.data.checks[] | select(.result != "ok")'

docs/RDMA.md explains the lines on RDMA and GPUs.
""",
    )
    parser.add_argument("--data", metavar="DIR", type=Path, help="look at the filesystem of this directory, too")
    parser.add_argument("--pinned", metavar="SIZE", default=None, help="memory that must be lockable (default 1GiB, as kvstore agent)")
    parser.add_argument("--measure", action="store_true", help="measure each mover of host RAM to device memory that can run here")
    parser.add_argument(
        "--rdma-device",
        metavar="NAME",
        default="auto",
        help="with --measure, of the mover loopback (default auto: KVSTORE_RDMA_DEVICE, else the one nearest to the GPU, or the first)",
    )
    parser.add_argument("--settings", dest="show_settings", action="store_true", help="only show each setting, its value and its origin")
    parser.add_argument("--fail-on", metavar="WORD", choices=("bad", "warn"), default="bad", help="exit 1 also for warn (default bad)")


def run(args: argparse.Namespace) -> int:
    out: Output = args.out
    if args.show_settings:
        return _settings(args, out)
    pinned = PINNED_BYTES if args.pinned is None else parse_bytes(args.pinned, "--pinned")
    out.line(f"host {platform.node()}   {platform.system()} {platform.release()}, {platform.machine()}")
    findings = []
    movers: list[Measured] = []
    for finding in look(pinned, args.data, movers if args.measure else None, args.rdma_device, args.settings["rdma_gid_index"]):
        findings.append(finding)
        out.step(finding.word.value, finding.check, finding.found)
        if finding.fix:
            out.line(f"      {'':<10} do: {finding.fix}")
    mover = chosen(movers)
    if mover:
        out.line(f'choose it with: mover = "{mover}" in the configuration file, or KVSTORE_MOVER={mover}')
    counts = {word.value: sum(finding.word is word for finding in findings) for word in Word}
    out.line(f"{counts['bad']} bad, {counts['warn']} to mind, {counts['skip']} not looked at. Nothing was changed.")
    out.result({"host": platform.node(), "checks": [finding.data() for finding in findings], "counts": counts, "mover": mover or None})
    return int(bool(counts["bad"]) or (args.fail_on == "warn" and bool(counts["warn"])))


def look(
    pinned_bytes: int, data: Path | None, movers: list[Measured] | None = None, rdma_device: str = "auto", gid_index: int = -1
) -> Iterator[Finding]:
    """All checks in order, each run when its finding is asked for. One that fails by itself is a finding, too: the others go on.

    `movers`: filled with what each was measured at; None: not measured."""
    found = devices.rdma_devices()
    gpu_finding, gpus = gpu.look_for_gpus()
    steps: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
        ("rdma", lambda: rdma.rdma(gid_index=gid_index)),
        ("memlock", lambda: [memory.memlock(pinned_bytes, bool(found))]),
        ("huge pages", lambda: [memory.huge_pages()]),
        ("gpu", lambda: [gpu_finding]),
        ("gpudirect", lambda: gpu.gpu_direct(gpus, found)),
        ("locality", lambda: gpu.locality(gpus, found)),
        ("erasure", lambda: [host.codec()]),
        ("io_uring", lambda: [host.io_uring()]),
        ("data", lambda: disk.data_directory(data)),
        ("clock", host.clock),
        ("tcp", lambda: [host.congestion()]),
        ("files", lambda: [host.files()]),
        ("movers", lambda: _movers(movers, len(gpus), rdma_device)),
    )
    for name, step in steps:
        try:
            yield from step()
        except (OSError, ValueError, AttributeError, RuntimeError, KvstoreError) as error:  # say, a kernel that has not even the question
            yield Finding(name, Word.SKIP, f"could not be looked at: {error}")


def _movers(into: list[Measured] | None, gpus: int, rdma_device: str) -> list[Finding]:
    if into is None:
        return [Finding("movers", Word.SKIP, "not measured: --measure takes some seconds")]
    device, why = device_here(gpus)
    into += measure(device, rdma_device=rdma_device)
    best = chosen(into)
    findings = [_mover(each, best, device) for each in into]
    if why:
        findings.insert(0, Finding("movers", Word.WARN, f"the GPU is left out: {why}", "pip install a torch with CUDA, beside kvstore", {}))
    return findings


def _mover(each: Measured, best: str, device: str) -> Finding:
    measured = {
        "mover": each.name, "device": device, "bytes_per_second": each.bytes_per_second and int(each.bytes_per_second),
        "of_plain_copy_ratio": each.of_copy, "chosen": each.name == best, "registration": each.note or None,
    }  # fmt: skip
    if each.bytes_per_second is None or each.of_copy is None:
        return Finding("movers", Word.SKIP, f"{each.name}: {each.why}", "", measured)
    note = f", {each.note}" if each.note else ""
    text = f"{each.name}: {each.bytes_per_second / 1e9:.2f} GB/s into {device}, {each.of_copy:.2f} of a plain copy{note}"
    return Finding("movers", Word.OK, text + ("; chosen" if each.name == best else ""), "", measured)


def _settings(args: argparse.Namespace, out: Output) -> int:
    values = args.settings.values
    rows = [(name, _shown(value.value), value.origin) for name, value in values.items()]
    out.table(("setting", "value", "from"), rows)
    out.result({name: {"value": _plain(value.value), "origin": value.origin} for name, value in values.items()})
    return 0


def _shown(value: Any) -> str:
    return "-" if value is None else format_bytes(value) if isinstance(value, int) and value >= 1_000_000 else str(value)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
