"""Bars of a start: what they say, and that they go as they came; and commands that wait under them."""

import asyncio
import io

import msgspec
import pytest
from rich.console import Console

from fake_daemon import Terminal, status_of
from pingpong_bus.errors import DaemonUnavailable
from pingpong_bus.messages import GetStatus, Progress, Submit
from pingpong_client.start_bars import StartBars, amount
from screen import Screen

LOADING = Progress(stage="loading the weights", done=12, total=30, unit="shards")


def workers(**changes):
    first, second = status_of(1, 0).workers
    return [msgspec.structs.replace(first, **changes), msgspec.structs.replace(second, stage="serving")]


@pytest.mark.parametrize(
    ("done", "total", "unit", "said"),
    [
        (120e6, 269e6, "bytes", "120 of 269 MB"),
        (1.25e9, 28e9, "bytes", "1.2 of 28.0 GB"),
        (5e6, 0, "bytes", "5 MB"),
        (0, 900, "bytes", "0 of 900 bytes"),
        (12, 30, "shards", "12 of 30 shards"),
        (12, 0, "shards", "12 shards"),
        (3, 4, "", "75 %"),
        (9, 4, "", "100 %"),
        (0, 0, "", ""),
        (0, 0, "bytes", ""),
    ],
)
def test_an_amount_is_said_in_its_unit(done, total, unit, said):
    assert amount(Progress(stage="s", done=done, total=total, unit=unit)) == said


def test_a_line_for_the_daemon_and_for_each_group_and_nothing_at_the_end():
    stream = io.StringIO()
    bars = StartBars(Console(file=stream, force_terminal=True, width=80, height=24))
    bars.update([], Progress(stage="fetching the model", done=120e6, total=269e6, unit="bytes"))
    bars.update(workers(name="cpu[0]", state="loading", stage="loading the model", progress=LOADING))
    screen = Screen()
    screen.feed(stream.getvalue())
    first, second = screen.lines
    assert first.startswith("cpu[0] loading the weights ")
    assert "━" in first
    assert " 12 of 30 shards " in first
    assert second.startswith("w1     serving ")
    assert screen.cursor_hidden
    bars.close()
    screen = Screen()
    screen.feed(stream.getvalue())
    assert screen.lines == []
    assert not screen.cursor_hidden


def test_a_stage_of_unknown_length_after_a_complete_one_says_nothing_of_it_and_time_goes_on(monkeypatch):
    now = 100.0
    stream = io.StringIO()
    bars = StartBars(Console(file=stream, force_terminal=True, width=80, height=24, get_time=lambda: now))
    complete = Progress(stage="loading the weights", done=1, total=1, unit="shards")
    bars.update(workers(state="loading", stage="loading the model", progress=complete))
    now = 107.0
    bars.update(workers(state="loading", stage="loading the model", progress=Progress(stage="warming up")))
    screen = Screen()
    screen.feed(stream.getvalue())
    assert screen.lines[0].startswith("w0 warming up ")
    assert screen.lines[0].endswith("━  0:00:07")
    now = 110.0
    bars.update(workers(state="ready", stage="serving"))
    now = 120.0
    bars.update(workers(state="ready", stage="serving"))
    screen = Screen()
    screen.feed(stream.getvalue())
    assert screen.lines[0].startswith("w0 serving ")
    assert screen.lines[0].endswith("━  0:00:10"), "what its start took"
    bars.close()


def test_many_groups_do_not_scroll_the_screen_away():
    stream = io.StringIO()
    bars = StartBars(Console(file=stream, force_terminal=True, width=80, height=24))
    many = [
        msgspec.structs.replace(workers()[0], name=f"gpu{at}", state="loading", progress=LOADING) for at in range(40)
    ]
    for _ in range(3):
        bars.update(many)
    bars.close()
    screen = Screen()
    screen.feed(stream.getvalue())
    assert screen.lines == screen.scrolled == []


def starting(times):
    """A daemon that starts for so many questions, and then serves."""
    left = iter(range(times))

    def edit(status):
        if next(left, None) is None:
            return status
        loading = workers(state="loading", stage="loading the model", progress=LOADING)
        return msgspec.structs.replace(status, state="starting", workers=loading)

    return edit


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("pingpong_client.commands.starting.POLL_S", 0.001)


