"""One end of a reliable connection by pyverbs: the independent peer of our native ends, and as hostile as a test wants.

with End("rxe1") as end:
    end.connect(gid, qpn, psn)
    end.open_zone()                  # a type 2 memory window over end.zone, for that one queue pair
    end.receive(8)                   # receive requests without memory: they take immediates
    end.completions(1)               # waited for, with a deadline
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR, MW, MWBindInfo
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from server_tools import until

PORT = 1
WAIT_SECONDS = 100.0  # emulated, beside other work, perhaps under a sanitizer
BIND, SEND, RECEIVE = 1, 2, 3  # wr_id


class End:
    """A queue pair on `device`, its completion queue, and `zone_bytes` of memory, or the memory of `base`. Leaving the context closes what
    is its own, in order."""

    def __init__(self, device: str, zone_bytes: int = 1 << 20, *, depth: int = 64, base: End | None = None) -> None:
        self._base = base
        self.context = base.context if base else Context(name=device)
        self.gid_index = base.gid_index if base else gid_index_of(device)
        self.gid = _gid_bytes(str(self.context.query_gid(PORT, self.gid_index)))
        self.pd = base.pd if base else PD(self.context)
        self.cq = CQ(self.context, 4 * depth)
        self.zone_bytes = base.zone_bytes if base else zone_bytes
        self.zone = base.zone if base else MR(self.pd, zone_bytes, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_MW_BIND)
        cap = QPCap(max_send_wr=depth, max_recv_wr=depth)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))
        self.qpn: int = self.qp.qp_num
        self.psn = 0x123456
        self.window: Any = None
        self.rkey = 0
        self._seen: list[Any] = []

    def connect(self, gid: bytes, qpn: int, psn: int) -> None:
        """To RTS; the peer may write where a window lets it."""
        attr = QPAttr(port_num=PORT)
        attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        attr.path_mtu = e.IBV_MTU_4096
        attr.dest_qp_num = qpn
        attr.rq_psn, attr.sq_psn = psn, self.psn
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 18, 7, 7
        route = GlobalRoute(dgid=GID(_gid_text(gid)), sgid_index=self.gid_index)
        attr.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        self.qp.to_rts(attr)

    def first_rkey(self) -> int:
        """Of the window, once it is bound."""
        if self.window is None:
            self.window = MW(self.pd, e.IBV_MW_TYPE_2)
        key: int = self.window.rkey
        return (key & ~0xFF) | ((key + 1) & 0xFF)

    def open_zone(self, offset: int = 0, length: int | None = None) -> None:
        """Binds the window, writable by the peer, over a part of the zone."""
        self.rkey = self.first_rkey()
        length = self.zone_bytes - offset if length is None else length
        wr = SendWR(wr_id=BIND, opcode=e.IBV_WR_BIND_MW, send_flags=e.IBV_SEND_SIGNALED)
        wr.set_bind_wr(self.window, MWBindInfo(self.zone, self.zone.buf + offset, length, e.IBV_ACCESS_REMOTE_WRITE))
        self.qp.post_send(wr)
        (bound,) = self.completions(1)
        assert bound.status == e.IBV_WC_SUCCESS, bound

    def close_zone(self) -> None:
        """Invalidates the window: the fence."""
        wr = SendWR(wr_id=BIND, opcode=e.IBV_WR_LOCAL_INV, send_flags=e.IBV_SEND_SIGNALED)
        wr.imm_data = self.rkey  # of this verb: the key to invalidate (one union in C)
        self.qp.post_send(wr)
        (gone,) = self.completions(1)
        assert gone.status == e.IBV_WC_SUCCESS, gone

    def receive(self, count: int) -> None:
        for _ in range(count):
            self.qp.post_recv(RecvWR(wr_id=RECEIVE, num_sge=1, sg=[SGE(self.zone.buf, 0, self.zone.lkey)]))  # pyverbs asks for a part

    def write(self, rkey: int, address: int, length: int, immediate: int | None = None) -> None:
        """An RDMA WRITE of the front of this end's zone to the peer's memory; signalled."""
        opcode = e.IBV_WR_RDMA_WRITE if immediate is None else e.IBV_WR_RDMA_WRITE_WITH_IMM
        part = SGE(self.zone.buf, length, self.zone.lkey)
        wr = SendWR(wr_id=SEND, opcode=opcode, num_sge=1, sg=[part], imm_data=socket.htonl(immediate or 0), send_flags=e.IBV_SEND_SIGNALED)
        wr.set_wr_rdma(rkey, address)
        self.qp.post_send(wr)

    def completions(self, count: int, seconds: float = WAIT_SECONDS) -> list[Any]:
        """The next `count` completions, of whatever kind."""
        until(lambda: len(self._poll()) >= count, f"{count} completions", seconds)
        taken, self._seen = self._seen[:count], self._seen[count:]
        return taken

    def pending(self) -> int:
        """Completions that have come and were not taken."""
        return len(self._poll())

    def _poll(self) -> list[Any]:
        self._seen += self.cq.poll(64)[1]
        return self._seen

    def close(self) -> None:
        shared = (self._base.zone, self._base.pd, self._base.context) if self._base else ()
        for part in (self.window, self.qp, self.zone, self.cq, self.pd, self.context):  # a bound window keeps its queue pair
            if part is not None and part not in shared:
                part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def gid_index_of(device: str) -> int:
    """RoCE v2 of the device's IPv4 address: 1 of soft-RoCE."""
    port = Path("/sys/class/infiniband", device, "ports", str(PORT))
    for gid in sorted((port / "gids").iterdir(), key=lambda path: int(path.name)):
        if gid.read_text().startswith("0000:0000:0000:0000:0000:ffff:"):
            with contextlib.suppress(OSError):  # of an entry that is empty
                if (port / "gid_attrs/types" / gid.name).read_text().strip() == "RoCE v2":
                    return int(gid.name)
    raise AssertionError(f"{device} has no RoCE v2 GID of an IPv4 address")


def immediate_of(completion: Any) -> int:
    return socket.ntohl(completion.imm_data)


def _gid_bytes(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, text)


def _gid_text(gid: bytes) -> str:
    """As pyverbs reads it: eight groups of four digits."""
    return ":".join(gid[i : i + 2].hex() for i in range(0, 16, 2))
