"""`top`: what stands on a screen of a given size, how fast workers write, and the command on a terminal."""

import asyncio
import codecs
import os
import pty
import shutil
import signal
import sys
import tempfile
import termios
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fake_daemon import status_of
from pingpong_bus.errors import MessageError, StoreError, UsageError
from pingpong_bus.messages import (
    ChainSummary,
    DeviceState,
    GetStatus,
    GroupHealth,
    HostState,
    ItlSummary,
    ListChains,
    Progress,
    SchedulerState,
    StoreStatus,
)
from pingpong_client.sparkline import meter, sparkline
from pingpong_client.top_rates import WINDOW_S, TokenRates
from pingpong_client.top_view import Seen, frame
from screen import Screen

LIMIT_S = 30.0
SLOW = GroupHealth(
    state="degraded",
    cause="thermal_throttle",
    why="the SM clock fell to 1,095 of 1,980 MHz (sw_thermal_slowdown) while tokens took 31.2 ms where 16.2 are usual",
    since_s=9.2,
    slowdown=1.93,
    episodes=1,
)


def group(name, at=0, **changes):
    """One that serves, on a GPU."""
    worker = status_of(1, 0).workers[0]
    gpu = DeviceState(
        uuid=f"GPU-{at:08x}-1234-5678-9abc-def012345678", name="NVIDIA H200", sm_mhz=1965, sm_max_mhz=1980,
        memory_mhz=3201, power_w=612.3, power_limit_w=700.0, temperature_c=61, utilization=0.98,
        memory_used_bytes=129_400_000_000, memory_total_bytes=150_700_000_000,
    )  # fmt: skip
    fields = {
        "name": name,
        "devices": [f"cuda:{at}"],
        "hops": 2,
        "itl": ItlSummary(
            tokens=300, p50_ms=16.2, p99_ms=19.44, worst_ms=32.4, late=3, usual_ms=16.2, history_ms=[16.2] * 60
        ),
        "gpus": [gpu],
        "host": HostState(cpu=1.02, runnable_wait=0.01, rss_bytes=5_300_000_000, pressure_cpu=0.03),
        "scheduler": SchedulerState(
            steps=1, step_ms=16, decode_ms=16, target_ms=19, budget_tokens=3, reason="", append_tokens=3,
            withheld_steps=0, kv_usage=0.31,
        ),
        "kv_held_tokens": 40_000,
        "output_tokens": 1000,
    }  # fmt: skip
    return msgspec.structs.replace(worker, **(fields | changes))


def chain(at, state="running", **changes):
    fields = {
        "id": f"{at:08x}", "name": "tips", "state": state, "placement": "ping-pong", "agents": 5, "finished_agents": 2,
        "age_s": 100.0 - at, "e2e_ms": None, "output_tokens": 300, "max_output_tokens": 600, "agent": "critic",
        "worker": "gpu1",
    }  # fmt: skip
    return ChainSummary(**(fields | changes))


def seen(workers, chains=(), **changes):
    """After two looks, two seconds apart, in which each worker has written 122 tokens."""
    fields = {"workers": workers, "chains": {"running": 2, "queued": 1, "finished": 120}, "uptime_s": 7500.0}
    status = msgspec.structs.replace(status_of(1, 0), **(fields | changes))
    rates = TokenRates()
    rates.add(status)
    later = [msgspec.structs.replace(worker, output_tokens=worker.output_tokens + 122) for worker in workers]
    status = msgspec.structs.replace(status, workers=later, uptime_s=status.uptime_s + 2)
    rates.add(status)
    return Seen(status, chains, rates)


def drawn(what, width=80, height=None, **options):
    return [line.plain.rstrip() for line in frame(what, width, height, **options)]


