"""`kvstore put`: stores a file as blocks. For poking at a cluster; engines use kvstore.client."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, cast

from kvstore.cli.blocks import Handle, handle_path, scan, windows
from kvstore.cli.cluster import find_map, tell_of_maps_here, why_short
from kvstore.cli.flags import add_transport, fabric_of
from kvstore.cli.output import Output
from kvstore.clustermap import ClusterMap
from kvstore.errors import InputError, Refused, StorageError
from kvstore.layout import BLOCK_BYTES_MAX, PRESETS
from kvstore.units import format_bytes, parse_bytes

STORE_SECONDS: Final = 60.0  # for one window of 64 MB, on a slow disk


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "put",
        help="store a file as blocks",
        description="Cuts a file into blocks and stores those the cluster does not have. `kvstore get` finds the handle that is kept here.",
        epilog="""\
examples:
  kvstore put model.bin                       then: kvstore get model.bin -o copy.bin
  tar c logs | kvstore put - --name logs.tar
  kvstore put model.bin --handle model.json   the handle as a file, to use on another host
""",
    )
    parser.add_argument("file", metavar="FILE", help="the file; - for standard input")
    parser.add_argument("--name", metavar="NAME", help="name to get it by (default: the file's)")
    parser.add_argument("--handle", metavar="FILE", help="write the handle there, too")
    parser.add_argument("--block-bytes", metavar="SIZE", default=str(PRESETS["v41"].block_bytes), help="bytes of a block (default 113920)")
    add_transport(parser)
    parser.add_argument("--class", metavar="CLASS", help="retention class: none, batch, chat, agent or one of the map (default chat)")
    parser.set_defaults(settings_flags=("class", "transport"))


def run(args: argparse.Namespace) -> int:
    block_bytes = parse_bytes(args.block_bytes, "--block-bytes")
    if not 1 <= block_bytes <= BLOCK_BYTES_MAX:
        raise InputError("E131", f"--block-bytes {block_bytes}", fix=f"write 1 to {BLOCK_BYTES_MAX}")
    name = args.name or ("stdin" if args.file == "-" else Path(args.file).absolute().name)
    path = handle_path(name)
    if args.handle and Path(args.handle).exists() and not Path(args.handle).is_file():  # a device: a file must not take its name
        raise Refused("E301", f"{args.handle} is no file", fix="name a file with --handle")
    cluster_map = find_map(args)
    retention = args.settings["class"]
    if retention not in cluster_map.classes:
        raise InputError("E132", f'no retention class "{retention}"', fix=f"known: {', '.join(cluster_map.classes)}")
    with _opened(args.file) as file:
        handle = scan(file, name, cluster_map.cluster_id, block_bytes)
        started = time.monotonic()
        stored, degraded = _store(file, handle, cluster_map, retention, args)
    handle.save(path)
    if args.handle:
        handle.save(Path(args.handle))
    return _tell(args.out, handle, cluster_map.epoch, path, stored, degraded, time.monotonic() - started)


def _opened(name: str) -> IO[bytes]:
    """The file, or a copy of standard input or of another pipe: it is read twice."""
    if name == "-":
        return _copy_of(sys.stdin.buffer)
    try:
        file = Path(name).open("rb")  # noqa: SIM115  the caller closes it
    except OSError as error:
        raise InputError("E142", f"cannot read {name}", (error.strerror or str(error)).lower(), "check the path") from None
    if file.seekable():
        return file
    with file:
        return _copy_of(file)


def _copy_of(stream: IO[bytes]) -> IO[bytes]:
    spool = cast(IO[bytes], tempfile.TemporaryFile())  # noqa: SIM115  the caller closes it
    shutil.copyfileobj(stream, spool)
    spool.seek(0)
    return spool


def _store(file: IO[bytes], handle: Handle, cluster_map: ClusterMap, retention: str, args: argparse.Namespace) -> tuple[int, int]:
    """Blocks stored now, and those of them in extents short of a shard. Raises StorageError E404 where a store failed."""
    from kvstore.client import Client, ClientConfig, StoreOutcome
    from kvstore.client.reach import stale_map

    tell_of_maps_here()
    keys = handle.keys()
    if not len(keys):
        return 0, 0
    timeout = args.settings["timeout"]
    stored = degraded = 0
    told = ClientConfig(ask_first=False, transport=args.settings["transport"], **fabric_of(args.settings))  # somebody wants it stored
    with Client(cluster_map, layout=handle.layout, config=told) as client, args.out.progress("put", len(keys), unit="blocks") as bar:
        there = client.lookup(keys, retention_class=retention, deadline_seconds=timeout).hit_blocks
        bar.advance(there)
        for at, blocks in windows(file, handle, there):
            done = client.store(keys[: at + len(blocks)], blocks, first_block=at, retention_class=retention).result(timeout + STORE_SECONDS)
            if done.outcome is StoreOutcome.STALE_MAP:
                raise stale_map(client.map, done.node_epoch)
            if not done.outcome.readable:
                what = f"blocks {at} to {at + len(blocks) - 1} could not be stored"
                raise StorageError("E404", what, *_why_failed(client.stats(), cluster_map, timeout))
            stored += done.blocks
            degraded += done.blocks if done.outcome is StoreOutcome.DEGRADED else 0
            bar.advance(len(blocks))
    return stored, degraded


def _why_failed(stats: Mapping[str, int | float], cluster_map: ClusterMap, timeout_seconds: float) -> tuple[str, str]:
    """Cause and fix, by what most of the nodes that did not take a shard said. Raises Unreachable where no node answers at all."""
    short = why_short(cluster_map, timeout_seconds, f"fewer than {cluster_map.k} of their nodes took them")
    said = max(_REFUSALS, key=lambda name: stats[name])
    return _REFUSALS[said] if stats[said] > stats["shards_unreachable"] else (short, "kvstore status")


# The client's count of shards that were not taken, by the nodes' answer -> cause and fix.
_REFUSALS: Final = {
    "shards_no_space": ("their nodes have no room", "kvstore status: where it says DISK_FULL, free space on that disk; else try again"),
    "shards_draining": ("their nodes are being stopped", "kvstore status; try again when they are back"),
    "shards_stale_map": ("their nodes have a newer cluster map", "give --map the newest one"),
    "shards_busy": ("their nodes were busy", "try again"),
}


def _tell(out: Output, handle: Handle, epoch: int, path: Path, stored: int, degraded: int, seconds: float) -> int:
    blocks = len(handle.hashes)
    if degraded:
        out.warn(f"{degraded} blocks were stored with a shard or two missing: kvstore status")
    there = f", {blocks - stored} of them were there" if stored < blocks else ""
    out.line(f"{handle.name}  {format_bytes(handle.file_bytes)}, {blocks} block{'s' if blocks != 1 else ''}{there}, {seconds:.2f} s")
    out.note(f"get it back: kvstore get {shlex.quote(handle.name)} -o FILE")
    data = {"name": handle.name, "handle": str(path), "file_bytes": handle.file_bytes, "block_bytes": handle.block_bytes}
    out.result(
        {**data, "blocks": blocks, "blocks_stored": stored, "blocks_degraded": degraded, "seconds": round(seconds, 6)},
        cluster=handle.cluster,
        epoch=epoch,
    )
    return 0
