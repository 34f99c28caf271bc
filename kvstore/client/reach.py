"""The way to a cluster's nodes by its map, and the change to a newer map while verbs are under way.

    using()      a verb goes by the newest map from its beginning to its end, whatever is taken meanwhile
    heard(E)     a node knows epoch E: where it is newer, the file that the map came from is read again, once for each time that it changed
    take(map)    verbs that begin from now on go by it; connections by the older one are closed when nobody uses them any more

One thread, from the first need of it on, reads the file and closes what is old: neither holds up a verb.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kvstore.clustermap import ClusterMap
from kvstore.errors import Closed, ConfigError, KvstoreError, MisuseError
from kvstore.kernels import _native
from kvstore.mapfile import LOOK_SECONDS, MapFile
from kvstore.placement import Placement

log = logging.getLogger(__name__)

_OF_THE_NEWEST: Final = frozenset(  # the rest adds up over connections by several maps
    {
        "connected_nodes",
        "nodes_known",
        "nodes_well",
        "nodes_down",
        "nodes_late",
        "discover_delay_seconds",
        "promise_delay_seconds",
        "load_delay_seconds",
    }
)
_GAUGES: Final = frozenset(  # over when the connections are
    {"connections", "queued_bytes", "flight_bytes", "scratch_bytes", "rdma_queue_pairs", "rdma_registered_bytes"}
)


class Reach:
    """By one map: connections (`core`), and who holds what (`placements`, by epoch)."""

    def __init__(self, cluster_map: ClusterMap, placements: Mapping[int, Placement], core: _native.ClientCore) -> None:
        self.map = cluster_map
        self.placements = placements
        self.core = core
        self.closed = False
        self.users = 0  # verbs under way; guarded by Reaches

    @property
    def newest(self) -> Placement:
        return self.placements[self.map.epoch]


class Reaches:
    """The newest, and older ones in use. `connect` makes the connections to a map's nodes."""

    def __init__(self, cluster_map: ClusterMap, connect: Callable[[ClusterMap], _native.ClientCore]) -> None:
        self._connect = connect
        placements = {number: Placement(cluster_map, number) for number in cluster_map.epochs}
        self.current = Reach(cluster_map, placements, connect(cluster_map))
        self._file = MapFile(cluster_map.path, seen=False) if cluster_map.path is not None else None
        self._changed = threading.Condition()  # over an RLock: a collected load lets go wherever it is collected
        self._taking = threading.Lock()
        self._older: list[Reach] = []
        self._gone: dict[str, Any] = {}  # counters of connections that are closed
        self._waiting: list[Callable[[Reach], None]] = []
        self._asked = self._ended = False
        self._looked = float("-inf")
        self._heard = 0  # the newest epoch that a node named
        self._told = 0  # the epoch of which it was said that it cannot be had
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    # --- verbs ---

    def hold(self) -> Reach:
        """The newest, until let_go. Raises Closed, after a fork MisuseError."""
        if os.getpid() != self._pid:
            raise MisuseError("E561", "client", "used in a forked process", "make a new one there")
        with self._changed:
            if self._ended:
                raise Closed("E560", "client", "is closed", "make a new one")
            self.current.users += 1
            return self.current

    def let_go(self, reach: Reach) -> None:
        if os.getpid() != self._pid:
            return
        with self._changed:
            reach.users -= 1
            if not reach.users and reach is not self.current:
                self._changed.notify_all()

    @contextlib.contextmanager
    def using(self) -> Iterator[Reach]:
        reach = self.hold()
        try:
            yield reach
        finally:
            self.let_go(reach)

    # --- a newer map ---

    def heard(self, epoch: int, then: Callable[[Reach], None] | None = None) -> None:
        """A node's map has this epoch. `then` is called with the newest reach when the file was looked at, or when this is closed."""
        with self._changed:
            if then is None and (epoch <= self.current.map.epoch or time.monotonic() - self._looked < LOOK_SECONDS):
                return
            if not self._ended:
                self._asked, self._heard = True, max(self._heard, epoch)
                if then is not None:
                    self._waiting.append(then)
                self._wake()
                return
        if then is not None:
            then(self.current)

    def take(self, cluster_map: ClusterMap) -> None:
        """Nothing changes where it is the map in use, or an older one. Raises ConfigError E133 where it is not this cluster's, Closed."""
        with self._taking:
            old = self.current
            if cluster_map.epoch < old.map.epoch:
                return cluster_map.check_successor(old.map)
            old.map.check_successor(cluster_map)
            if cluster_map == old.map:
                return None
            placements = {number: old.placements.get(number) or Placement(cluster_map, number) for number in cluster_map.epochs}
            new = Reach(cluster_map, placements, self._connect(cluster_map))
            new.newest.table()  # a second of work in the largest maps: not that of the first store
            with self._changed:
                if not self._ended:
                    self._older.append(old)
                    self.current = new
                    self._wake()
                    return None
            new.core.close()
            raise Closed("E560", "client", "is closed", "make a new one")

    def stats(self) -> dict[str, Any]:
        """Counters since the start and gauges of now."""
        with self._changed:
            total, older = dict(self._gone), list(self._older)
            found = [(self.current.core.stats(), True), *((reach.core.stats(), False) for reach in older)]
        for stats, newest in found:
            for name, value in stats.items():
                total[name] = total.get(name, 0) + (value if newest or name not in _OF_THE_NEWEST else 0)
        return total

    def close(self) -> None:
        """Ends what is under way. A second call does nothing."""
        with self._changed:
            self._ended = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for then in waiting:
            then(self.current)
        for reach in (*self._older, self.current):
            _close(reach)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-map", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._asked or any(not reach.users for reach in self._older))
                if self._ended:
                    return
                idle = [reach for reach in self._older if not reach.users]
                asked, self._asked = self._asked, False
                waiting, self._waiting = self._waiting, []
            if asked:
                self._look()
            while waiting:  # nothing keeps what they keep
                waiting.pop(0)(self.current)
            for reach in idle:
                self._retire(reach)

    def _look(self) -> None:
        current, epoch = self.current.map, self._heard
        if epoch <= current.epoch:
            return
        self._looked = time.monotonic()
        cause = ""
        try:
            found = self._file.newer(current) if self._file is not None and self._file.changed() else None
            if found is not None:
                self.take(found)
                log.info("map has epoch %d, was %d", found.epoch, current.epoch)
        except KvstoreError as error:
            cause = f"map not taken, epoch {current.epoch} stays: {error}"
        if not self._ended and self.current.map.epoch < epoch and (cause or self._told != epoch):
            self._told = epoch
            log.warning("%s", cause or stale_map(self.current.map, epoch))

    def _retire(self, reach: Reach) -> None:
        _close(reach)
        with self._changed:
            self._older.remove(reach)
            for name, value in reach.core.stats().items():
                if name not in _OF_THE_NEWEST | _GAUGES:
                    self._gone[name] = self._gone.get(name, 0) + value


def stale_map(cluster_map: ClusterMap, node_epoch: int) -> ConfigError:
    """What to tell where nodes know a newer map than this one, which was read anew, or cannot be."""
    what = f"{cluster_map.path}" if cluster_map.path is not None else "the cluster map that this client was given"
    fix = "copy the nodes' map file there" if cluster_map.path is not None else "load the nodes' map and give it to Client.take_map"
    return ConfigError(
        "E137", what, f"has epoch {cluster_map.epoch}, nodes have epoch {node_epoch} and refuse what is placed by an older", fix
    )


def _close(reach: Reach) -> None:
    reach.core.close()
    reach.closed = True
