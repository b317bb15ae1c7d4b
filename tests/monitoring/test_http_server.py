"""The HTTP server: its pages, what it refuses, and clients that are slow, many, or gone."""

from __future__ import annotations

import errno
import http.client
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from pingpong_bus.errors import ConfigError
from pingpongd.http_server import HttpServer, Reply

LONG = 16 * 2**20
"""Bytes: more than sockets buffer."""


def page(accept: str) -> Reply:
    return Reply(HTTPStatus.OK, "text/plain", f"accepts {accept or 'all'}".encode())


def faulty(accept: str) -> Reply:
    raise ValueError("a fault of ours")


def long_page(accept: str) -> Reply:
    return Reply(HTTPStatus.OK, "text/plain", b"x" * LONG)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    found = HttpServer("127.0.0.1:0", {"/page": page, "/faulty": faulty, "/long": long_page}, connection_s=1.0)
    found.start()
    yield found
    found.stop()


def ask(server: HttpServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def test_pages_are_found_by_path_whatever_the_query(server: HttpServer) -> None:
    assert ask(server, "/page") == (200, b"accepts all")
    assert ask(server, "/page?a=b", Accept="text/html") == (200, b"accepts text/html")
    assert ask(server, "/page", "HEAD") == (200, b"")


def test_what_is_not_there_is_refused(server: HttpServer) -> None:
    status, body = ask(server, "/other")
    assert status == 404
    assert b"/page" in body


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_a_page_is_only_read(server: HttpServer, method: str) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    connection.request(method, "/page", body=b"x")
    reply = connection.getresponse()
    assert (reply.status, reply.getheader("Allow")) == (405, "GET, HEAD")
    connection.close()
    assert ask(server, "/page", "BREW")[0] == 501


def test_garbage_is_refused_and_the_next_is_answered(server: HttpServer) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n"):
        with socket.create_connection(server.address, timeout=30) as stranger:
            stranger.sendall(garbage)
            assert b"200 OK" not in stranger.recv(4096)
    assert ask(server, "/page")[0] == 200


def test_a_fault_in_a_page_costs_that_request_alone(server: HttpServer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(http.client.RemoteDisconnected):
        ask(server, "/faulty")
    assert ask(server, "/page")[0] == 200
    told = "".join(capsys.readouterr())
    assert "http_fault" in told
    assert "a fault of ours" in told


def test_a_client_that_sends_slowly_is_shut_out(server: HttpServer) -> None:
    with socket.create_connection(server.address, timeout=30) as slow:
        began = time.monotonic()
        slow.sendall(b"GET /page HTTP/1.1\r\n")
        closed = threading.Event()

        def drip() -> None:
            while not closed.wait(0.1):
                try:
                    slow.sendall(b"X")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert _read_all(slow) == b""
        finally:
            closed.set()
            dripping.join()
        assert time.monotonic() - began < 20


def test_a_client_that_reads_nothing_is_shut_out(server: HttpServer) -> None:
    with socket.create_connection(server.address, timeout=30) as lazy:
        lazy.sendall(b"GET /long HTTP/1.0\r\n\r\n")
        assert lazy.recv(12) == b"HTTP/1.0 200"  # its thread writes by now
        deadline = time.monotonic() + 20
        while _threads() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _threads()
        assert len(_read_all(lazy)) < LONG


def test_a_crowd_of_idle_connections_keeps_nobody_out() -> None:
    server = HttpServer("127.0.0.1:0", {"/page": page}, connection_s=600)
    server.start()
    crowd = [socket.create_connection(server.address, timeout=30) for _ in range(100)]
    try:
        assert ask(server, "/page")[0] == 200
        assert len(_threads()) <= 40
    finally:
        for connection in crowd:
            connection.close()
        server.stop()


def test_without_descriptors_it_waits_and_takes_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HttpServer("127.0.0.1:0", {"/page": page})
    server.start()
    tries = 0

    def none_left(_: socketserver.TCPServer) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socketserver.TCPServer, "get_request", none_left)  # before anybody can be let in
        waiting = socket.create_connection(server.address, timeout=30)
        waiting.sendall(b"GET /page HTTP/1.0\r\n\r\n")
        deadline = time.monotonic() + 30
        while not tries and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        assert 0 < tries < 100
        patch.undo()
        assert waiting.recv(12) == b"HTTP/1.0 200"
        waiting.close()
    server.stop()


@pytest.mark.parametrize("listen", ["192.0.2.1:9464", "no.such.host.invalid:9464", "127.0.0.1:70000"])
def test_an_address_that_cannot_be_had_is_named(listen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpServer(listen, {})
    assert caught.value.field == "http.listen"
    assert listen in caught.value.message


def test_a_port_that_another_has_is_refused_and_free_again_after_a_stop(server: HttpServer) -> None:
    host, port = server.address
    with pytest.raises(ConfigError, match="in use"):
        HttpServer(f"{host}:{port}", {})
    ask(server, "/page")
    server.stop()
    again = HttpServer(f"{host}:{port}", {"/page": page})
    again.start()
    assert ask(again, "/page")[0] == 200
    again.stop()


def _threads() -> list[threading.Thread]:
    return [it for it in threading.enumerate() if "process_request_thread" in it.name]


def _read_all(connection: socket.socket) -> bytes:
    """What comes until the other end closes, or breaks off."""
    found = b""
    try:
        while data := connection.recv(2**16):
            found += data
    except ConnectionError:
        pass
    return found
