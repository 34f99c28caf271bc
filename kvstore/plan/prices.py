"""Prices that the operator gives: kvstore knows none by itself, and what is not priced is not counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from kvstore.errors import UsageError
from kvstore.tomlfile import TomlFile, suggestion

PRICE_MAX = 1e12
MONTH_SECONDS = 30 * 86_400


@dataclass(frozen=True)
class Prices:
    """In any one currency. None: not given."""

    tb_month: float | None = None  # of raw disk
    node_month: float | None = None  # of a host, whatever its disk
    gpu_hour: float | None = None
    prefill_tokens_per_second: float | None = None  # of one GPU: turns tokens into GPU-hours
    cached_million_tokens: float | None = None  # what customers pay
    uncached_million_tokens: float | None = None

    @property
    def any(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))


@dataclass(frozen=True)
class Money:
    """A month. None where a price is missing."""

    storage_cost: float | None
    gpu_hours_saved: float | None
    gpu_saved: float | None
    revenue: float | None
    net: float | None  # what is saved and earned, less storage and (where tokens are sold) the GPU-hours still needed

    @classmethod
    def of(cls, prices: Prices, *, nodes: int, raw_bytes: float, input_tokens: float, hit_tokens: float) -> Money:
        cost = None
        if prices.tb_month is not None or prices.node_month is not None:
            cost = (prices.tb_month or 0) * raw_bytes / 1e12 + (prices.node_month or 0) * nodes
        rate = prices.prefill_tokens_per_second
        hours = hit_tokens / rate / 3600 if rate else None
        saved = hours * prices.gpu_hour if hours is not None and prices.gpu_hour is not None else None
        cached, uncached = prices.cached_million_tokens, prices.uncached_million_tokens
        revenue = None
        if cached is not None and uncached is not None:
            revenue = (hit_tokens * cached + (input_tokens - hit_tokens) * uncached) / 1e6
        net = None
        if cost is not None and revenue is not None and rate and prices.gpu_hour is not None:
            net = revenue - cost - (input_tokens - hit_tokens) / rate / 3600 * prices.gpu_hour
        elif cost is not None and saved is not None:
            net = saved - cost
        return cls(cost, hours, saved, revenue, net)


def read_prices(path: Path | None, given: Sequence[str] = ()) -> Prices:
    """A TOML file of the names above, then NAME=VALUE texts over it. Raises ConfigError and UsageError."""
    names = [field.name for field in fields(Prices)]
    values: dict[str, float | None] = dict.fromkeys(names)
    if path is not None:
        file = TomlFile.load(path)
        table = file.table()
        taken = {name: table.number(name, 0, PRICE_MAX, 0) for name in names}  # all of them: an unknown key is told with what is known
        values = {name: value if name in file.data else None for name, value in taken.items()}
        table.done()
    for text in given:
        name, equals, value = text.partition("=")
        if name not in names:
            raise UsageError("E101", f'--price "{name}"', "is not known", suggestion(name, names))
        try:
            values[name] = float(value)
        except ValueError:
            raise UsageError("E131", f'--price "{text}"', "no number" if equals else "no value", f"write {name}=2.50") from None
        if not 0 <= float(value) <= PRICE_MAX:
            raise UsageError("E131", f'--price "{text}"', "out of range", f"give 0 to {PRICE_MAX:g}")
    if values["prefill_tokens_per_second"] == 0:
        raise UsageError("E131", "prefill_tokens_per_second 0", "out of range", "give what one GPU prefills in a second")
    return Prices(**values)
