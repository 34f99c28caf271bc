"""Traces: the spans of a real lookup and load, recorded by the real SDK, say what happened when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from client_tools import NO_REUSE, V41, Cluster, chain, cluster_of, load, store, until_whole
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstore.client import Client

EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def _recording() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(provider)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("tracing")) as running:
        yield running


def spans_of(client: Client, keys: np.ndarray, hedge: str = "lazy") -> tuple[dict[str, list[ReadableSpan]], ReadableSpan]:
    """All spans of one lookup and load, by name, inside a span of the caller's."""
    EXPORTER.clear()
    with trace.get_tracer("engine").start_as_current_span("request"):
        result, _ = load(client, client.lookup(keys), hedge=hedge)
    assert result.blocks == len(keys)
    found: dict[str, list[ReadableSpan]] = {}
    for span in EXPORTER.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    (request,) = found.pop("request")
    return found, request


def inside(part: ReadableSpan, whole: ReadableSpan) -> bool:
    assert part.parent is not None and part.start_time and part.end_time and whole.start_time and whole.end_time
    slack = 1_000_000  # the two clocks are read one after the other
    within = whole.start_time - slack <= part.start_time <= part.end_time <= whole.end_time + slack
    return within and part.parent.span_id == whole.context.span_id


def test_a_lookup_and_a_load_are_told_part_by_part(cluster: Cluster) -> None:
    with Client(cluster.map, layout=V41, config=NO_REUSE) as client:
        keys = chain(150, V41)
        store(client, keys)
        before = time.time_ns()
        found, request = spans_of(client, keys)
    counts = {name: len(spans) for name, spans in found.items()}
    counts.pop("kvstore.decode", None)  # on a busy machine a shard may be late
    assert counts.pop("kvstore.discover") >= 1 and counts.pop("kvstore.promise") >= 1
    assert counts == {"kvstore.lookup": 1, "kvstore.load": 1, "kvstore.read": 3, "kvstore.plane": 4}
    (lookup,), (loaded,) = found["kvstore.lookup"], found["kvstore.load"]
    assert inside(lookup, request) and inside(loaded, request) and before <= (lookup.start_time or 0)
    assert all(inside(part, lookup) for name in ("kvstore.discover", "kvstore.promise") for part in found[name])
    assert all(inside(part, loaded) for name in ("kvstore.read", "kvstore.plane") for part in found[name])
    assert lookup.attributes and lookup.attributes["kvstore.hit_tokens"] == 150 * 128
    assert loaded.attributes and loaded.attributes["kvstore.blocks"] == 150 and loaded.attributes["kvstore.outcome"] == "complete"
    assert sorted(int(span.attributes["kvstore.blocks"]) for span in found["kvstore.read"] if span.attributes) == [22, 64, 64]


def test_what_was_rebuilt_shows_in_the_extent_it_belongs_to(cluster: Cluster) -> None:
    keys = chain(100, V41)
    with Client(cluster.map, layout=V41, config=NO_REUSE) as client:
        store(client, keys)
        until_whole(client, keys)
    for node in (3, 7):
        cluster.kill(node)
    try:
        with Client(cluster.map, layout=V41, config=NO_REUSE) as client:
            found, _ = spans_of(client, keys)
    finally:
        for node in (3, 7):
            cluster.restart(node)
    reads = {read.context.span_id: read for read in found["kvstore.read"]}
    assert found["kvstore.decode"], "no extent can do without both"
    for decode in found["kvstore.decode"]:
        assert decode.parent is not None and inside(decode, reads[decode.parent.span_id])


def test_planes_are_one_load_also_when_left_early(cluster: Cluster, tmp_path: Path) -> None:
    with Client(cluster.map, layout=V41) as client:
        keys = chain(20, V41)
        store(client, keys)
        ticket = client.lookup(keys)
        EXPORTER.clear()
        place = np.zeros((20, V41.block_bytes), np.uint8)
        iterator = client.planes(ticket, place)
        next(iterator)
        iterator.close()
    (loaded,) = [span for span in EXPORTER.get_finished_spans() if span.name == "kvstore.load"]
    assert loaded.attributes and loaded.attributes["kvstore.outcome"] in ("cancelled", "complete")