def test_the_whole_screen_at_80_columns():
    itl = ItlSummary(
        tokens=90, p50_ms=31.2, p99_ms=37.4, worst_ms=70, late=80, usual_ms=16.2, history_ms=[16.0] * 51 + [31.2] * 9
    )
    hot = group("gpu1", 1, health=SLOW, itl=itl)
    gpu = msgspec.structs.replace(hot.gpus[0], sm_mhz=1095, temperature_c=88, throttle=["sw_thermal_slowdown"])
    workers = [group("gpu0"), msgspec.structs.replace(hot, gpus=[gpu])]
    chains = [
        chain(1),
        chain(2, agent="", why='agent "editor" waits for room in its engine'),
        chain(3, "queued", placement=None, output_tokens=0, agent="", finished_agents=0),
        chain(4, "finished", e2e_ms=8123.4, finished_agents=5),
    ]
    assert drawn(seen(workers, chains), 80, 24) == [
        "pingpongd 0.1.0 default: ready, up 2 h 05 min                     122.0 tokens/s",
        "chains: 2 running, 1 queued; 120 finished; slots: 4 of 64 used",
        "",
        "group    state      ITL p50 p99 ms ITL by the second         tok/s run   KV held",
        "gpu0     serving       16.2   19.4 ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄    61.0   2  31%  61%",
        "gpu1     degraded      31.2   37.4 ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▇▇▇▇▇▇▇▇▇    61.0   2  31%  61%",
        "  1.9 times as slow for 9 s: thermal_throttle; the SM clock fell to 1,095 of",
        "  1,980 MHz (sw_thermal_slowdown) while tokens took 31.2 ms where 16.2 are usual",
        "",
        "group    GPU                          SM MHz   power W  temp  busy     memory GB",
        "gpu0     GPU-00000000            1,965/1,980   612/700  61 C   98% 129.4 / 150.7",
        "gpu1     GPU-00000001            1,095/1,980   612/700  88 C   98% 129.4 / 150.7",
        "  clocks held down: sw_thermal_slowdown",
        "",
        "group    devices                  CPU  waits  steal  PSI cpu   mem    io  RSS GB",
        "gpu0     cuda:0                  1.02     1%      -       3%     -     -    5.30",
        "gpu1     cuda:1                  1.02     1%      -       3%     -     -    5.30",
        "",
        "chain    name        placement agents tokens written  now at                 age",
        "00000001 tips        ping-pong    2/5 ━━━━──── 300    critic on gpu1        1:39",
        '00000002 tips        ping-pong    2/5 ━━━━──── 300    agent "editor" wa…    1:38',
        "00000003 tips        -            0/5 ──────── 0      queued                1:37",
        "00000004 tips        ping-pong    5/5 E2E 8,123 ms    finished              1:36",
    ]


def test_a_wide_screen_has_more_columns():
    lines = drawn(seen([group("gpu0")]), 130, 40)
    title = lines[3]
    assert all(word in title for word in ("worst", "usual", "late", "starts"))
    assert "1.0%" in lines[4]
    assert "PCIe" not in "\n".join(lines)
    assert "PCIe in MB/s" in "\n".join(drawn(seen([group("gpu0")]), 160, 40))
    assert "NVIDIA H200 GPU-00000000-1234-5678-9abc-def012345678" in "\n".join(lines)


def test_models_have_a_column_where_there_are_several():
    groups = [group("gpu0"), group("gpu1", model="small"), group("gpu2", model="small", state="loading", stage="loads")]
    lines = drawn(seen(groups), width=120)
    assert "model" in lines[3]
    assert [line.split()[:2] for line in lines[4:7]] == [["gpu0", "(default)"], ["gpu1", "small"], ["gpu2", "small"]]
    assert all("model" not in line for line in drawn(seen(groups), width=80))
    assert all("model" not in line for line in drawn(seen(groups[:1]), width=120))


