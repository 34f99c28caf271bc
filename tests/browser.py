"""A real browser for tests of pages: Debian's Chromium, headless, with every request and complaint of the page kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest

CHROMIUM = Path("/usr/bin/chromium")
WAIT_MS = 30_000
# Every text on the page against what is painted behind it (WCAG 2: 4.5 to 1).
CONTRAST = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = node => {
    for (; node; node = node.parentElement) { const c = parse(getComputedStyle(node).backgroundColor); if ((c[3] ?? 1) > 0) return c; }
    return [255, 255, 255];
  };
  const weak = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.getClientRects().length || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
    const style = getComputedStyle(node), front = parse(node instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(front), light(behind(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) weak.push(`${walk.currentNode.data.trim().slice(0, 30)}: ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  return weak;
}"""


@contextmanager
def browser() -> Iterator[object]:
    if not CHROMIUM.exists():
        pytest.skip("needs Debian's chromium: scripts/setup installs it")
    from playwright.sync_api import sync_playwright

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, "--disable-background-networking"])
        try:
            yield running
        finally:
            running.close()


class Tab:
    """One page. `hosts` are all that it asked; `complaints` what its console and its scripts said."""

    def __init__(
        self, running: object, url: str, *, width: int = 1280, height: int = 900, scheme: Literal["light", "dark"] = "light"
    ) -> None:
        self.context = running.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[attr-defined]  # playwright is imported late
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.hosts: set[str] = set()
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)
        self.page.wait_for_selector("#word")

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))
