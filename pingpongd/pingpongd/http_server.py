"""Metrics and health over HTTP, in threads of their own: they answer while the event loop is busy, or hangs.

It serves three short pages and asks nobody who they are. So it trusts nobody: a connection is closed after ten
seconds, however slowly it sends or reads, and where there are too many the oldest gives way to the newest, so that
clients that hang keep no probe out.
"""

from __future__ import annotations

import errno
import http.server
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import structlog

from pingpong_bus.errors import ConfigError

_log = structlog.get_logger()
_CONNECTION_SECONDS: Final = 10.0
_MOST_CONNECTIONS: Final = 32
_POLL_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = 0.1
_STOP_SECONDS: Final = 5.0
_LAST_PORT: Final = 65535


class Reply(msgspec.Struct, frozen=True):
    """A page."""

    status: HTTPStatus
    content_type: str
    body: bytes


Page = Callable[[str], Reply]
"""Makes a page for a request's Accept header; called in a thread, at the same time as others."""


class HttpServer:
    """Serves pages until it is stopped."""

    def __init__(self, listen: str, pages: Mapping[str, Page], *, connection_s: float = _CONNECTION_SECONDS) -> None:
        """Bind the address; nothing is answered yet.

        Args:
            listen: "HOST:PORT"; an IPv6 address in brackets; port 0 takes a free one.
            pages: by path.
            connection_s: how long a connection may last.

        Raises:
            ConfigError: there is no such address here, or another has the port.
        """
        try:
            self._server = _Server(*_address(listen), pages, connection_s)
        except OSError as error:
            raise _cannot_listen(listen, error) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_SECONDS}, name="http", daemon=True
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens at."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Close every connection and give the port back; waits for half a second at most."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(_STOP_SECONDS)
        self._server.server_close()
        self._server.close_all()


def check_address(listen: str) -> None:
    """Look whether this machine has the address. The port is left alone: the daemon that has it may be running.

    Raises:
        ConfigError: it has not.
    """
    try:
        family, address = _address(listen)
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind((address[0], 0, *address[2:]))
    except OSError as error:
        raise _cannot_listen(listen, error) from None


def _address(listen: str) -> tuple[int, Any]:
    """Family and address of "HOST:PORT"."""
    host, _, port = listen.rpartition(":")
    if int(port) > _LAST_PORT:
        raise OSError(errno.EINVAL, f"ports end at {_LAST_PORT}")
    (family, _, _, _, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return family, address


def _cannot_listen(listen: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"nothing can listen at {listen}: {error.strerror or error}.",
        field="http.listen",
        hint="Name an address of this machine and a free port, such as 127.0.0.1:9464.",
    )


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, family: int, address: Any, pages: Mapping[str, Page], connection_s: float) -> None:
        self.address_family = family
        self.pages = pages
        self._connection_s = connection_s
        self._since: dict[socket.socket, float] = {}
        """Open connections, the oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:  # the process has no descriptors left: whoever waits would have us try again at once
            time.sleep(_RETRY_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._since) >= _MOST_CONNECTIONS:
                _shut(next(iter(self._since)))
                del self._since[next(iter(self._since))]
            self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called at least every half second."""
        with self._lock:
            late = [it for it, since in self._since.items() if time.monotonic() - since > self._connection_s]
            for connection in late:
                _shut(connection)
                del self._since[connection]

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def close_all(self) -> None:
        with self._lock:
            for connection in self._since:
                _shut(connection)
            self._since.clear()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's
        """A client went away, or was shut out; anything else is a fault of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            _log.error("http_fault", error=f"{type(error).__name__}: {error}")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _CONNECTION_SECONDS
    """Of a single read or write."""

    def version_string(self) -> str:
        """Of the header Server: strangers need know no more."""
        return "pingpongd"

    def do_GET(self) -> None:
        page = self.server.pages.get(urlsplit(self.path).path)
        if page is None:
            known = ", ".join(self.server.pages)
            self._answer(Reply(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", f"There are: {known}\n".encode()))
        else:
            self._answer(page(self.headers.get("Accept", "")))

    do_HEAD = do_GET  # noqa: N815 - the base class looks for it by this name

    def _refuse(self) -> None:
        """A page is only read; what comes behind the headers is left unread."""
        self.close_connection = True
        self._answer(
            Reply(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", b"Pages are read with GET or HEAD.\n"),
            Allow="GET, HEAD",
        )

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse  # noqa: N815 - as above

    def _answer(self, reply: Reply, **headers: str) -> None:
        self.send_response(reply.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Probes come every few seconds: nothing to tell."""


def _shut(connection: socket.socket) -> None:
    """Wake whoever reads from it or writes to it; its own thread closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        return
