"""`kvstore get`: brings back a file that `put` stored, and checks length and bytes before it takes its name."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from kvstore.cli.blocks import WINDOW_BYTES, Handle, handle_path, handles_directory
from kvstore.cli.cluster import find_map, tell_of_maps_here, why_short
from kvstore.cli.flags import add_transport, fabric_of
from kvstore.cli.output import Output
from kvstore.cli.signals import interrupted_by_signals
from kvstore.clustermap import ClusterMap
from kvstore.errors import InputError, Refused, StorageError, UsageError
from kvstore.units import format_bytes
from kvstore.wholefile import whole_file

TICKET_SECONDS: Final = 5.0  # a ticket is good for about ten


@dataclass(frozen=True, slots=True)
class _Read:
    """How a file came: pieces that were decoded, and bytes that nodes sent for it each way."""

    decoded: int
    tcp_bytes: int
    rdma_bytes: int

    @property
    def way(self) -> str:
        ways = [name for name, count in (("RDMA", self.rdma_bytes), ("TCP", self.tcp_bytes)) if count]
        return " and ".join(ways) or "TCP"  # of an empty file nothing is sent


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "get",
        help="bring back a stored file",
        description="Loads a file that `kvstore put` stored. It gets its name only when every byte is there and equal; exit 1 otherwise.",
        epilog="""\
examples:
  kvstore get model.bin -o copy.bin
  kvstore get logs.tar -o - | tar x
  kvstore get --handle model.json -o model.bin    a handle from another host
  kvstore get --list
""",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the name it was put under")
    parser.add_argument("--handle", metavar="FILE", help="a handle file in place of a name")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write; - for standard output (default: the name)")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    add_transport(parser)
    parser.set_defaults(settings_flags=("transport",))
    parser.add_argument("--list", action="store_true", help="the names known here")


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args.out)
    handle = _handle(args)
    target = args.output or handle.name
    if target != "-" and Path(target).exists():
        if not Path(target).is_file():  # a device, a pipe, a directory: a file must not take its name
            raise Refused("E301", f"{target} is no file", fix="another name with -o, or -o - to write to standard output")
        if not args.force:
            raise Refused("E301", f"{target} is there already", fix="another name with -o, or --force")
    cluster_map = find_map(args)
    started = time.monotonic()
    if target == "-":
        read = _load(sys.stdout.buffer, handle, cluster_map, args)
        sys.stdout.buffer.flush()
    else:
        with interrupted_by_signals(), whole_file(Path(target).resolve(), target) as file:
            read = _load(file, handle, cluster_map, args)
    seconds = time.monotonic() - started
    rate = format_bytes(handle.file_bytes / max(seconds, 1e-9))
    size = format_bytes(handle.file_bytes)
    args.out.note(f"{target}: {size}, bytes equal, {seconds:.2f} s, {rate}/s by {read.way}, {read.decoded} pieces decoded")
    data = {"name": handle.name, "output": target, "file_bytes": handle.file_bytes, "blocks": len(handle.hashes)}
    data |= {"decoded": read.decoded, "read_bytes_tcp": read.tcp_bytes, "read_bytes_rdma": read.rdma_bytes}
    args.out.result({**data, "seconds": round(seconds, 6)}, cluster=handle.cluster, epoch=cluster_map.epoch)
    return 0


def _handle(args: argparse.Namespace) -> Handle:
    if args.handle:
        return Handle.load(Path(args.handle))
    if not args.name:
        raise UsageError("E140", "no name given", fix="kvstore get NAME, or kvstore get --list")
    path = handle_path(args.name)
    if not path.exists():
        raise InputError("E144", f'nothing was put under the name "{args.name}" here', fix="kvstore get --list, or give its --handle")
    return Handle.load(path)


def _load(file: IO[bytes], handle: Handle, cluster_map: ClusterMap, args: argparse.Namespace) -> _Read:
    """Writes the whole file; tells how it came. Raises StorageError E403 where something is missing."""
    from kvstore.client import Client, ClientConfig

    tell_of_maps_here()
    keys, total = handle.keys(), len(handle.hashes)
    step = max(1, WINDOW_BYTES // handle.block_bytes)
    blocks = np.zeros((min(step, total), handle.block_bytes), np.uint8)
    timeout = args.settings["timeout"]
    whole, left, decoded = hashlib.blake2b(digest_size=32), handle.file_bytes, 0
    ticket, looked = None, 0.0
    config = ClientConfig(transport=args.settings["transport"], **fabric_of(args.settings))
    with Client(cluster_map, layout=handle.layout, config=config) as client, args.out.progress("get", total, unit="blocks") as bar:
        for at in range(0, total, step):
            if ticket is None or time.monotonic() - looked > TICKET_SECONDS:
                ticket, looked = client.lookup(keys, retention_class="none", deadline_seconds=timeout), time.monotonic()
            wanted = range(at, min(at + step, total))
            _require(ticket.hit_blocks, wanted.stop, total, cluster_map, args)
            loaded = client.load(ticket, blocks[: len(wanted)], blocks=wanted, deadline_seconds=timeout + 30)
            _require(at + loaded.blocks, wanted.stop, total, cluster_map, args)
            decoded += loaded.decoded
            raw = blocks.reshape(-1)[: min(left, len(wanted) * handle.block_bytes)].tobytes()
            whole.update(raw)
            file.write(raw)
            left -= len(raw)
            bar.advance(len(wanted))
        stats = client.stats()
    if whole.hexdigest() != handle.digest:
        raise StorageError("E402", f"{handle.name}", "what came back is not what was put", "keep the logs and report it")
    return _Read(decoded, int(stats["read_bytes_tcp"]), int(stats["read_bytes_rdma"]))


def _require(found: int, wanted: int, total: int, cluster_map: ClusterMap, args: argparse.Namespace) -> None:
    if found < wanted:
        cause = why_short(cluster_map, args.settings["timeout"], "the rest was evicted")
        raise StorageError("E403", f"only the first {found} of {total} blocks are there", cause, "kvstore status; then put it again")


def _list(out: Output) -> int:
    handles = []
    for path in sorted(handles_directory().glob("*.json")):
        try:
            handles.append(Handle.load(path))
        except InputError as error:
            out.warn(str(error))
    out.table(("name", "size", "blocks", "cluster"), [(h.name, format_bytes(h.file_bytes), len(h.hashes), h.cluster) for h in handles])
    out.result({"files": [{"name": h.name, "file_bytes": h.file_bytes, "blocks": len(h.hashes), "cluster": h.cluster} for h in handles]})
    return 0
