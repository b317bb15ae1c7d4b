"""`pingpong-client jitter`: from files, pipes and the journal; as text, JSON, PNG, SVG and HTML; live."""

from __future__ import annotations

import asyncio
import gzip
import html.parser
import json
import os
import signal
import subprocess
import sys
from io import FileIO
from pathlib import Path
from xml.dom import minidom

import pytest

from jitter_log import BEGAN, CLOCK, GPU0, GPU1, an_hour, ended, jitter, steps, written
from picture_words import crowded
from pingpong_bus.errors import UsageError
from pingpong_client import log_sources
from pingpong_client.cli import main
from pingpong_client.jitter_builder import JitterBuilder
from pingpong_client.jitter_picture import draw
from pingpong_client.jitter_report import JitterReport
from pingpong_client.jitter_text import report_lines
from pingpong_client.log_times import long, parse_time
from pingpong_client.table import cell_len

HANG_S = 30


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "pingpongd.log"
    path.write_bytes(b"\n".join(an_hour()) + b"\n")
    return path


def report(lines: list[bytes]) -> JitterReport:
    builder = JitterBuilder()
    builder.feed(lines)
    return builder.report()


def run(*words: str | Path, **more: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "pingpong_client", "jitter", *map(str, words)]
    return subprocess.run(command, capture_output=True, timeout=HANG_S, **more)  # type: ignore[call-overload,no-any-return]


