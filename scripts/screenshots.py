"""Takes the pictures of docs/images in Debian's Chromium: the dashboard of a real cluster under traffic, a node killed; and the chat page.

    .venv/bin/python scripts/screenshots.py [dashboard|chat] [DIRECTORY]

The traffic is prompts that come again, as chats do; it runs for half a minute before the first picture.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from kvstore.client import Client
from kvstore.client.metrics import serve_metrics
from kvstore.kernels import _native
from kvstore.keys import KeyChain, Namespace
from kvstore.layout import PRESETS
from kvstore.server.local import LocalCluster

IMAGES: Final = Path(__file__).resolve().parent.parent / "docs" / "images"
CHROMIUM: Final = Path("/usr/bin/chromium")
TRAFFIC_SECONDS: Final = 30.0
BYTES_MAX: Final = 200_000
# name, width, height, colours, part of the address, whole page
SHOTS: Final = (
    ("dashboard-light", 1280, 1000, "light", "", False),
    ("dashboard-dark", 1280, 1000, "dark", "", False),
    ("dashboard-node", 1280, 1000, "light", "#node=node-03", False),
    ("dashboard-phone", 390, 844, "dark", "", False),
)

CHAT_SHOTS: Final = (("chat-light", 1280, 960, "light"), ("chat-dark", 1280, 960, "dark"), ("chat-phone", 390, 844, "dark"))


def traffic(client: Client, stop: threading.Event) -> None:
    """Prompts that come again: popular ones often, each a little longer than the last time."""
    layout, dice = client.layout, random.Random(5)
    while not stop.wait(0.1):
        prompt = int(40 * dice.random() ** 2)
        chain = KeyChain(Namespace(weights=f"prompt-{prompt}", kv_dtype="picture", layout_digest=layout.digest()))
        keys = chain.extend(np.arange(dice.choice((16, 32, 48, 64)) * chain.block_tokens, dtype=np.uint32))
        retention_class = ("chat", "agent", "batch")[prompt % 3]
        ticket = client.lookup(keys, retention_class=retention_class)
        if ticket.hit_blocks:
            client.load(ticket, np.empty((ticket.hit_blocks, layout.block_bytes), np.uint8))
        if ticket.hit_blocks < len(keys):
            blocks = np.empty((len(keys) - ticket.hit_blocks, layout.block_bytes), np.uint8)
            _native.generate_blocks(keys[ticket.hit_blocks :], layout.block_bytes, blocks)
            client.store(keys, blocks, first_block=ticket.hit_blocks, retention_class=retention_class).result(30)


def take(url: str, directory: Path) -> None:
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        for name, width, height, scheme, part, whole in SHOTS:
            dark = scheme == "dark"
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
            page.goto(f"{url}/{part}")
            page.wait_for_selector("#panel[open] svg path" if part else "#plots svg path")
            page.wait_for_selector("#word:has-text('WARN')")
            save(page.screenshot(full_page=whole), directory / f"{name}.png")
            page.close()
        browser.close()


def save(shot: bytes, path: Path) -> None:
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}  {path.stat().st_size:,} bytes")
    if path.stat().st_size > BYTES_MAX:
        raise SystemExit(f"{path} is larger than {BYTES_MAX:,} bytes")


def take_chat(url: str, directory: Path) -> None:
    """Two turns on each size of screen: a long prompt, and a question after it."""
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        for name, width, height, scheme in CHAT_SHOTS:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light")
            page.goto(url)
            page.click("#long")
            page.wait_for_function("document.getElementById('ask').value.length > 5000")
            for turn, question in enumerate((None, "def resume(self, blocks):\n        "), 1):
                if question is not None:
                    page.fill("#ask", question)
                page.click("#send")
                page.wait_for_selector(f".turn:nth-of-type({turn + 1}) .facts", timeout=120_000)
            save(page.screenshot(), directory / f"{name}.png")
            page.close()
        browser.close()


def chat(directory: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvstore-pictures-") as place:
        words = ["engine", "serve", "--listen", "127.0.0.1:0", "--directory", place, "--json"]
        served = subprocess.Popen([sys.executable, "-m", "kvstore", *words], stdout=subprocess.PIPE, text=True)
        try:
            assert served.stdout is not None
            take_chat(json.loads(served.stdout.readline())["data"]["url"], directory)
        finally:
            served.terminate()
            served.communicate()


def main() -> None:
    words = sys.argv[1:]
    which = words.pop(0) if words and words[0] in ("dashboard", "chat") else ""
    directory = Path(words[0]) if words else IMAGES
    directory.mkdir(parents=True, exist_ok=True)
    if which != "chat":
        dashboard(directory)
    if which != "dashboard":
        chat(directory)


def dashboard(directory: Path) -> None:
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-pictures-") as place,
        LocalCluster(place, 12, capacity_bytes=256 << 20) as cluster,
        Client(cluster.map, layout=PRESETS["v41"]) as client,
        serve_metrics(client, 0) as port,
    ):
        words = ["--map", str(cluster.map_path), "--port", "0", "--interval", "1s", "--client", f"127.0.0.1:{port}"]
        shown = subprocess.Popen([sys.executable, "-m", "kvstore", "dashboard", *words], stdout=subprocess.PIPE, text=True)
        worker = threading.Thread(target=traffic, args=(client, stop))
        try:
            assert shown.stdout is not None
            url = shown.stdout.readline().strip()
            worker.start()
            stop.wait(TRAFFIC_SECONDS)
            cluster.kill(7)
            stop.wait(TRAFFIC_SECONDS / 3)
            take(url, directory)
        finally:
            stop.set()
            if worker.ident is not None:
                worker.join()
            shown.terminate()
            shown.communicate()


if __name__ == "__main__":
    main()
