"""What hits are worth: only from rates and prices that a person gives (kvstore/plan/prices.py). They stay apart from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.plan.prices import MONTH_SECONDS, Prices


def value_of(prices: Prices, hit_tokens: int | None, seconds: float | None, raw_bytes: int | None, nodes: int | None) -> dict[str, Any]:
    """Computed from measured hits and space and assumed prices, for the time of the log; null where a part is not known."""
    rate = prices.prefill_tokens_per_second
    gpu_hours = hit_tokens / rate / 3600 if rate and hit_tokens is not None else None
    worth = _times(gpu_hours, prices.gpu_hour)
    disks, hosts = _times(prices.tb_month, raw_bytes and raw_bytes / 1e12), _times(prices.node_month, nodes)
    known = (prices.tb_month is None or disks is not None) and (prices.node_month is None or hosts is not None)
    month = (disks or 0) + (hosts or 0) if known and (disks, hosts) != (None, None) else None
    cost = _times(month, seconds and seconds / MONTH_SECONDS)
    return {
        "gpu_hours_not_recomputed": gpu_hours,
        "worth": worth,
        "cost": cost,
        "net": None if worth is None or cost is None else worth - cost,
        "hits_sold_as_cached": _times(hit_tokens, prices.cached_million_tokens and prices.cached_million_tokens / 1e6),
        "hits_sold_as_uncached": _times(hit_tokens, prices.uncached_million_tokens and prices.uncached_million_tokens / 1e6),
    }


def value_facts(value: Mapping[str, Any], hit_tokens: str, prices: Prices) -> list[tuple[str, str]]:
    """Lines for people."""
    found = []
    if value["gpu_hours_not_recomputed"] is not None:
        rate = f"{prices.prefill_tokens_per_second:,.0f} tokens/s (your figure)"
        found.append(
            ("benefit", f"{hit_tokens} prompt tokens not recomputed = {value['gpu_hours_not_recomputed']:,.1f} GPU-hours at {rate}")
        )
    amounts = [f"{name} {value[name]:{'+' if name == 'net' else ''},.2f}" for name in ("worth", "cost", "net") if value[name] is not None]
    if amounts:
        found.append(("money", f"{', '.join(amounts)} (your prices; kvstore knows none)"))
    sold = [
        f"as {name} {value[f'hits_sold_as_{name}']:,.2f}" for name in ("cached", "uncached") if value[f"hits_sold_as_{name}"] is not None
    ]
    if sold:
        found.append(("hits sold", f"{', '.join(sold)} (your prices)"))
    return found


def _times(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other
