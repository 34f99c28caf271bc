"""What hits are worth: only from rates and prices that a person gives. They stay apart from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.tomlfile import TomlFile

DAYS_OF_A_MONTH = 365.25 / 12


@dataclass(frozen=True)
class Prices:
    """All of them a person's; None: not given."""

    currency: str = "$"
    prefill_tokens_per_second: float | None = None
    gpu_hour: float | None = None
    tb_month: float | None = None
    raw_tb: float | None = None
    uncached_million_tokens: float | None = None
    cached_million_tokens: float | None = None

    @classmethod
    def load(cls, path: Path) -> Prices:
        """Raises ConfigError with file and line."""
        top = TomlFile.load(path).table()
        names = [name for name in cls.__dataclass_fields__ if name != "currency"]
        currency = top.text("currency", "$", pattern=r"[^\x00-\x1f\x7f]{1,8}", form="up to 8 characters")
        found = cls(currency, **{name: top.parsed(name, _price, None) for name in names})
        top.done()
        return found

    @property
    def given(self) -> bool:
        return any(value is not None for name, value in asdict(self).items() if name != "currency")

    def data(self) -> dict[str, Any]:
        return asdict(self)


def rate_of(text: str) -> float:
    """Of --prefill-rate. Raises ConfigError."""
    try:
        return _price(float(text))
    except ValueError:
        raise ConfigError("E131", f'--prefill-rate "{text}"', "is no number", "write tokens a second of one GPU, as 8000") from None


def value_of(prices: Prices, hit_tokens: int | None, seconds: float | None, raw_bytes: int | None) -> dict[str, Any]:
    """Computed from measured hits and assumed prices; null where either is missing."""
    raw_tb = raw_bytes / 1e12 if raw_bytes else prices.raw_tb
    gpu_hours = _over(_times(hit_tokens, 1 / 3600), prices.prefill_tokens_per_second)
    worth = _times(gpu_hours, prices.gpu_hour)
    cost = _times(_times(raw_tb, prices.tb_month), None if seconds is None else seconds / 86400 / DAYS_OF_A_MONTH)
    return {
        "gpu_hours_not_recomputed": gpu_hours,
        "raw_tb": raw_tb,
        "worth": worth,
        "cost": cost,
        "net": None if worth is None or cost is None else worth - cost,
        "sold_as_cached": _times(hit_tokens, _over(prices.cached_million_tokens, 1e6)),
        "sold_as_uncached": _times(hit_tokens, _over(prices.uncached_million_tokens, 1e6)),
        "currency": prices.currency,
    }


def value_facts(value: Mapping[str, Any], hit_tokens: str, prices: Prices) -> list[tuple[str, str]]:
    """Lines for people."""
    unit = value["currency"]
    found = []
    if value["gpu_hours_not_recomputed"] is not None:
        rate = f"{prices.prefill_tokens_per_second:,.0f} tokens/s (your figure)"
        found.append(
            ("benefit", f"{hit_tokens} prompt tokens not recomputed = {value['gpu_hours_not_recomputed']:,.1f} GPU-hours at {rate}")
        )
    amounts = [
        f"{name} {value[name]:+,.2f} {unit}" if name == "net" else f"{name} {value[name]:,.2f} {unit}"
        for name in ("worth", "cost", "net")
        if value[name] is not None
    ]
    if amounts:
        found.append(("money", f"{', '.join(amounts)} (your prices; kvstore knows none)"))
    if value["sold_as_cached"] is not None:
        also = "" if value["sold_as_uncached"] is None else f"; as uncached {value['sold_as_uncached']:,.2f} {unit}"
        found.append(("sold", f"the hits at the cached price {value['sold_as_cached']:,.2f} {unit}{also} (your prices)"))
    return found


def _price(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise ConfigError("E131", f'"{value}" is no price', fix="write a number above 0")
    return float(value)


def _times(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other


def _over(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other