def test_text_names_devices_causes_and_costs(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jitter", str(log)]) == 0
    text = capsys.readouterr().out
    assert "2026-11-30 10:00:00 to 11:00:00 UTC, 1 h 00 min; 727 lines\n" in text
    assert "10:20:02  gpu1    thermal throttle  30 s  2.00 x      75.0  50 %  12.0 s       2  " + CLOCK in text
    assert "thermal throttle         1  30 s  12.0 s       2" in text
    assert "1 hop moved, which by prediction saved 1.80 s" in text
    strip = next(line for line in text.splitlines() if line.startswith("gpu1  ") and "█" in line)
    mark = text.splitlines()[text.splitlines().index(strip) + 1]
    assert mark.index("^") == strip.index("█")  # the episode stands under its late tokens


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_text_fits_a_terminal(width: int) -> None:
    lines = report_lines(report(an_hour()), width)
    assert max(map(cell_len, lines)) <= max(width, 80)  # columns of numbers do not give way
    assert any("sw_thermal" in line or "the SM clock" in line for line in lines)
    if width >= 80:
        assert any(f"{GPU1[:9]}" in line and "gpu1" in line for line in lines)
        assert any("thermal throttle " in line and "gpu1" in line for line in lines)


def test_json_is_one_document_that_can_be_read_back(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jitter", "--json", str(log)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["version"] == 1
    assert [group["devices"] for group in document["groups"]] == [[GPU0], [GPU1]]
    assert document["episodes"][0]["evidence"] == {"sm_mhz": 1095.0}


class _Page(html.parser.HTMLParser):
    """Checks that elements are closed in order, and gathers what would be fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetched += [str(given[name]) for name in ("src", "href", "data") if name in given]
        self.ids += [str(given["id"])] if "id" in given else []
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_html_is_one_file_that_needs_no_other(tmp_path: Path, log: Path) -> None:
    hostile = jitter("default-1-9", why="<script>alert(1)</script> & more", worker="<b>gpu9", devices=["cpu:0"])
    with log.open("ab") as file:
        file.write(written(2000, hostile) + b"\n")
    out = tmp_path / "report.html"
    assert main(["jitter", str(log), "-o", str(out)]) == 0
    text = out.read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert all(address.startswith("#") for address in page.fetched)
    assert "url(http" not in text
    assert "@import" not in text
    assert len(page.ids) == len(set(page.ids))
    assert "<script" not in text
    words = " ".join(page.words)
    assert "<script>alert(1)</script> & more" in words
    assert CLOCK in words
    assert GPU1 in words
    assert sorted(tmp_path.iterdir()) == [log, out]


def test_pictures_of_the_same_log_are_the_same(tmp_path: Path, log: Path) -> None:
    for name in ("a.png", "b.png", "a.svg", "b.svg", "a.txt", "a.json"):
        assert main(["jitter", str(log), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    minidom.parse(str(tmp_path / "a.svg"))  # noqa: S318 - it is our own
    assert json.loads((tmp_path / "a.json").read_bytes())["version"] == 1
    assert "thermal throttle" in (tmp_path / "a.txt").read_text()


def many_causes() -> list[bytes]:
    """Three groups of long names and ten causes."""
    from pingpong_client.jitter_picture import LOOKS

    lines = []
    for worker in range(3):
        name, device = f"a-rather-long-name-of-a-group-{worker}", f"GPU-8f6a1c52-aa11-4c1e-9d0f-01234567890{worker}"
        lines += [written(at, steps(name, device, worst_ms=9.0 if worker else 5000.0)) for at in range(10, 4000, 10)]
        for number, cause in enumerate(LOOKS):
            at, episode = 100 + 350 * number, f"default-{worker}-{number}"
            lines.append(written(at, jitter(episode, cause, worker=name, devices=[device])))
            lines.append(written(at + 50, ended(episode, cause, worker=name, devices=[device], lost_ms=10.0**number)))
    return lines


@pytest.mark.parametrize("lines", [an_hour(), many_causes(), an_hour()[:3], []], ids=["hour", "many", "short", "none"])
def test_no_words_of_a_picture_overlap_or_leave_it(lines: list[bytes]) -> None:
    assert crowded(draw(report(lines))) == []


def test_what_is_not_over_has_no_cost_yet() -> None:
    lines = [written(0, steps("gpu1", GPU1)), written(5, jitter()), written(10, steps("gpu1", GPU1))]
    [axes] = draw(report(lines)).axes
    assert axes.get_title("left").endswith("1 episode, not over")
    assert report_lines(report(lines))[3].endswith(" -")
    lines += [written(40, ended()), written(60, jitter("default-1-2"))]
    group, costs = draw(report(lines)).axes
    assert group.get_title("left").endswith("2 episodes, 12.0 s lost, 1 not over")
    assert costs.get_title("left").endswith("what is not over (1 episode) is not counted")


def test_compressed_files_pipes_and_several_files(tmp_path: Path) -> None:
    lines = an_hour()
    first, second = tmp_path / "log.2.gz", tmp_path / "log.1"
    packed = gzip.compress(b"\n".join(lines[:200]) + b"\n") + gzip.compress(b"\n".join(lines[200:400]) + b"\n")
    first.write_bytes(packed[:-3])  # it is still written to
    second.write_bytes(b"\n".join(lines[400:]))
    whole = run("--json", "-", input=b"\n".join(lines))
    parts = run("--json", first, second)
    assert whole.returncode == parts.returncode == 0, parts.stderr
    assert json.loads(whole.stdout) == json.loads(parts.stdout)
    with (tmp_path / "log.1").open("rb") as file:
        assert run("--json", "-", stdin=file).returncode == 0  # standard input that is a file
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"x" * 1000)[:10] + b"garbage")
    bad = run(tmp_path / "bad.gz")
    assert (bad.returncode, bad.stderr.count(b"\n")) == (65, 1)


WRONG = {
    "no log": ([], 2),
    "no such file": (["/nonexistent/log"], 65),
    "a form that is none": (["LOG", "-o", "x.pdf"], 2),
    "both": (["LOG", "--journal", "unit"], 2),
    "no time": (["LOG", "--since", "soon"], 2),
    "times the wrong way round": (["LOG", "--since", "1h", "--until", "2h"], 2),
    "another log": (["OTHER"], 65),
    "an empty log": (["EMPTY"], 65),
    "a place that cannot be written": (["LOG", "-o", "/proc/x.txt"], 2),
    "a folder that is not there": (["LOG", "-o", "/nonexistent/x.txt"], 2),
}


@pytest.mark.parametrize(("words", "code"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_one_sentence(
    words: list[str], code: int, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").write_text("nothing of ours\n" * 10)
    (tmp_path / "empty").write_text("")
    places = {"LOG": str(log), "OTHER": str(tmp_path / "other"), "EMPTY": str(tmp_path / "empty")}
    assert main(["jitter", *(places.get(word, word) for word in words)]) == code
    said = capsys.readouterr()
    assert said.err.startswith("pingpong-client: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_time_without_records_is_fine(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jitter", str(log), "--since", "2020-01-01", "--until", "2020-01-02"]) == 0
    assert "nothing of a daemon in this time" in capsys.readouterr().out


def test_a_machine_without_matplotlib_says_what_to_install(log: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    for name in ("x.png", "x.html", "x.svg"):
        done = run(log, "-o", tmp_path / name, env=environ)
        assert done.returncode == 2
        assert b"pip install 'pingpongd[plots]'" in done.stderr
        assert done.stderr.count(b"\n") == 1
        assert not (tmp_path / name).exists()
    assert run(log, env=environ).returncode == 0
    assert run(log, "-o", tmp_path / "x.json", env=environ).returncode == 0


JOURNALCTL = """#!/bin/sh
echo "$@" > {seen}
cat {log}
case "$*" in *broken*) echo "Failed to open the journal: it is broken" >&2; exit 1;; *--follow*) exec sleep 60;; esac
"""


@pytest.fixture
def journal(log: Path, tmp_path: Path) -> dict[str, str]:
    """An environment whose `journalctl` gives the log, and keeps what it was asked."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "journalctl"
    program.write_text(JOURNALCTL.format(seen=tmp_path / "seen", log=log))
    program.chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def test_the_journal_is_asked_for_the_unit_and_the_time(journal: dict[str, str], tmp_path: Path) -> None:
    done = run("--journal", "--since", "2026-11-30T10:00", "--until", "2026-11-30T10:30Z", "--json", env=journal)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert BEGAN <= found["began"] < found["ended"] <= BEGAN + 1800
    asked = (tmp_path / "seen").read_text().split()
    assert {"--output=cat", "--unit=pingpongd", "--user-unit=pingpongd"} < set(asked)
    assert f"--since=@{BEGAN - 1:.0f}" in asked
    assert f"--until=@{BEGAN + 1801:.0f}" in asked
    assert "--follow" not in asked
    assert run("--journal", "--instance", "second", env=journal).returncode == 0
    assert "--unit=pingpongd@second" in (tmp_path / "seen").read_text()
    broken = run("--journal", "broken", env=journal)
    assert broken.returncode == 65
    assert b"it is broken" in broken.stderr
    none = run("--journal", env=journal | {"PATH": "/nonexistent"})
    assert none.returncode == 2
    assert b"there is no journalctl here" in none.stderr


