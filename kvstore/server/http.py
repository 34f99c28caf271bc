"""The small HTTP face of a daemon: /livez, /readyz, /healthz and /metrics. Read-only, no secrets, one port.

/livez says that this process runs (never looks at peers); /readyz that it may take traffic, with reasons under ?verbose.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

REQUEST_SECONDS: Final = 5.0  # a client that does not finish its request line
REQUESTS_MAX: Final = 16
ACCEPT_PAUSE_SECONDS: Final = 0.25
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class HttpServer:
    """Listens from construction on; `ready` gives check -> reason it is not passed ("" where it is)."""

    def __init__(self, host: str, port: int, ready: Callable[[], Mapping[str, str]], metrics: Callable[[], bytes]) -> None:
        """Raises OSError where the port cannot be had."""
        self._server = _Server((host, port), ready, metrics)
        self._host = host
        self.port = int(self._server.server_address[1])
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            self._server.handle_request()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            socket.create_connection((self._host, self.port), REQUEST_SECONDS).close()  # wakes the accept
        self._thread.join(REQUEST_SECONDS)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], ready: Callable[[], Mapping[str, str]], metrics: Callable[[], bytes]) -> None:
        self.ready = ready
        self.metrics = metrics
        self.slots = threading.BoundedSemaphore(REQUESTS_MAX)
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # out of descriptors: whoever waits goes on waiting, and the next try would fail at once
            time.sleep(ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started
            self.slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS
    server_version = "kvstore"
    sys_version = ""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/metrics":
            self._answer(HTTPStatus.OK, self.server.metrics(), METRICS_TYPE)
        elif path == "/livez":
            self._answer(HTTPStatus.OK, b"ok\n")
        elif path in ("/readyz", "/healthz"):
            checks = self.server.ready()
            failed = {name: why for name, why in checks.items() if why}
            lines = [f"{name} {why or 'ok'}" for name, why in (checks if "verbose" in query else failed).items()]
            status = HTTPStatus.SERVICE_UNAVAILABLE if failed else HTTPStatus.OK
            self._answer(status, ("\n".join(lines) or "ok").encode() + b"\n")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"try /metrics, /readyz?verbose or /livez\n")

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes every few seconds would bury the log."""
