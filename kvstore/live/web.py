"""The dashboard's pages: one HTML file and three small JSON answers. Read-only; no other host is ever asked, by us or by the page.

    /                    the page
    /api/state           the newest frame and the events, in the envelope of --json
    /api/history?since=  the series since a Unix time: names -> columns, all as long as "unix_seconds"
    /api/node?id=        one node: its row, its series, what may be lost without its host

The page's own policy forbids scripts but the one it carries, by its hash, and every other source. On a loopback address requests must name
a loopback host, so that no page of another site can have this one read out by a name that it points here.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import re
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs

from kvstore.cli.output import rfc3339_now
from kvstore.http import Page, Request
from kvstore.live.collector import Collector
from kvstore.version import version

HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^:]*)(:\d+)?", re.IGNORECASE)


class Dashboard:
    """Answers requests from what a collector knows; safe on many threads."""

    def __init__(self, collector: Collector, host: str) -> None:
        self._collector = collector
        self._loopback = is_loopback(host)

    def __call__(self, request: Request) -> Page:
        if self._loopback and not is_loopback(named_host(request.host)):
            return _error(HTTPStatus.MISDIRECTED_REQUEST, f'"{request.host}" is not the name of this page; open it as http://127.0.0.1')
        asked = parse_qs(request.query)
        if request.path == "/":
            body, policy = page()
            return Page(body, "text/html; charset=utf-8", headers={**HEADERS, "Content-Security-Policy": policy})
        if request.path == "/api/state":
            return _json(self._state())
        if request.path == "/api/history":
            return self._history(asked.get("since", ["0"])[0])
        if request.path == "/api/node":
            return self._node(asked.get("id", [""])[0])
        if request.path == "/livez":
            return Page(b"ok\n")
        return _error(HTTPStatus.NOT_FOUND, "try / or /api/state")

    def _state(self) -> dict[str, Any]:
        collector = self._collector
        frame = collector.frame
        data = None
        if frame is not None:
            shown = {name: value for name, value in frame.items() if name != "health"}
            data = {
                **shown,
                "age_seconds": collector.age_seconds(),
                "poll_seconds": collector.interval_seconds,
                "fault": collector.fault or None,
                "events": collector.events(),
            }
        return {
            "schema": "kvstore.dashboard/1",
            "time": rfc3339_now(),
            "version": version(),
            "cluster": collector.map.cluster_id,
            "epoch": collector.map.epoch,
            "ok": frame is not None,
            "health": frame["health"] if frame is not None else [],
            "data": data,
            "error": None,
        }

    def _history(self, since: str) -> Page:
        try:
            after = float(since)
        except ValueError:
            return _error(HTTPStatus.BAD_REQUEST, "since is a Unix time")
        columns = self._collector.history()
        times = columns.get("unix_seconds", [])
        first = next((at for at, when in enumerate(times) if when > after), len(times))
        return _json({name: values[first:] for name, values in columns.items()})

    def _node(self, node_id: str) -> Page:
        frame = self._collector.frame
        row = next((row for row in frame["nodes"] if row["id"] == node_id), None) if frame else None
        if frame is None or row is None:
            return _error(HTTPStatus.NOT_FOUND, f'no node "{node_id}" in the map')
        there = [each["id"] for each in frame["nodes"] if each["host"] == row["host"]]
        rest = self._collector.losses(there)
        checks = [check for check in frame["health"] if check["subject"] == node_id]
        without = {"nodes": there, "readable": rest.readable, "hosts_losable": rest.hosts, "losses": str(rest)}
        return _json({"node": row, "health": checks, "without_host": without, "series": self._collector.node_history(node_id) or {}})


@cache
def page() -> tuple[bytes, str]:
    """The HTML and the policy that goes with it."""
    body = files("kvstore.live").joinpath("page.html").read_bytes()
    return body, policy_of(body)


def policy_of(body: bytes) -> str:
    """The Content-Security-Policy of a page that carries all it needs: its own scripts and styles, by their hashes, and nothing else."""
    script, style = (_digests(body, tag) for tag in (b"script", b"style"))
    policy = {
        "default-src": "'none'",
        "script-src": script,
        "style-src": style,
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in policy.items())


def _digests(body: bytes, tag: bytes) -> str:
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)


def named_host(header: str) -> str:
    """The host of a Host header, without its port; "" for what is none."""
    named = _HOST.fullmatch(header)
    return named[1] if named else ""


def is_loopback(host: str) -> bool:
    """A name or address that only this machine has."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _json(data: Any) -> Page:
    return Page(json.dumps(data, allow_nan=False).encode(), "application/json", headers=HEADERS)


def _error(status: HTTPStatus, text: str) -> Page:
    return Page(json.dumps({"error": text}).encode(), "application/json", status, HEADERS)
