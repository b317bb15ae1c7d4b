"""A `call` step's request over HTTP: its input by POST, its answer the body. In a thread of its own, which may hang.

Nothing is followed elsewhere: a redirect is an error, and no proxy of the environment is used; certificates are
checked.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from email.message import Message
from urllib.parse import urlsplit

from pingpong_bus.errors import ChainFailed
from pingpongd.calls import quoted

_PIECE = 1 << 16
_QUOTED = 300
"""Characters of an error's body that are told."""


async def post(url: str, headers: Mapping[str, str], text: str, *, timeout_s: float, most_bytes: int) -> str:
    """Send a text, and return the answer's.

    Cancelled, it closes the connection.

    Args:
        url: http or https.
        headers: beside Content-Type, which they may set too.
        text: sent in UTF-8.
        timeout_s: for all of it, to the last byte.
        most_bytes: of the answer; more is an error.

    Raises:
        ChainFailed: nobody answers in time, or with another status than 2xx, with too much or with what is no text.
    """
    exchange = _Exchange(url, headers, text, timeout_s, most_bytes)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()

    def give(answer: str | ChainFailed) -> None:
        if done.done():
            return
        if isinstance(answer, ChainFailed):
            done.set_exception(answer)
        else:
            done.set_result(answer)

    def work() -> None:
        answer = exchange.run()
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(give, answer)

    # Not a pool's: looking up a name can take longer than any limit, and nothing ends a thread.
    threading.Thread(target=work, name="call", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await done
    except TimeoutError:
        raise ChainFailed(f"it took longer than {timeout_s:g} s and was given up.") from None
    finally:
        exchange.close()


class _Exchange:
    """One request and its answer; `run` is the thread's, `close` anybody's."""

    def __init__(self, url: str, headers: Mapping[str, str], text: str, timeout_s: float, most_bytes: int) -> None:
        self._url = urlsplit(url)
        self._by = time.monotonic() + timeout_s
        given = {name.lower() for name in headers}
        plain = {} if "content-type" in given else {"Content-Type": "text/plain; charset=utf-8"}
        self._headers = plain | dict(headers)
        self._body = text.encode()
        self._most = most_bytes
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._given_up = False

    def run(self) -> str | ChainFailed:
        try:
            with closing(self._connection()) as connection:
                return self._exchange(connection)
        except ChainFailed as error:
            return error
        except TimeoutError:
            return ChainFailed(f"it took longer than {self._timeout_s:g} s and was given up.")
        except http.client.BadStatusLine as error:
            if isinstance(error, ConnectionError):  # it hung up without a word
                return self._failed(error)
            return ChainFailed(
                f"{self._url.netloc} does not answer in HTTP{quoted('its answer', str(error))}.",
                hint="See whether the url of the call is right.",
            )
        except (OSError, http.client.HTTPException, ValueError) as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> ChainFailed:
        said = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        return ChainFailed(
            f"the request to {self._url.netloc} failed: {said.removesuffix('.')}.",
            hint="See whether it runs, and whether the url of the call is right.",
        )

    def close(self) -> None:
        """Wake the thread, where it waits for the other side; nothing is sent any more."""
        self._given_up = True
        if self._socket is not None:
            with suppress(OSError):
                # Not the TLS socket's own, which would first let what is being sent go on in the clear.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        context = ssl.create_default_context()  # reads all certificates: tens of milliseconds
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)

    def _exchange(self, connection: http.client.HTTPConnection) -> str:
        connection.connect()
        self._socket = connection.sock
        if self._given_up:  # while it looked the name up, or waited for the other side to take it
            raise TimeoutError
        target = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
        connection.request("POST", target, self._body, self._headers)
        response = connection.getresponse()
        body = self._read(response)
        if 300 <= response.status < 400:
            raise ChainFailed(
                f"it answered {response.status}, a redirect, which is not followed.", hint="Configure where it leads."
            )
        if not 200 <= response.status < 300:
            said = quoted("its answer", body[: 4 * _QUOTED].decode(errors="replace")[:_QUOTED])
            raise ChainFailed(f"it answered {response.status} {response.reason}{said}.")
        if response.length:  # `read1` does not mind; with chunks it does
            raise ChainFailed(f"it hung up {response.length} bytes before the end of its answer.")
        packed = (response.getheader("Content-Encoding") or "identity").strip().lower()
        if packed != "identity":
            raise ChainFailed(
                f"its answer is packed{quoted('its answer', f'Content-Encoding {packed[:_QUOTED]}')}.",
                hint="The request says Accept-Encoding: identity; have it answer so.",
            )
        charset = _charset(response.headers)
        try:
            return body.decode(charset)
        except LookupError:
            raise ChainFailed(
                f"nobody knows the charset of its answer{quoted('its answer', charset[:_QUOTED])}.",
                hint="Have it answer in UTF-8.",
            ) from None
        except UnicodeDecodeError:
            raise ChainFailed(
                f"its answer is no text in {charset}.", hint="Have it answer in UTF-8, or name the charset it uses."
            ) from None

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        body = bytearray()
        while True:
            left = self._by - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if self._socket is not None and self._socket.fileno() >= 0:
                self._socket.settimeout(left)
            piece = response.read1(_PIECE)
            if not piece:
                return bytes(body)
            body += piece
            if len(body) > self._most:
                raise ChainFailed(f"it answered more than {self._most} bytes.", hint="Raise max_chars of the step.")


def _charset(headers: Message) -> str:
    return headers.get_content_charset() or "utf-8"
