"""The daemon's words to systemd, heard on a socket of the test's own."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pingpongd.notify import Notifier, feed_watchdog


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """What systemd would listen on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(5)
        yield listening


def heard(manager: socket.socket) -> list[str]:
    """Every message that has come."""
    manager.setblocking(False)
    messages = []
    while True:
        try:
            messages.append(manager.recv(4096).decode())
        except BlockingIOError:
            return messages


def environment(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), "PATH": "/bin", **more}


def test_says_what_it_is_told_to_say(manager: socket.socket) -> None:
    with closing(Notifier(environment(manager))) as notifier:
        notifier.status("loading\n  a model")
        notifier.status("loading a model")
        notifier.extend(90)
        notifier.ready()
        notifier.alive()
        notifier.stopping()
    assert heard(manager) == [
        "STATUS=loading a model",
        "EXTEND_TIMEOUT_USEC=90000000",
        "READY=1",
        "WATCHDOG=1",
        "STOPPING=1",
    ]


def test_a_reload_carries_the_managers_clock(manager: socket.socket) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    with closing(Notifier(environment(manager))) as notifier:
        notifier.reloading()
    [message] = heard(manager)
    first, stamp = message.splitlines()
    assert first == "RELOADING=1"
    assert before <= int(stamp.removeprefix("MONOTONIC_USEC=")) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def test_reaches_an_abstract_address() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        name = f"pingpong-test-{os.getpid()}"
        listening.bind(f"\0{name}")
        with closing(Notifier({"NOTIFY_SOCKET": f"@{name}"})) as notifier:
            notifier.ready()
        assert heard(listening) == ["READY=1"]


def test_is_silent_without_a_manager() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "1000000"})
    notifier.ready()
    notifier.status("serving")
    assert notifier.watchdog_interval_s is None
    assert notifier._socket is None


def test_leaves_nothing_for_workers_to_inherit(manager: socket.socket) -> None:
    environ = environment(manager, WATCHDOG_PID=str(os.getpid()), WATCHDOG_USEC="3000000")
    Notifier(environ)
    assert environ == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("variables", "interval"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_for_the_process_it_names(
    manager: socket.socket, variables: dict[str, str], interval: float | None
) -> None:
    assert Notifier(environment(manager, **variables)).watchdog_interval_s == interval


def test_a_manager_that_is_gone_or_does_not_listen_hurts_nobody(tmp_path: Path, manager: socket.socket) -> None:
    with closing(Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")})) as notifier:
        notifier.ready()
    with closing(Notifier(environment(manager))) as notifier:
        for _ in range(10_000):  # its buffer fills, and nobody reads
            notifier.alive()
    assert 0 < len(heard(manager)) < 10_000


def test_a_long_status_stays_whole_characters(manager: socket.socket) -> None:
    with closing(Notifier(environment(manager))) as notifier:
        notifier.status("ü" * 2000)
    assert heard(manager) == ["STATUS=" + "ü" * 512]


async def test_the_watchdog_is_fed_while_there_is_progress(manager: socket.socket) -> None:
    notifier = Notifier(environment(manager, WATCHDOG_USEC="2000"))
    ticks: list[int | None] = [None, None, 1, 2, 2, 2, 3]
    asked = 0
    through = asyncio.Event()

    def progress() -> int | None:
        nonlocal asked
        if asked == len(ticks):
            through.set()
            return ticks[-1]
        asked += 1
        return ticks[asked - 1]

    feeding = asyncio.create_task(feed_watchdog(notifier, progress))
    async with asyncio.timeout(20):
        await through.wait()
    feeding.cancel()
    await asyncio.wait({feeding})
    notifier.close()
    assert heard(manager) == ["WATCHDOG=1"] * 5  # not for the two that stood still, nor for the last


async def test_no_watchdog_needs_no_food(manager: socket.socket) -> None:
    await feed_watchdog(Notifier(environment(manager)), lambda: 1)
    assert heard(manager) == []
