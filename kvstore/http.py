"""The small HTTP face of a process: pages on one port, read-only but for a lookup service's questions. A daemon's are /livez, /readyz,
/healthz and /metrics; a client's (`serve_metrics`) and the dashboard's are served by the same class.

/livez says that this process runs (never looks at peers); /readyz that it may take traffic, with reasons under ?verbose.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

REQUEST_SECONDS: Final = 5.0  # for a whole request to come; and again for its answer to be taken
REQUESTS_MAX: Final = 16
DISCARD_BYTES: Final = 64 << 10
ACCEPT_PAUSE_SECONDS: Final = 0.25
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    query: str
    host: str  # the Host header, as it came; "" without one
    method: str = "GET"  # or POST, where the server takes bodies
    content_type: str = ""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Page:
    """What a request is answered with."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Pages = Callable[[Request], Page]


class ByteBudget:
    """Bytes that may be in memory at once. Safe to share between threads."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = self.left_bytes = bytes_max
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        with self._lock:
            if count > self.left_bytes:
                return False
            self.left_bytes -= count
            return True

    def give(self, count: int) -> None:
        with self._lock:
            self.left_bytes += count


def daemon_pages(ready: Callable[[], Mapping[str, str]], metrics: Callable[[], bytes | None]) -> Pages:
    """`ready` gives check -> reason it is not passed ("" where it is). `metrics` gives None while there are none to tell."""

    def answer(request: Request) -> Page:
        if request.path == "/metrics":
            text = metrics()
            if text is None:  # an empty page would be a scrape that went well, of a process without a single series
                return Page(b"no metrics: starting, or ending\n", status=HTTPStatus.SERVICE_UNAVAILABLE, headers={"Retry-After": "1"})
            return Page(text, METRICS_TYPE)
        if request.path == "/livez":
            return Page(b"ok\n")
        if request.path in ("/readyz", "/healthz"):
            checks = ready()
            failed = {name: why for name, why in checks.items() if why}
            lines = [f"{name} {why or 'ok'}" for name, why in (checks if "verbose" in request.query else failed).items()]
            status = HTTPStatus.SERVICE_UNAVAILABLE if failed else HTTPStatus.OK
            return Page(("\n".join(lines) or "ok").encode() + b"\n", status=status)
        return Page(b"try /metrics, /readyz?verbose or /livez\n", status=HTTPStatus.NOT_FOUND)

    return answer


class HttpServer:
    """Answers GET and HEAD from construction on; `pages` is called on many threads."""

    def __init__(
        self,
        host: str,
        port: int,
        pages: Pages,
        body_bytes_max: int = 0,
        requests_max: int | None = None,
        bodies: ByteBudget | None = None,
    ) -> None:
        """`body_bytes_max`: above 0, POST is answered, too, with bodies of at most so many bytes. `requests_max` (16) are answered at once,
        more are told 503; likewise whose body does not fit in `bodies`, which all that are being answered share. Raises OSError where the
        port cannot be had."""
        self._server = _Server((host, port), pages, body_bytes_max, requests_max or REQUESTS_MAX, bodies)
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


_FULL: Final = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: 1\r\nContent-Length: 18\r\n\r\ntoo many requests\n"
)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128  # with the 5 of the library a burst of scrapes would wait a second for its connections

    def __init__(self, address: tuple[str, int], pages: Pages, body_bytes_max: int, requests_max: int, bodies: ByteBudget | None) -> None:
        self.pages, self.body_bytes_max = pages, body_bytes_max
        self.bodies = bodies or ByteBudget(requests_max * body_bytes_max)
        self.slots = threading.BoundedSemaphore(requests_max)
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # out of descriptors: whoever waits goes on waiting, and the next try would fail at once
            time.sleep(ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.acquire(blocking=False):
            with contextlib.suppress(OSError):  # the client may be gone; nothing is waited for
                request.setblocking(False)
                request.send(_FULL)
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


class _Until(io.RawIOBase):
    """Reads a socket until a time: a client that sends a byte now and then would hold a slot for hours under a limit for each read."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS
    server_version = "kvstore"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Until(self.connection, time.monotonic() + REQUEST_SECONDS))

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self._send(self.server.pages(Request(path, query, self.headers.get("Host", ""))))

    def do_POST(self) -> None:
        if not self.server.body_bytes_max:
            self.send_error(HTTPStatus.NOT_IMPLEMENTED, "Unsupported method ('POST')")  # as for any other method
            return
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            self._send(Page(b"say Content-Length\n", status=HTTPStatus.LENGTH_REQUIRED))
            return
        if len(length) > 18 or int(length) > self.server.body_bytes_max:
            self._send(Page(f"at most {self.server.body_bytes_max} bytes\n".encode(), status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE))
            return
        if not self.server.bodies.take(int(length)):
            left = int(length)  # is read all the same: an answer to somebody who still sends is lost
            while left > 0 and (part := self.rfile.read(min(left, DISCARD_BYTES))):
                left -= len(part)
            busy = Page(b"too many bytes are being answered\n", status=HTTPStatus.SERVICE_UNAVAILABLE, headers={"Retry-After": "1"})
            self._send(busy)
            return
        try:
            self._send_of(self.rfile.read(int(length)), int(length))
        finally:
            self.server.bodies.give(int(length))

    def _send_of(self, body: bytes, length: int) -> None:
        path, _, query = self.path.partition("?")
        if len(body) == length:
            request = Request(path, query, self.headers.get("Host", ""), "POST", self.headers.get("Content-Type", ""), body)
            self._send(self.server.pages(request))

    def _send(self, page: Page) -> None:
        self.connection.settimeout(REQUEST_SECONDS)
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        for name, value in page.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Probes every few seconds would bury the log."""
