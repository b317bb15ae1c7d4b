"""What the daemon tells systemd: sd_notify(3), by hand, so that nothing has to be linked or installed for it.

A message is one datagram of ``NAME=value`` lines to the socket that $NOTIFY_SOCKET names. Without that variable nothing
is sent and everything here does nothing, so that callers need no second path.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, MutableMapping

import structlog

_log = structlog.get_logger()

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
_STATUS_BYTES = 1024
"""More of a status nobody reads; a datagram has to fit into the socket's buffer."""


class Notifier:
    """The daemon's line to its service manager.

    Its variables are taken out of the environment: workers must not speak for the daemon.

    Args:
        environ: the environment to take them from.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        address, pid, interval = (environ.pop(name, "") for name in _VARIABLES)
        self._address = "\0" + address[1:] if address.startswith("@") else address
        """Empty: nobody listens."""
        self._socket: socket.socket | None = None
        self._failed = False
        self._status = ""
        for_us = pid in ("", str(os.getpid()))
        self._watchdog_us = int(interval) if self._address and for_us and interval.isdecimal() else 0

    @property
    def watchdog_interval_s(self) -> float | None:
        """Seconds between two calls of `alive`, half of what the manager waits for; None: it does not wait."""
        return self._watchdog_us / 2_000_000 or None

    def ready(self) -> None:
        """The daemon serves; also the end of `reloading`."""
        self._send("READY=1")

    def reloading(self) -> None:
        """It reads its configuration again; the manager waits for `ready`."""
        # Type=notify-reload compares it with its own clock, so as not to take an older READY for the answer.
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """It is about to end."""
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """What `systemctl status` is to show, one line; the same again is not sent."""
        line = " ".join(text.split()).encode()[:_STATUS_BYTES].decode(errors="ignore")
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def extend(self, seconds: float) -> None:
        """Starting, or stopping, may take `seconds` more from now on; call it again before they are over."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1_000_000)}")

    def alive(self) -> None:
        """Work goes on; without it for the watchdog's time the manager kills and restarts the daemon."""
        self._send("WATCHDOG=1")

    def close(self) -> None:
        """Give the socket back; a later call opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        """Send a message; a manager that does not listen is no reason to stop, nor to wait."""
        if not self._address:
            return
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)
            self._socket.sendto(message.encode(), self._address)
            self._failed = False
        except OSError as error:
            if not self._failed:  # once, not at every beat
                _log.warning("service_manager_unreachable", error=error.strerror, message=message.partition("\n")[0])
            self._failed = True


async def feed_watchdog(notifier: Notifier, progress: Callable[[], int | None]) -> None:
    """Call `alive` for as long as the daemon makes progress; runs until it is cancelled.

    That this task gets its turn says that the event loop lives; `progress` says whether what must go on went on.

    Args:
        notifier: nothing is done where it has no watchdog.
        progress: a number that changes as work is done, such as the fleet's ticks; None while there is nothing to judge
            by, and then the event loop's turn is enough.
    """
    interval = notifier.watchdog_interval_s
    if interval is None:
        return
    last: int | None = None
    stalled = False
    while True:
        now = progress()
        if now is None or now != last:
            notifier.alive()
            stalled = False
        elif not stalled:
            stalled = True
            _log.warning("watchdog_not_fed", progress=now, reason="the fleet's supervision stands still")
        last = now
        await asyncio.sleep(interval)
