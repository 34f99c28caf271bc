"""Peers that speak the data protocol and do wrong on demand: lag, lie, refuse, cut, forget. For what a real daemon never does when told to.

A PeerCluster runs all its peers on one asyncio loop in a thread of its own. Rules are coroutines on that loop, set per peer:

    peer.item_rule   (Item) -> None: the right answer | bytes: this body instead | Status: this status, no body | Raw: these bytes, then the
                     connection ends | raises ConnectionError: the connection ends. It may wait for a gate first.
    peer.reply_rule  (verb, request body, right answer) -> the same, for DISCOVER, PROMISE, WITHDRAW, SUSPECT, and WRITE (its answer is
                     a status)

Records are kept as they were sent; everything is checked with the plain Python twins of the formats. Not covered: HELLO faults.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import random
import socket
import struct
import termios
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvstore import record, wire
from kvstore.clustermap import ClusterMap, Node
from kvstore.wire import Kind, Status, Verb


@dataclass(frozen=True)
class Raw:
    """Bytes that are sent as they are; then the connection ends."""

    data: bytes


@dataclass(frozen=True)
class Item:
    """One asked piece run: which, and the body of its right answer (empty when it is not here)."""

    extent_key: bytes
    write_id: int
    shard: int
    plane: int
    first_block: int
    block_count: int
    body: bytes
    pipe: Pipe
    request_id: int
    ordinal: int

    def frame(self, body: bytes, status: int = Status.OK) -> bytes:
        """The answer as it goes over the wire."""
        return wire.encode(Verb.READ, body, request_id=self.request_id, kind=Kind.ITEM, status=status, aux=self.ordinal)


Verdict = None | bytes | Status | Raw
ItemRule = Callable[[Item], Awaitable[Verdict]]
ReplyRule = Callable[[Verb, bytes, bytes], Awaitable[Verdict]]


class Pipe:
    """One connection on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._loop = loop
        self._connection = connection
        self._left = bytearray()
        self.chop: random.Random | None = None  # sends in pieces of random length, each arrived before the next leaves

    async def more(self) -> None:
        """Returns when the client has said more than was read."""
        if not self._left:
            await self._receive()

    async def _receive(self) -> None:
        got = await self._loop.sock_recv(self._connection, 1 << 20)
        if not got:
            raise ConnectionError("the client hung up")
        self._left += got

    async def exactly(self, count: int) -> bytes:
        while len(self._left) < count:
            await self._receive()
        out = bytes(self._left[:count])
        del self._left[:count]
        return out

    async def send(self, data: bytes) -> None:
        while self.chop is not None and data:
            piece = self.chop.choice((1, 31, 32, 33, 500, 5_000, 50_000))
            await self._loop.sock_sendall(self._connection, data[:piece])
            data = data[piece:]
            while self._unacknowledged():
                await asyncio.sleep(0)
        await self._loop.sock_sendall(self._connection, data)

    def _unacknowledged(self) -> int:
        count = array.array("i", [0])
        fcntl.ioctl(self._connection, termios.TIOCOUTQ, count)
        return count[0]

    def close(self) -> None:
        self._connection.close()


