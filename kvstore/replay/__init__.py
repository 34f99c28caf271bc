"""Real traces against a real cluster: readers, exact reference figures, the replay itself and the demo's story."""

from kvstore.replay.capacity import TraceShape, capacity_blocks, node_capacity_bytes, shape_of
from kvstore.replay.exact import HitTotals, InfiniteCache, LruCache, TimeToLiveCache, totals
from kvstore.replay.local import local_cluster
from kvstore.replay.player import ReplayOptions, run_replay
from kvstore.replay.report import Latency, ReplayReport, RequestOutcome
from kvstore.replay.requests import Request
from kvstore.replay.trace import Trace, open_trace

__all__ = [
    "HitTotals",
    "InfiniteCache",
    "Latency",
    "LruCache",
    "ReplayOptions",
    "ReplayReport",
    "Request",
    "RequestOutcome",
    "TimeToLiveCache",
    "Trace",
    "TraceShape",
    "capacity_blocks",
    "local_cluster",
    "node_capacity_bytes",
    "open_trace",
    "run_replay",
    "shape_of",
    "totals",
]
