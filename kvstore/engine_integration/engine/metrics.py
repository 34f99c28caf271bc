"""What an engine counts of its work: the ENGINE table of kvstore/metrics.py. What its requests got is counted by its server."""

from __future__ import annotations

from kvstore.engine_integration.engine.engine import Engine
from kvstore.metrics import HANDOFF_OUTCOMES, Values


def read_engine(engine: Engine, values: Values) -> None:
    stats = engine.stats()
    for state in ("waiting", "running"):
        values.set("kvstore_engine_open_requests", stats[state], state)
    values.set("kvstore_engine_pages", stats["pages_free"], "free")
    values.set("kvstore_engine_pages", stats["pages"] - stats["pages_free"], "used")
    for phase in ("prefill", "decode"):
        values.set("kvstore_engine_computed_tokens_total", stats.get(f"{phase}_tokens", 0), phase)
    values.set("kvstore_engine_preemptions_total", stats.get("preemptions", 0))
    accepted = stats.get("accepted_tokens", 0)
    values.set("kvstore_engine_guessed_tokens_total", accepted, "accepted")
    values.set("kvstore_engine_guessed_tokens_total", stats.get("guessed_tokens", 0) - accepted, "rejected")
    for outcome in HANDOFF_OUTCOMES:
        values.set("kvstore_engine_handoffs_total", stats.get(f"handoff_{outcome}", 0), outcome)
    for when in ("early", "late"):
        values.set("kvstore_engine_handoff_bytes_total", stats.get(f"handoff_{when}_bytes", 0), when)
    for kind, names in (
        ("lookup", ("lookup_errors",)),
        ("load", ("load_errors", "loads_short")),
        ("window", ("window_errors", "windows_gone")),
        ("store", ("store_errors", "store_failures")),
    ):
        values.set("kvstore_engine_cache_faults_total", sum(stats.get(name, 0) for name in names), kind)
