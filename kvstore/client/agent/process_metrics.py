"""An agent process's numbers as Prometheus series: those of its clients and windows, added up over kinds of engines, and its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from kvstore.client.agent.metrics import read_agent
from kvstore.client.metrics import read_ram
from kvstore.metrics import CLIENT, PEER, WINDOW, Metric, Values, registry_of

if TYPE_CHECKING:
    from kvstore.client.agent.process import AgentProcess

VERBS: Final = ("lookup", "load", "store", "window", "places", "keep", "drop", "give", "take")
RESULTS: Final = ("ok", "busy", "refused", "gone")
EVENTS: Final = ("attached", "ended", "refused", "cut")

AGENT: Final = (
    Metric("kvstore_agent_workers", "gauge", "Engine workers attached."),
    Metric("kvstore_agent_worker_events_total", "counter", "Workers, by what became of them.", {"event": EVENTS}),
    Metric(
        "kvstore_agent_requests_total", "counter", "Requests of workers answered, by verb and outcome.", {"op": VERBS, "result": RESULTS}
    ),
    Metric("kvstore_agent_memory_bytes", "gauge", "Shared memory that loads are staged in.", {"kind": ("pinned", "capacity")}),
    Metric("kvstore_agent_memory_locked", "gauge", "1 where that memory cannot be swapped."),
    Metric("kvstore_agent_ready", "gauge", "1 while this agent takes work; 0 while it drains."),
)


def process_registry(process: AgentProcess) -> CollectorRegistry:
    """Of the whole process, build_info included."""
    return registry_of([*CLIENT, *WINDOW, *PEER, *AGENT], lambda values: _read(process, values))


def _read(process: AgentProcess, values: Values) -> None:
    for agent in process.agents:
        _add(values, partial(read_agent, agent))
    if process.ram is not None:
        read_ram(process.ram, values)  # which the clients share: set, not added up
    values.set("kvstore_agent_workers", len(process.sessions))
    for (what, result), count in process.counts.items():
        if what == "worker":
            values.set("kvstore_agent_worker_events_total", count, result)
        else:
            values.set("kvstore_agent_requests_total", count, what, result)
    values.set("kvstore_agent_memory_bytes", process.arena.taken_bytes, "pinned")
    values.set("kvstore_agent_memory_bytes", process.arena.size_bytes, "capacity")
    values.set("kvstore_agent_memory_locked", not process.locked)
    values.set("kvstore_agent_ready", not process.draining)


def _add(values: Values, read: Callable[[Values], None]) -> None:
    one = Values()
    read(one)
    for (name, labels), number in one.numbers.items():
        values.add(name, number, *labels)
    for (name, labels), (counts, total) in one.histograms.items():
        before, sum_before = values.histograms.get((name, labels), ([0.0] * len(counts), 0.0))
        values.histogram(name, [a + b for a, b in zip(before, counts, strict=True)], total + sum_before, *labels)
