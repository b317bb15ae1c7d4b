"""HTTP calls, to a server that a test plays."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pingpong_bus.errors import ChainFailed
from pingpongd.call_http import post


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.released = threading.Event()

    def handle_error(self, *_: object) -> None:
        """Who asked has hung up."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, dict(self.headers), body))
        kind = self.path.split("?")[0]
        if kind == "/hang":
            self.server.released.wait(60)
            return
        if kind == "/trickle":
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            while not self.server.released.wait(0.05):
                try:
                    self.wfile.write(b"x")
                    self.wfile.flush()
                except OSError:
                    return
            return
        if kind in ("/short", "/piece"):
            self.send_response(200)
            self.send_header(*(("Content-Length", "100") if kind == "/short" else ("Transfer-Encoding", "chunked")))
            self.end_headers()
            self.wfile.write(b"a piece" if kind == "/short" else b"7\r\na piece\r\n")
            self.close_connection = True
            return
        status = {"/redirect": 302, "/refuse": 422, "/break": 500}.get(kind, 200)
        answer = {
            "/echo": body,
            "/latin": "é".encode("latin-1"),
            "/garbage": b"\xff\xfe\xff",
            "/wobble": b"hi",
            "/large": b"x" * 100_000,
            "/refuse": b"no\nsuch thing",
        }.get(kind, b"")
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        if kind in ("/latin", "/wobble"):
            self.send_header("Content-Type", f"text/plain; charset={'latin-1' if kind == '/latin' else 'wobble'}")
        if kind == "/packed":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        try:
            self.wfile.write(answer)
        except OSError:  # who asked has had enough
            self.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


async def ask(url: str, text: str = "hi", timeout_s: float = 30.0, headers: dict[str, str] | None = None) -> str:
    return await post(url, headers or {}, text, timeout_s=timeout_s, most_bytes=50_000)


async def test_the_text_is_posted_and_the_body_is_the_answer(server: Server) -> None:
    assert await ask(f"{server.url}/echo?a=b", "grüße", headers={"X-Key": "k"}) == "grüße"
    ((path, headers, body),) = server.seen
    assert path == "/echo?a=b"
    assert body.decode() == "grüße"
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert headers["X-Key"] == "k"


async def test_headers_that_are_given_count(server: Server) -> None:
    assert await ask(f"{server.url}/echo", "{}", headers={"content-type": "application/json"}) == "{}"
    ((_, headers, _),) = server.seen
    assert [value for name, value in headers.items() if name.lower() == "content-type"] == ["application/json"]


async def test_its_charset_counts(server: Server) -> None:
    assert await ask(f"{server.url}/latin") == "é"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/redirect", "302, a redirect, which is not followed"),
        ("/refuse", '422 Unprocessable Entity; its answer: "no such thing"\\.'),
        ("/break", "500"),
        ("/garbage", "no text in utf-8"),
        ("/large", "more than 50000 bytes"),
        ("/short", "hung up 93 bytes before the end"),
        ("/piece", r"the request to 127\.0\.0\.1:\d+ failed"),
        ("/packed", r"its answer is packed.*gzip.*identity"),
        ("/wobble", r"nobody knows the charset of its answer.*wobble.*UTF-8"),
    ],
)
async def test_what_goes_wrong_is_said(server: Server, path: str, says: str) -> None:
    with pytest.raises(ChainFailed, match=says):
        await ask(server.url + path)
    assert len(server.seen) == 1  # and nobody else was asked


@pytest.mark.parametrize("path", ["/hang", "/trickle"])
async def test_its_time_is_limited_to_the_last_byte(server: Server, path: str) -> None:
    began = time.monotonic()
    with pytest.raises(ChainFailed, match=r"longer than 0\.5 s"):
        await ask(server.url + path, timeout_s=0.5)
    assert time.monotonic() - began < 20


async def test_nobody_answers() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(ChainFailed, match=r"the request to 127\.0\.0\.1:\d+ failed: Connection refused"):
            await ask(f"http://127.0.0.1:{taken.getsockname()[1]}/")


async def test_who_speaks_no_http_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-x\r\n")
                while connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ChainFailed, match=r'127\.0\.0\.1:\d+ does not answer in HTTP; its answer: "SSH-2\.0-x"'):
            await ask(f"http://127.0.0.1:{listening.getsockname()[1]}/")
        thread.join(30)


async def test_a_cancelled_one_hangs_up(server: Server) -> None:
    task = asyncio.create_task(ask(f"{server.url}/trickle"))
    async with asyncio.timeout(30):
        while not server.seen:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(30):
        while any(thread.name == "call" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)


async def test_nothing_is_sent_once_it_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up, found = socket.getaddrinfo, threading.Event()

    def slow(*arguments: Any, **named: Any) -> Any:
        assert found.wait(60)
        return look_up(*arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with pytest.raises(ChainFailed, match="longer than"):
        await ask(f"{server.url}/echo", timeout_s=0.1)
    found.set()
    async with asyncio.timeout(30):
        while any(thread.name == "call" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
    monkeypatch.undo()
    assert await ask(f"{server.url}/echo", "the next") == "the next"  # whatever was sent before has come before
    assert [body for _, _, body in server.seen] == [b"the next"]


async def test_certificates_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []

    def read() -> Any:
        readers.append(threading.current_thread().name)
        raise ssl.SSLError(1, "no certificates")

    monkeypatch.setattr(ssl, "create_default_context", read)
    with pytest.raises(ChainFailed, match="the request to .* failed: .*no certificates"):
        await ask("https://127.0.0.1:1/")
    assert readers == ["call"]
