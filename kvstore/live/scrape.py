"""Reads the /metrics of client processes: Prometheus text over HTTP, nothing but what it needs of it."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from kvstore.errors import UsageError
from kvstore.live.counts import joined

ASKED_AT_ONCE: Final = 32
BODY_BYTES_MAX: Final = 16 << 20


@dataclass(frozen=True)
class ClientReport:
    """What one client process answered; `error` says why it did not."""

    url: str
    error: str = ""
    values: dict[str, float] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        return not self.error


def client_url(text: str) -> str:
    """The address of a /metrics page, from what a person writes: http://host:port, with or without the path. Raises UsageError E140."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or port is None or not re.fullmatch(r"[!-~]*", text):
        raise UsageError("E140", f'--client "{text}"', "is not the address of a metrics page", "write http://HOST:PORT")
    return f"http://{parts.netloc.rpartition('@')[2]}{parts.path if parts.path not in ('', '/') else '/metrics'}"


def ask_clients(urls: Sequence[str], timeout_seconds: float) -> list[ClientReport]:
    """One report a page, in order; all are asked at once."""
    if not urls:
        return []
    with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(urls)), "kvstore-scrape") as pool:
        return list(pool.map(lambda url: _ask(url, timeout_seconds), urls))


def _ask(url: str, timeout_seconds: float) -> ClientReport:
    parts = urlsplit(url)
    deadline = time.monotonic() + timeout_seconds
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_seconds)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        body = bytearray()
        while chunk := answer.read1(1 << 16):
            body += chunk
            if len(body) > BODY_BYTES_MAX or time.monotonic() > deadline:
                return ClientReport(url, "too long an answer" if len(body) > BODY_BYTES_MAX else f"no answer in {timeout_seconds:g} s")
        if answer.status != 200:
            return ClientReport(url, f"HTTP {answer.status}")
        return ClientReport(url, values=parse(body.decode()))
    except TimeoutError:
        return ClientReport(url, f"no answer in {timeout_seconds:g} s")
    except ConnectionRefusedError:
        return ClientReport(url, "connection refused")
    except (OSError, http.client.HTTPException) as error:
        return ClientReport(url, (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower())
    except (ValueError, KeyError, IndexError):  # whatever the parser makes of bytes that are no metrics
        return ClientReport(url, "not a metrics page")
    finally:
        connection.close()


def parse(text: str) -> dict[str, float]:
    """Our samples of a page as `name{label="value",...}` -> number. Raises ValueError where it is no such page, or none of ours."""
    from prometheus_client.parser import text_string_to_metric_families  # 50 ms to import

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("kvstore_"):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found[joined(sample.name, sample.labels)] = float(sample.value)
    if not found:
        raise ValueError("no series of kvstore")
    return found
