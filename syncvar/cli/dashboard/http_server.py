"""The HTTP server of the dashboard: who may ask, what it answers, and how much it bears.

A connection without the token gets 403, and 5 s in all. When there are too many connections, the
oldest of those goes. A reader with the token that takes nothing for 10 s loses its connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import importlib.resources
import ipaddress
import json
import os
import secrets
import select
import socket
import socketserver
import stat
import sys
import threading
import time
import urllib.parse
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from syncvar.core.output_files import is_record

if TYPE_CHECKING:
    from syncvar.cli.dashboard.job_poller import JobPoller

CONNECTIONS_MAX = 64
STREAMS_MAX = 20  # of the connections, so that others find room

_STRANGER_S = 5.0  # for a connection that has not shown the token
_TRUSTED_S = 20.0  # for one that has, for each request
_WRITE_S = 10.0  # for a reader to take what it gets
_KEEPALIVE_S = 3.0  # without news, a stream gets a comment
_LAST_EVENT_S = 2.0  # for streams to send the end of the job
_TICK_S, _PAUSE_S = 0.2, 0.01
_BODY_MAX = 1024
_RECORD_NBYTES_MAX = 4 << 20
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_NO_PACKAGE = (
    'metrics need the package prometheus-client: pip install "syncvar[watch]", and start the '
    "dashboard again\n"
)


def serve(listener: socket.socket, access: AccessRules, poller: JobPoller, end: int) -> None:
    """Answer requests until `end` is readable: the job has then ended."""
    server = DashboardServer(listener, access, poller)
    thread = threading.Thread(target=server.serve_forever, args=(_TICK_S,), daemon=True)
    thread.start()
    poller.start()
    try:
        select.select([end], [], [])
        poller.end()
        server.await_streams(_LAST_EVENT_S)
    finally:
        server.shutdown()
        server.server_close()


class AccessRules:
    """Decides about a request by its headers.

    Args:
        token: The secret of the URL.
        listener: The socket of the server.
        host: The host name or address as the user wrote it.
    """

    def __init__(self, token: str, listener: socket.socket, host: str) -> None:
        self._token = token
        self._is_loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        names = (host.lower(), socket.gethostname().lower())
        self._names = {"localhost", *(() if self._is_loopback else names)}
        # Cookies do not know ports: each dashboard of a host has a name of its own.
        name = hashlib.sha256(token.encode()).hexdigest()[:8]
        self._cookie = f"syncvar_{name}"

    def set_cookie(self) -> str:
        """Return the header that hands the token to the browser."""
        return f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"

    def is_known_host(self, host: str) -> bool:
        """Return whether a Host header names this server, and not a name that others control.

        A page of another site can give its own name our address (DNS rebinding). It cannot do so
        with a number. Behind a tunnel the port differs.
        """
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
            with contextlib.suppress(ValueError):
                return ipaddress.ip_address(name).is_loopback or not self._is_loopback
        except ValueError:
            return False
        return name in self._names

    def is_token(self, text: str) -> bool:
        """Compare a token in a time that does not depend on it."""
        return secrets.compare_digest(text.encode("utf-8", "replace"), self._token.encode())

    def has_token(self, headers: Any) -> bool:
        """Return whether a request has the token in a header."""
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(bearer.strip()):
            return True
        pairs = (item.strip().partition("=") for item in headers.get("Cookie", "").split(";"))
        return any(name == self._cookie and self.is_token(value) for name, _, value in pairs)

    @staticmethod
    def is_own_page(headers: Any) -> bool:
        """Return whether a request comes from our page, or from no page at all."""
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site", "same-origin")
        if origin is None:
            return headers.get("Authorization") is not None
        scheme, _, host = origin.partition("://")
        is_page = scheme in {"http", "https"} and host == headers.get("Host")
        return is_page and site == "same-origin"


class DashboardServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Accepts connections, and closes those that are too many or too slow."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, access: AccessRules, poller: JobPoller) -> None:
        bound = listener.getsockname()
        super().__init__(bound[:2], RequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.socket.setblocking(False)  # noqa: FBT003  (a connection may be gone before `accept`)
        self.server_name, self.server_port = bound[:2]
        self.poller = poller
        self.access = access
        self._streams = 0
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}  # oldest connection first
        self._trusted: set[socket.socket] = set()

    def trust(self, connection: socket.socket, limit_s: float) -> None:
        """Give a connection that has shown the token more time."""
        with self._lock:
            if connection in self._deadlines:
                self._trusted.add(connection)
                self._deadlines[connection] = time.monotonic() + limit_s

    def begin_stream(self) -> bool:
        """Count a stream of events; return False if there are too many."""
        with self._lock:
            is_free = self._streams < STREAMS_MAX
            self._streams += is_free
        return is_free

    def end_stream(self) -> None:
        """Count a stream no more."""
        with self._lock:
            self._streams -= 1

    def await_streams(self, limit_s: float) -> None:
        """Wait until all streams have ended, for a limited time."""
        until = time.monotonic() + limit_s
        while self._streams and time.monotonic() < until:
            time.sleep(_PAUSE_S)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, or close it."""
        with self._lock:
            if len(self._deadlines) >= CONNECTIONS_MAX:
                oldest = next((one for one in self._deadlines if one not in self._trusted), None)
                if oldest is None:
                    self._close(request)
                    request.close()
                    return
                self._close(oldest)
            self._deadlines[request] = time.monotonic() + _STRANGER_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and forget it."""
        with self._lock:
            self._forget(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close the listener and all connections."""
        super().server_close()
        with self._lock:
            for one in list(self._deadlines):
                self._close(one)

    def service_actions(self) -> None:
        """Close the connections that are overdue; called in each tick."""
        now = time.monotonic()
        with self._lock:
            for one in [one for one, until in self._deadlines.items() if now > until]:
                self._close(one)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of ours; those of connections are ordinary."""
        error = sys.exception()
        if not isinstance(error, OSError):
            sys.stderr.write(f"syncvar: dashboard: {type(error).__name__}: {error}\n")

    def _close(self, connection: socket.socket) -> None:
        # Its thread then ends, and closes the descriptor.
        self._forget(connection)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, connection: socket.socket) -> None:
        self._deadlines.pop(connection, None)
        self._trusted.discard(connection)


class RequestHandler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = _WRITE_S
    server: DashboardServer

    def do_GET(self) -> None:
        """Answer a question."""
        path, _, query = self.path.partition("?")
        if not self._is_welcome(path, query):
            return
        poller = self.server.poller
        if path in _FILES:
            self._file(*_FILES[path])
        elif path == "/health":
            self._health()
        elif path == "/status.json":
            poller.look()
            self._answer(HTTPStatus.OK, poller.snapshot.as_json(), _JSON)
        elif path == "/events":
            self._stream()
        elif path == "/metrics":
            poller.look()
            self._metrics()
        elif path == "/records":
            self._answer(HTTPStatus.OK, json.dumps(_records(self._folder())).encode(), _JSON)
        elif path.startswith("/records/"):
            self._record(urllib.parse.unquote(path.removeprefix("/records/")))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def do_POST(self) -> None:
        """Answer the only question that costs the ranks something: for stacks."""
        path, _, query = self.path.partition("?")
        if not self._is_welcome(path, query):
            return
        if not self.server.access.is_own_page(self.headers):
            self._refuse(HTTPStatus.FORBIDDEN, "the request comes from another site")
            return
        rank = path.removeprefix("/stacks/")
        if rank == path or not (rank.isascii() and rank.isdigit() and len(rank) < 10):
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        text = self.server.poller.stacks(int(rank))
        if text is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"the launcher has no stacks of rank {rank}")
            return
        self._answer(HTTPStatus.OK, text.encode("utf-8", "replace"))

    # -- who may ask -------------------------------------------------------------------------------

    def _is_welcome(self, path: str, query: str) -> bool:
        """Return whether to answer; else the refusal has been sent."""
        access = self.server.access
        if not self._has_plain_body():
            self._refuse(HTTPStatus.BAD_REQUEST, "the request has a body")
            return False
        if not access.is_known_host(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "this name is not that of the dashboard")
            return False
        token = urllib.parse.parse_qs(query).get("token", [""])[0]
        if access.has_token(self.headers) or (path == "/" and access.is_token(token)):
            self.server.trust(self.connection, _TRUSTED_S)
            return True
        self.close_connection = True
        if path == "/health" and self.command == "GET":
            return True
        self._refuse(HTTPStatus.FORBIDDEN, "the token is missing or wrong: use the printed URL")
        return False

    def _has_plain_body(self) -> bool:
        """Read the body, which nothing needs; return whether it is short and of known length."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            return False
        if len(length) > 9 or int(length) > _BODY_MAX:
            return False
        self.rfile.read(int(length))
        return True

    # -- answers -----------------------------------------------------------------------------------

    def _file(self, name: str, content_type: str) -> None:
        data = importlib.resources.files(__package__).joinpath(name).read_bytes()
        cookie = {"Set-Cookie": self.server.access.set_cookie()} if name == "page.html" else {}
        self._answer(HTTPStatus.OK, data, content_type, cookie)

    def _health(self) -> None:
        is_well = self.server.poller.snapshot.state == "answers"
        code = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(code, b"ok\n" if is_well else b"not ok\n")

    def _metrics(self) -> None:
        try:
            from syncvar.cli.dashboard.prometheus_metrics import CONTENT_TYPE, metrics_text
        except ModuleNotFoundError:
            self._answer(HTTPStatus.NOT_IMPLEMENTED, _NO_PACKAGE.encode())
            return
        self._answer(HTTPStatus.OK, metrics_text(self.server.poller.snapshot), CONTENT_TYPE)

    def _stream(self) -> None:
        """Send events until the reader goes, is too slow, or the job ends."""
        if not self.server.begin_stream():
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{STREAMS_MAX} pages are open already")
            return
        self.close_connection = True
        try:
            self._begin(HTTPStatus.OK, "text/event-stream", {"Connection": "close"})
            snapshot, events = self.server.poller.beginning()
            while True:
                self.server.trust(self.connection, _WRITE_S + _KEEPALIVE_S + 1.0)
                self.wfile.write(events or b":\n\n")
                if snapshot.state == "ended":
                    return
                number = snapshot.number
                snapshot = self.server.poller.wait(number, _KEEPALIVE_S)
                events = snapshot.events if snapshot.number > number else b""
                if snapshot.number > number + 1:  # this reader has missed some
                    snapshot, events = self.server.poller.beginning()
        finally:
            self.server.end_stream()

    def _folder(self) -> str:
        job = self.server.poller.snapshot.status.get("job")
        folder = job.get("records") if isinstance(job, dict) else ""
        return folder if isinstance(folder, str) else ""

    def _record(self, name: str) -> None:
        folder = self._folder()
        if not folder or not is_record(name):  # such a name has no slash
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such record")
            return
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(os.path.join(folder, name), flags), "rb") as file:
                is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                data = file.read(_RECORD_NBYTES_MAX + 1) if is_file else b""
        except OSError as error:
            self._refuse(HTTPStatus.NOT_FOUND, f"the record cannot be read: {error.strerror}")
            return
        if len(data) > _RECORD_NBYTES_MAX:
            self._refuse(HTTPStatus(413), "the record is too long for this page")
            return
        self._answer(HTTPStatus.OK, data)

    def _refuse(self, code: HTTPStatus, text: str) -> None:
        self.close_connection = True
        self._answer(code, f"{text}\n".encode())

    def _answer(
        self,
        code: HTTPStatus,
        data: bytes,
        content_type: str = _TEXT,
        headers: dict[str, str] | None = None,
    ) -> None:
        last = {"Connection": "close"} if self.close_connection else {}
        self._begin(
            code, content_type, {**(headers or {}), **last, "Content-Length": str(len(data))}
        )
        self.wfile.write(data)

    def _begin(self, code: HTTPStatus, content_type: str, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**_HEADERS, "Content-Type": content_type, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    # -- what http.server calls --------------------------------------------------------------------

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is no HTTP, or has another method, without repeating its text."""
        is_method = code == HTTPStatus.NOT_IMPLEMENTED
        self.request_version = "HTTP/1.1"
        self._refuse(
            HTTPStatus.METHOD_NOT_ALLOWED if is_method else HTTPStatus(code),
            "only GET, and POST for stacks" if is_method else HTTPStatus(code).phrase,
        )

    def version_string(self) -> str:
        """Return the Server header, without versions."""
        return "syncvar"

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  (its name there)
        """Log nothing: the terminal belongs to the job."""


def _records(folder: str) -> list[dict[str, Any]]:
    """Return name, length and time of the flight records in a folder, newest first."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder or os.devnull):
            if is_record(entry.name) and entry.is_file(follow_symlinks=False):
                about = entry.stat(follow_symlinks=False)
                found.append(
                    {"name": entry.name, "nbytes": about.st_size, "time_s": about.st_mtime}
                )
    return sorted(found, key=lambda one: -one["time_s"])