class Gate:
    """Closed until opened; anybody may open it, rules wait for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self.reached = threading.Event()  # somebody waits, or has waited

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        self.reached.set()
        await self._event.wait()


class Peer:
    """One node. Attributes may be set from any thread between requests."""

    def __init__(self, cluster: PeerCluster) -> None:
        self.cluster = cluster
        self.records: dict[tuple[bytes, int], dict[int, record.Record]] = {}
        self.tombstones: set[tuple[bytes, int]] = set()
        self.item_rule: ItemRule | None = None
        self.reply_rule: ReplyRule | None = None
        self.asked: Counter[Verb] = Counter()
        self.items_asked: list[tuple[int, int]] = []  # shard, plane
        self.touches: list[tuple[bytes, int, int]] = []  # extent key, bucket, class
        self.discovered: list[bytes] = []
        self.suspected: list[tuple[bytes, int, int]] = []  # extent key, write id, shard
        self.chop: random.Random | None = None
        self.port = 0
        self.epoch = 1  # of its cluster map
        self.stale_aux = 0  # a rule that says STALE_MAP names this epoch
        self.frame: wire.Frame  # the last that came, without its body

    # --- verbs ---

    def _discover(self, body: bytes) -> bytes:
        count = struct.unpack_from("<I", body, 24)[0]
        found = []
        for ordinal in range(count):
            key = body[32 + 32 * ordinal : 64 + 32 * ordinal]
            self.discovered.append(key)
            for (extent_key, write_id), shards in self.records.items():
                if extent_key == key:
                    r = next(iter(shards.values()))
                    found.append(
                        wire.Writing(
                            write_id, sum(1 << s for s in shards), r.write_epoch, ordinal, r.start_block, r.fidelity, r.retention_class,
                            r.depth, r.kv_group, r.pg, r.block_bytes, r.k, r.m, r.cipher, len(r.plane_bytes), r.layout_tag,
                            tuple(r.earlier), tuple(r.tags),
                        )
                    )  # fmt: skip
        return wire.encode_discover_reply(found)

    def _names(self, body: bytes, at: int) -> list[tuple[bytes, int]]:
        return list(struct.iter_unpack("<32sQ", body[at:]))

    def _promise(self, body: bytes) -> bytes:
        _, _, _, bucket, _, retention_class, _, _ = struct.unpack_from("<16sQIIBBHI", body)
        out = b""
        for name in self._names(body, 40):
            self.touches.append((name[0], bucket, retention_class))
            shards = self.records.get(name, {})
            out += struct.pack("<IIQ", Status.OK if shards else Status.NOT_FOUND, 0, sum(1 << s for s in shards))
        return out

    def _withdraw(self, body: bytes) -> bytes:
        names = self._names(body, 24)
        for name in names:
            self.tombstones.add(name)
        return struct.pack(f"<{len(names)}I", *(Status.OK if self.records.pop(name, None) else Status.NOT_FOUND for name in names))

    def _suspect(self, body: bytes) -> bytes:
        shards = list(struct.iter_unpack("<32sQB7x", body[24:]))
        self.suspected += shards
        held = (shard in self.records.get((key, write_id), {}) for key, write_id, shard in shards)
        return struct.pack(f"<{len(shards)}I", *(Status.OK if here else Status.NOT_FOUND for here in held))

    def _write(self, body: bytes) -> Status:
        made = record.parse(body)
        if isinstance(made, record.Check):
            return Status.CORRUPT
        if made.write_epoch < self.epoch:
            return Status.STALE_MAP
        name = (made.extent_key, made.write_id)
        if name in self.tombstones:
            return Status.TOMBSTONED
        self.records.setdefault(name, {})[made.shard] = made
        return Status.OK

    def _item(self, extent: wire.ReadExtent, plane: int, pipe: Pipe, request_id: int, ordinal: int) -> Item:
        r = self.records.get((extent.extent_key, extent.write_id), {}).get(extent.shard)
        body = b""
        if r is not None:
            blocks = range(extent.first_block, extent.first_block + extent.block_count)
            sums = [record.piece_sum(r.owner, r.extent_key, r.write_id, r.shard, plane, b, r.pieces[plane][b]) for b in blocks]
            body = item_body(sums, [r.digests[plane][b] for b in blocks], [r.pieces[plane][b] for b in blocks])
        e = extent
        return Item(e.extent_key, e.write_id, e.shard, plane, e.first_block, e.block_count, body, pipe, request_id, ordinal)

    # --- connections ---

    async def serve(self, pipe: Pipe) -> None:
        try:
            while True:
                frame, body_bytes = wire.decode_header(await pipe.exactly(wire.HEADER_BYTES))
                await self._answer(frame, await pipe.exactly(body_bytes), pipe)
        except (asyncio.CancelledError, OSError):
            pass  # the peer's end, or ours
        finally:
            pipe.close()

    async def _answer(self, frame: wire.Frame, body: bytes, pipe: Pipe) -> None:
        verb = Verb(frame.verb)
        self.asked[verb] += 1
        self.frame = frame
        if verb == Verb.HELLO:
            hello = wire.Hello.decode(body)
            answer = wire.Hello(hello.role, hello.cluster, self.epoch, 1, 60, 0).encode()
            await pipe.send(wire.encode(verb, answer, request_id=frame.request_id, kind=Kind.REPLY))
        elif verb == Verb.READ:
            pipe.chop = self.chop
            await self._read(frame, body, pipe)
        elif verb == Verb.WRITE:
            verdict = await self.reply_rule(verb, body, b"") if self.reply_rule is not None else None
            status = verdict if isinstance(verdict, Status) else self._write(body)
            aux = {Status.BUSY: 1, Status.STALE_MAP: max(self.epoch, self.stale_aux)}.get(status, 0)
            await pipe.send(wire.encode(verb, request_id=frame.request_id, kind=Kind.REPLY, status=status, aux=aux))
        elif verb == Verb.VERBS_OPEN:  # no RDMA here; tests/verbs/rdmapeer.py has it
            await pipe.send(wire.encode(verb, request_id=frame.request_id, kind=Kind.REPLY, status=Status.NOT_FOUND))
        elif verb == Verb.WHY:  # nothing went: a cut connection would leave the peer held for down
            await pipe.send(wire.encode(verb, bytes(8), request_id=frame.request_id, kind=Kind.REPLY))
        else:
            answers = {
                Verb.DISCOVER: self._discover, Verb.PROMISE: self._promise, Verb.WITHDRAW: self._withdraw, Verb.SUSPECT: self._suspect,
            }  # fmt: skip
            right = answers[verb](body)
            verdict = await self.reply_rule(verb, body, right) if self.reply_rule is not None else None
            await _send(pipe, verdict, right, lambda b, s: wire.encode(verb, b, request_id=frame.request_id, kind=Kind.REPLY, status=s))

    async def _read(self, frame: wire.Frame, body: bytes, pipe: Pipe) -> None:
        _, _, extent_count, item_count = struct.unpack_from("<16sQII", body)
        extents = []
        for key, write_id, shard, _, first, count, _ in struct.iter_unpack("<32sQBBHHH", body[32 : 32 + 48 * extent_count]):
            extents.append(wire.ReadExtent(key, write_id, shard, first, count))
        items = list(struct.iter_unpack("<HBB", body[32 + 48 * extent_count :]))
        assert len(items) == item_count
        for ordinal, (extent, plane, _) in enumerate(items):
            item = self._item(extents[extent], plane, pipe, frame.request_id, ordinal)
            self.items_asked.append((item.shard, plane))
            verdict = await self.item_rule(item) if self.item_rule is not None else None
            if verdict is None and not item.body:
                verdict = Status.NOT_FOUND
            await _send(pipe, verdict, item.body, item.frame)


async def _send(pipe: Pipe, verdict: Verdict, right: bytes, frame: Callable[[bytes, int], bytes]) -> None:
    if isinstance(verdict, Raw):
        await pipe.send(verdict.data)
        raise ConnectionError
    if isinstance(verdict, Status):
        await pipe.send(frame(b"", verdict))
    else:
        await pipe.send(frame(right if verdict is None else verdict, Status.OK))


def _kind_of_peer() -> type[Peer]:
    """With RDMA where the suite runs over it (tests/verbs)."""
    if os.environ.get("KVSTORE_TRANSPORT") != "rdma":
        return Peer
    from verbs.rdmapeer import RdmaPeer

    return RdmaPeer


class PeerCluster:
    """Peers and their map. Leaving the context ends everything, gates included."""

    def __init__(self, nodes: int = 12, *, k: int = 10, m: int = 2) -> None:
        self.loop = asyncio.new_event_loop()
        self.peers = [_kind_of_peer()(self) for _ in range(nodes)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[socket.socket] = []
        for peer in self.peers:
            listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            listener.setblocking(False)
            peer.port = listener.getsockname()[1]
            self.loop.add_reader(listener, self._accept, peer, listener)
            self._listeners.append(listener)
        self._thread = threading.Thread(target=self.loop.run_forever, name="faultpeers")
        self._thread.start()
        listed = [Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{peer.port}") for i, peer in enumerate(self.peers)]
        self.map = ClusterMap.local(listed, k=k, m=m)

    def _accept(self, peer: Peer, listener: socket.socket) -> None:
        try:
            pipe = Pipe(self.loop, listener.accept()[0])
        except OSError:
            return
        task = self.loop.create_task(peer.serve(pipe))
        self._tasks.add(task)
        task.add_done_callback(lambda done: (self._tasks.discard(done), pipe.close()))

    def gate(self) -> Gate:
        return Gate(self.loop)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    async def _close(self) -> None:
        for listener in self._listeners:
            self.loop.remove_reader(listener)
            listener.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def item_body(sums: list[int], digests: list[bytes], pieces: list[bytes]) -> bytes:
    """Body of an OK item."""
    return struct.pack(f"<{len(sums)}Q", *sums) + b"".join(digests) + b"".join(pieces)


def with_lie(item: Item, owner: bytes = wire.NO_OWNER) -> bytes:
    """The item with one byte of its first piece changed and a sum that fits the change: only the digests tell."""
    right = wire.decode_item(item.body, item.block_count)
    size = len(right.pieces) // item.block_count
    pieces = [bytearray(right.pieces[i * size : (i + 1) * size]) for i in range(item.block_count)]
    pieces[0][0] ^= 0x40
    sums = list(right.sums)
    sums[0] = record.piece_sum(owner, item.extent_key, item.write_id, item.shard, item.plane, item.first_block, bytes(pieces[0]))
    return item_body(sums, list(right.digests), [bytes(p) for p in pieces])