async def test_submit_waits_for_a_start_where_it_is_told_to(link, daemon, chain_file, quick):
    daemon.edit_status = starting(3)
    outcome = await link.command("submit", str(chain_file), "--wait")
    assert outcome.code == 0
    assert [type(request) for request in daemon.requests[:5]] == [GetStatus] * 4 + [Submit]
    assert outcome.err.splitlines() == [
        "pingpong-client: the daemon is starting",
        "pingpong-client: w0: loading the weights",
        "pingpong-client: w1: serving",
    ]


async def test_submit_waits_where_a_person_looks_on_and_else_does_not_ask(link, daemon, chain_file, quick):
    daemon.edit_status = starting(3)
    assert (await link.command("submit", str(chain_file), terminal=True)).code == 0
    assert sum(isinstance(request, GetStatus) for request in daemon.requests) == 4
    daemon.requests.clear()
    assert (await link.command("submit", str(chain_file))).code == 0
    assert not any(isinstance(request, GetStatus) for request in daemon.requests)


async def test_status_waits_under_bars_on_a_terminal(link, daemon, quick, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("fake_daemon.io.StringIO", Terminal)
    daemon.edit_status = starting(2)
    outcome = await link.command("status", "--wait")
    assert outcome.code == 0
    assert "12 of 30 shards" in outcome.err
    assert "instance default: ready" in outcome.out


async def test_a_terminal_that_cannot_move_its_cursor_gets_lines(link, daemon, quick, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("fake_daemon.io.StringIO", Terminal)
    daemon.edit_status = starting(2)
    assert "w0: loading the weights" in (await link.command("status", "--wait")).err


@pytest.mark.parametrize("words", [("status", "--wait"), ("submit", "CHAIN", "--wait")])
async def test_a_daemon_that_is_not_there_yet_is_waited_for(link, daemon, chain_file, quick, words):
    daemon.away = True
    asked = [str(chain_file) if word == "CHAIN" else word for word in words]
    waiting = asyncio.create_task(link.command(*asked))
    async with asyncio.timeout(30):
        while len(link.transports) < 3:
            await asyncio.sleep(0.001)
    assert not waiting.done()
    daemon.away = False
    outcome = await asyncio.wait_for(waiting, 30)
    assert outcome.code == 0
    assert outcome.err.count("no daemon is at ") == 1


@pytest.mark.parametrize("terminal", [True, False])
async def test_a_daemon_that_is_not_there_is_69_without_wait(link, daemon, chain_file, terminal):
    daemon.away = True
    assert (await link.command("submit", str(chain_file), terminal=terminal)).code == 69
    assert (await link.command("status", terminal=terminal)).code == 69


async def test_a_daemon_that_ends_while_it_starts_is_not_waited_for(link, daemon, quick):
    def end(status):
        daemon.refuse[GetStatus] = DaemonUnavailable("it has ended.")
        return msgspec.structs.replace(status, state="starting")

    daemon.edit_status = end
    assert (await link.command("status", "--wait")).code == 69


async def test_status_says_how_far_a_start_has_come_and_who_is_degraded(link, daemon):
    def edit(status):
        health = msgspec.structs.replace(
            status.workers[1].health, state="degraded", cause="cpu_starvation", why="it had no core", since_s=9.0
        )
        busy = workers(state="loading", stage="loading the model", progress=LOADING)
        return msgspec.structs.replace(
            status,
            workers=[busy[0], msgspec.structs.replace(busy[1], health=health)],
            progress=Progress(stage="fetching the model", done=1e6, total=2e6, unit="bytes"),
        )

    daemon.edit_status = edit
    lines = (await link.command("status")).out.splitlines()
    assert "the daemon itself: fetching the model, 1 of 2 MB" in lines
    assert lines[-2:] == [
        "w0: loading the weights, 12 of 30 shards",
        "w1: degraded for 9 s, cpu_starvation: it had no core",
    ]