class Following:
    """The command with --follow, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, *words: str | Path, env: dict[str, str] | None = None) -> Following:
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pingpong_client", "jitter", "--follow", *map(str, words)),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=env,
            )
        )

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(HANG_S):
            return (await self.process.stdout.readline()).decode()

    async def interrupt(self) -> tuple[int, str, str]:
        self.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(HANG_S):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


async def test_a_log_that_grows_and_is_rotated_is_followed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(written(0, steps()) + b"\n" + written(5, jitter()) + b"\n")
    following = await Following.start(log)
    assert await following.line() == (
        "10:00:05 gpu1: tokens come late, 2.00 times the usual 8.6 ms (p99 31.0, worst 60.0): "
        f"thermal throttle: {CLOCK}\n"
    )
    with log.open("ab") as file:
        file.write(written(35, ended())[:40])  # half a line
        file.flush()
        await asyncio.sleep(0.6)  # longer than the command waits between two looks
        file.write(written(35, ended())[40:] + b"\n")
    assert "quiet again: thermal throttle, 30 s, 900 late tokens, 12.0 s lost, 2 chains" in await following.line()
    log.rename(tmp_path / "log.1")
    log.write_bytes(written(40, jitter("default-1-2")) + b"\n")
    assert (await following.line()).startswith("10:00:40 gpu1: tokens come late")
    code, out, err = await following.interrupt()
    assert (code, err) == (130, "")
    assert "2 episodes of late tokens" in out


async def test_a_log_that_is_rotated_away_while_it_is_looked_at_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, real = tmp_path / "log", log_sources._replaced
    log.write_bytes(b"1\n")

    def rotated(path: Path, file: FileIO) -> bool:
        monkeypatch.setattr(log_sources, "_replaced", real)
        path.unlink()
        return True

    monkeypatch.setattr(log_sources, "_replaced", rotated)
    chunks = log_sources.growing_chunks([log])
    assert await anext(chunks) == (log, b"1\n")
    coming = asyncio.ensure_future(anext(chunks))
    async with asyncio.timeout(HANG_S):
        while log.exists():
            await asyncio.sleep(0.01)
        log.write_bytes(b"2\n")
        assert await coming == (log, b"2\n")


async def test_standard_input_is_followed_to_its_end_and_files_are_written(tmp_path: Path) -> None:
    following = await Following.start("-", "--json", "-o", tmp_path / "x.txt")
    stdin = following.process.stdin
    assert stdin is not None
    stdin.write(written(5, jitter()) + b"\n")
    assert json.loads(await following.line())["event"] == "decode_jitter"
    stdin.write(written(35, ended()) + b"\n")
    assert json.loads(await following.line())["lost_ms"] == 12_000.0
    stdin.close()
    assert json.loads(await following.line())["version"] == 1
    assert await following.process.wait() == 0
    assert "thermal throttle" in (tmp_path / "x.txt").read_text()


async def test_the_journal_is_followed(journal: dict[str, str]) -> None:
    following = await Following.start("--journal", env=journal)
    lines = [await following.line() for _ in range(6)]
    assert "the likely cause is thermal throttle now, not unknown" in lines[2]
    assert "editor of chain c1 moved to gpu0 with 34 tokens: 4,100 ms left here, 2,300 there" in lines[3]
    assert "gpu1: healthy, was recovering" in lines[5]
    code, out, _ = await following.interrupt()
    assert code == 130
    assert "1 episode of late tokens" in out


def test_times_as_people_give_them() -> None:
    now = BEGAN + 4 * 3600 + 30
    assert parse_time("2026-11-30T10:00", now) == BEGAN
    assert parse_time("2026-11-30 11:00+01:00", now) == BEGAN
    assert parse_time("2026-11-30T10:00:00Z", now) == BEGAN
    assert parse_time("10:00", now) == BEGAN
    assert parse_time("9:59:30", now) == BEGAN - 30
    assert parse_time("now", now) == now
    assert [now - parse_time(text, now) for text in ("90s", "90min", "6h", "2d ago", "1w")] == [
        *(90, 5400, 21600),
        *(172_800, 604_800),
    ]
    for text in ("", "yesterday", "6 moons", "25:00", "-5h"):
        with pytest.raises(ValueError):  # noqa: PT011 - whichever it is
            parse_time(text, now)


def test_spans_as_they_are_shown() -> None:
    assert [long(one) for one in (0.04, 9.94, 9.96, 59.6, 185, 7620, 86_399.9, 273_600)] == [
        *("0.0 s", "9.9 s", "10 s", "1 min 00 s", "3 min 05 s", "2 h 07 min", "1 d 00 h", "3 d 04 h"),
    ]


def test_a_picture_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="plots"):
        draw(report([]))