@given(
    groups=st.integers(0, 24),
    sick=st.sets(st.integers(0, 23), max_size=3),
    chains=st.integers(0, 60),
    width=st.integers(20, 200),
    height=st.integers(10, 60),
)
def test_nothing_is_wider_or_longer_than_the_screen_and_the_sick_are_on_it(groups, sick, chains, width, height):
    workers = [group(f"gpu{at}", at, health=SLOW if at in sick else GroupHealth()) for at in range(groups)]
    lines = drawn(seen(workers, [chain(at) for at in range(chains)]), width, height)
    assert all(cell_len(line) <= max(width, 60) for line in lines)
    assert len(lines) <= height
    ill = [line for line in lines if " degraded " in line and line.startswith("gpu")]
    # Four lines each, and a title with a blank above it, below a head of two lines.
    assert len(ill) >= min(len([at for at in sick if at < groups]), (height - 2 - 2 - 1) // 4)
    if chains and height >= 24 and groups <= 4 and not sick:
        assert sum("━━━━────" in line for line in lines) >= min(chains, 4)


def test_the_narrowest_screen_has_its_tables_whole():
    lines = drawn(seen([group("gpu0"), group("gpu1", 1)], [chain(1)]), 60, 40)
    assert [line.split()[-1] for line in lines if line.startswith(("group ", "chain "))] == ["KV", "GB", "GB", "age"]
    assert all(len(line) <= 60 for line in lines)


def test_what_does_not_fit_is_counted():
    lines = drawn(seen([group("gpu0")], [chain(at) for at in range(30)] + [chain(31, "finished")] * 9), 80, 24)
    shown = sum("━━━━────" in line for line in lines)
    assert lines[-1] == f"... and {30 - shown} more live chains"
    assert len(lines) == 24


def test_live_chains_stand_first_and_the_oldest_of_them_at_the_top():
    chains = [chain(1, "finished", e2e_ms=5.0), chain(3), chain(2), chain(5, "queued", age_s=500.0)]
    lines = drawn(seen([group("gpu0")], chains), 80, 40)
    at = next(at for at, line in enumerate(lines) if line.startswith("chain "))
    assert [line[:8] for line in lines[at + 1 :]] == ["00000002", "00000003", "00000005", "00000001"]


def test_a_group_that_loads_shows_how_far_it_has_come_and_one_that_fails_why():
    progress = Progress(stage="loading the weights", done=12, total=30, unit="shards")
    workers = [
        group("gpu0", state="loading", stage="loading the model", progress=progress, gpus=[], host=None),
        group("gpu1", state="failed", stage="given up: it ended with signal 9", failure="it had no memory", gpus=[]),
    ]
    lines = drawn(seen(workers, state="starting"), 80, 24)
    assert lines[4] == "gpu0     loading    loading the weights ━━━━━━────────── 12 of 30 shards"
    assert lines[5] == "gpu1     failed     given up: it ended with signal 9"
    assert lines[6] == "  the last failure: it had no memory"


def test_what_the_daemon_does_itself_and_what_ails_it_is_said():
    progress = Progress(stage="fetching the model", done=120e6, total=240e6, unit="bytes")
    store = StoreStatus(path="/s", chains=1, bytes=1, pending=3, error="No space left on device")
    lines = drawn(seen([], progress=progress, state="starting", store=store), note="the daemon is away (4 s)")
    assert lines[2:] == [
        "the store cannot be written: No space left on device",
        "fetching the model ━━━━━━━━──────── 120 of 240 MB",
        "no groups yet",
        "the daemon is away (4 s)",
    ]


def test_what_others_do_on_a_gpu_and_its_errors_are_said():
    gpu = msgspec.structs.replace(
        group("g").gpus[0], foreign_pids=[4242, 4243], foreign_utilization=0.4, xid=79, ecc_errors=2,
        sm_mhz=None, power_w=None, temperature_c=None, utilization=None, memory_used_bytes=None,
    )  # fmt: skip
    lines = drawn(seen([group("gpu0", gpus=[gpu])]))
    at = next(at for at, line in enumerate(lines) if " GPU " in line)
    assert lines[at + 1].split() == ["gpu0", "GPU-00000000", "-", "-", "-", "-", "-"]
    text = " ".join(line.strip() for line in lines[at + 2 : at + 4])
    assert text.startswith("other processes: 4242, 4243, busy 40% of the time; 2 uncorrected ECC errors; XID 79")


def test_what_a_group_that_does_not_serve_was_at_is_not_shown():
    gone = group("gpu1", state="failed", stage="given up: it ended with signal 9")
    lines = drawn(seen([group("gpu0"), gone]))
    assert sum(line.startswith("gpu0 ") for line in lines) == 3
    assert sum(line.startswith("gpu1 ") for line in lines) == 1


def test_text_from_elsewhere_cannot_move_the_cursor():
    chains = [chain(1, name="a\x1b[2Jb\nc", agent="x\ry", worker="\x07w")]
    lines = drawn(seen([group("g\x1bpu", state="failed", stage="x\x1b[31m", failure="\x1b[H")], chains))
    assert not any(char in line for line in lines for char in "\x1b\r\n\x07")


def test_without_utf8_all_is_ascii():
    workers = [group("gpu0"), group("gpu1", state="loading", progress=Progress(stage="s", done=1, total=2))]
    assert "\n".join(drawn(seen(workers, [chain(1)]), ascii_only=True)).isascii()


@given(values=st.lists(st.floats(0, 1e6)), cells=st.integers(0, 80), usual=st.floats(0, 1e3))
def test_a_sparkline_has_its_width_and_blanks_where_nothing_was(values, cells, usual):
    line = sparkline(values, cells, usual=usual)
    assert len(line) == cells
    shown = values[-cells:] if cells else []
    padded = [0.0] * (cells - len(shown)) + shown
    assert all((char == " ") == (value <= 0) for char, value in zip(line, padded, strict=True))
    ranked = sorted((value, char) for value, char in zip(padded, line, strict=True) if value > 0)
    assert all(low[1] <= high[1] for low, high in pairwise(ranked))


def test_noise_around_the_usual_draws_a_flat_line_and_half_as_much_again_does_not():
    assert sparkline([14.0, 16.0, 17.5], 3, usual=16.0) == "▄▄▄"
    assert sparkline([16.0, 24.0, 32.0], 3, usual=16.0) == "▄▆█"


@given(share=st.floats(-1, 2), cells=st.integers(0, 40))
def test_a_meter_has_its_width(share, cells):
    assert len(meter(share, cells)) == cells


def test_rates_are_by_the_daemons_clock_over_the_latest_seconds():
    rates = TokenRates()
    status = status_of(1, 0)
    assert rates.total is None

    def look(uptime_s, tokens, pid=99, worker_pid=100):
        worker = msgspec.structs.replace(status.workers[0], output_tokens=tokens, pid=worker_pid)
        rates.add(msgspec.structs.replace(status, workers=[worker], uptime_s=uptime_s, pid=pid))
        return rates.of("w0")

    assert look(10, 1000) is None
    assert look(12, 1100) == 50
    assert look(12 + WINDOW_S, 1100) == 0, "what is older than the window counts no more"
    assert look(30, 5) is None, "fewer than before: the worker is a new one"
    assert look(31, 65) == 60
    assert look(32, 70, worker_pid=101) is None
    assert look(33, 80, worker_pid=101) == rates.total == 10
    assert look(1, 20_000, pid=98) is None, "another daemon"


async def test_output_that_is_piped_is_one_plain_screen(link, daemon):
    outcome = await link.command("top", "--interval", "0.1")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("pingpongd 0.1.0 default: ready, up 1 min 15 s")
    assert "\x1b" not in outcome.out
    assert [type(request) for request in daemon.requests] == [GetStatus, ListChains] * 2


async def test_once_prints_it_on_a_terminal_as_well(link, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    outcome = await link.command("top", "--once", "--interval", "0.1", terminal=True)
    assert outcome.code == 0
    assert "\x1b[?1049h" not in outcome.out
    assert "w0       serving" in outcome.out


async def test_without_a_daemon_it_says_so(link, daemon):
    daemon.away = True
    assert (await link.command("top", "--once")).code == 69


@pytest.mark.parametrize("words", [("--interval", "0"), ("--interval", "x")])
async def test_an_interval_that_makes_no_sense_is_usage(link, words):
    with pytest.raises(UsageError, match="interval"):
        await link.command("top", *words)


@pytest.fixture
def folder():
    """With a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="pp-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Watched:
    """`top` in a process of its own, on a terminal of 80 by 24."""

    def __init__(self, socket, width=80, height=24):
        self.master, self.slave = pty.openpty()
        self.resize(width, height)
        self.modes = termios.tcgetattr(self.slave)
        self.screen = Screen(width, height)
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text = ""
        self.socket = socket

    def resize(self, width, height):
        termios.tcsetwinsize(self.slave, (height, width))

    async def __aenter__(self):
        os.set_blocking(self.master, False)
        asyncio.get_running_loop().add_reader(self.master, self._read)
        command = [sys.executable, "-m", "pingpong_client", "--socket", str(self.socket), "top", "--interval", "0.1"]
        environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = await asyncio.create_subprocess_exec(
            *command,
            preexec_fn=lambda: os.login_tty(self.slave),  # its own, so that Ctrl-C on it is a signal
            pass_fds=(self.slave,),
            env=environ | {"TERM": "xterm-256color", "PYTHONUTF8": "1"},
        )
        return self

    async def __aexit__(self, *error):
        asyncio.get_running_loop().remove_reader(self.master)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def _read(self):
        text = self.decoder.decode(os.read(self.master, 65536))
        self.text += text
        self.screen.feed(text)

    async def until(self, condition):
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def shows(self, text):
        await self.until(lambda: any(text in line for line in self.screen.lines))

    def press(self, keys):
        os.write(self.master, keys)

    async def ended(self):
        code = await asyncio.wait_for(self.process.wait(), LIMIT_S)
        await self.until(lambda: not self.screen.alternate)
        return code


@pytest.mark.parametrize(("keys", "code"), [(b"q", 0), (b"\x04", 0), (b"\x03", 130)])
async def test_on_a_terminal_it_draws_until_a_key_and_leaves_all_as_it_was(serving, folder, keys, code):
    async with serving(folder / "control.sock"), Watched(folder) as top:
        await top.shows("w1       serving")
        await top.shows("q ends")
        assert top.screen.alternate
        await top.until(lambda: top.text.count("pingpongd 0.1.0") >= 4)
        assert top.screen.erased == 0, "each frame is drawn over the one before: nothing flickers"
        assert len(top.screen.lines) == 24
        top.press(keys)
        assert await top.ended() == code
        assert top.screen.lines == []
        assert not top.screen.cursor_hidden
        assert termios.tcgetattr(top.slave) == top.modes


async def test_it_fills_a_terminal_that_has_grown(serving, folder):
    async with serving(folder / "control.sock"), Watched(folder) as top:
        await top.shows("q ends")
        top.resize(100, 30)
        top.screen = Screen(100, 30)
        top.process.send_signal(signal.SIGWINCH)
        await top.until(lambda: len(top.screen.lines) == 30 and "q ends" in top.screen.lines[29])
        top.press(b"q")
        assert await asyncio.wait_for(top.process.wait(), LIMIT_S) == 0


async def test_it_outlives_its_daemon(daemon, serving, folder):
    path = folder / "control.sock"
    async with Watched(folder) as top:
        async with serving(path):
            await top.shows("w0 ")
        path.unlink(missing_ok=True)
        await top.shows("the daemon is away, waiting for it to come back")
        await top.shows("w0 ")
        daemon.edit_status = lambda status: msgspec.structs.replace(status, instance="second", pid=1234)
        async with serving(path):
            await top.shows("pingpongd 0.1.0 second: ready")
            await top.until(lambda: not any("away" in line for line in top.screen.lines))
            daemon.refuse[ListChains] = StoreError("the store cannot be read.")
            await top.shows("the store cannot be read.")
            daemon.refuse[GetStatus] = MessageError("it speaks another version.")
            await top.shows("it speaks another version.")
            top.press(b"q")
            assert await top.ended() == 0


async def test_one_that_is_silent_is_said_to_be(daemon, serving, folder):
    async with serving(folder / "control.sock"), Watched(folder) as top:
        await top.shows("w0 ")
        daemon.silent.add(GetStatus)
        await top.shows("the daemon is away")
        assert any("w0 " in line for line in top.screen.lines), "what it said last stays"
