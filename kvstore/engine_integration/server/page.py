"""The chat page: one file, which asks this server alone."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from kvstore.live.web import policy_of


@cache
def page() -> tuple[bytes, str]:
    """The HTML and the policy that goes with it."""
    body = files("kvstore.engine_integration.server").joinpath("page.html").read_bytes()
    return body, policy_of(body)
