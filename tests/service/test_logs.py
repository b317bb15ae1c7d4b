"""Log lines: form, level, priority; and the limit on how many there are."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from pingpongd.log_limits import EventLimits, RateLimit
from pingpongd.logs import to_journal

LOGGING = """
import os, sys, structlog
from pingpongd.logs import set_level, set_up_logging
if sys.argv[1] == "journal":
    status = os.fstat(2)
    os.environ["JOURNAL_STREAM"] = f"{status.st_dev}:{status.st_ino}"
set_up_logging("warning", "json")
log = structlog.get_logger()
log.info("held back")
log.warning("careful", why="two\\nlines")
set_level("debug")
log.debug("small")
log.info("seen")
try:
    raise ValueError("wrong")
except ValueError:
    log.exception("failed")
log.critical("over")
"""


LIBRARIES = """
import asyncio, logging, warnings
from pingpongd.logs import set_up_logging
set_up_logging("info", "json")
logging.getLogger("some.library").error("refused %s", "prompt: 'my knee'")
logging.getLogger("some.library").info("chatter")
logging.getLogger("some.library").error("%d of them", "no number")
warnings.warn("use the other one")

async def fails():
    raise ValueError("HF_TOKEN=abcdef123")

async def main():
    task = asyncio.create_task(fails())
    await asyncio.wait([task])

asyncio.run(main())
"""


FLOOD = """
import sys, structlog
from pingpong_bus.log_records import DecodeJitterCause
from pingpongd.logs import log_record, set_redactor, set_up_logging, tell_suppressed
from pingpongd.redaction import Redactor
set_up_logging("info", "json")
log = structlog.get_logger()
for number in range(100_000):
    log.warning("frame_refused", socket="control", why=f"garbage {number}", peer=None)
log.warning("frame_refused", socket="workers", why="other", peer=None)
tell_suppressed()
log.error("worker_died", worker="a", why="HF_TOKEN=abcdef123", last_lines=["prompt: 'my knee'"])
set_redactor(Redactor(prompts=True))
log.error("worker_died", worker="a", why="HF_TOKEN=abcdef123", last_lines=["prompt: 'my knee'"])
log_record(
    DecodeJitterCause(episode="e", worker="a", cause="unknown", was="cpu_starvation", why="?", evidence={"x": 1})
)
"""


def logged(where: str, program: str = LOGGING) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program, where], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_lines_are_limited_by_event_and_key_and_secrets_and_prompts_are_left_out() -> None:
    first, other, guarded, asked, record = [json.loads(line) for line in logged("elsewhere", FLOOD)]
    assert (first["why"], first["socket"], other["socket"]) == ("garbage 0", "control", "workers")
    assert "suppressed" not in first
    assert (guarded["why"], guarded["last_lines"]) == ("HF_TOKEN=***", ["prompt: <9 characters>"])
    assert (asked["why"], asked["last_lines"]) == ("HF_TOKEN=***", ["prompt: 'my knee'"])
    assert (record["event"], record["level"], record["cause"]) == ("decode_jitter_cause", "warning", "unknown")
    assert record["evidence"] == {"x": 1}


def test_each_line_is_json_and_the_level_can_change() -> None:
    lines = [json.loads(line) for line in logged("elsewhere")]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("careful", "warning"),
        ("small", "debug"),
        ("seen", "info"),
        ("failed", "error"),
        ("over", "critical"),
    ]
    assert "ValueError: wrong" in lines[3]["exception"]


def test_the_journal_gets_priorities() -> None:
    lines = logged("journal")
    assert [line[:3] for line in lines] == ["<4>", "<7>", "<6>", "<3>", "<2>"]
    assert [json.loads(line[3:])["event"] for line in lines] == ["careful", "small", "seen", "failed", "over"]


def test_the_journal_is_known_by_its_inode(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        status = os.fstat(stream.fileno())
        assert to_journal(stream, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"})
        assert not to_journal(stream, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino + 1}"})
        assert not to_journal(stream, {"JOURNAL_STREAM": "nonsense"})
        assert not to_journal(stream, {})
    assert not to_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_limit_counts_what_it_holds_back() -> None:
    clock = Clock()
    limit = RateLimit(0.5, clock, burst=2)
    assert [limit.pass_through("garbage", 1000) for _ in range(5)] == [0, 0, None, None, None]
    assert limit.pass_through("garbage", 1001) == 0  # another key
    clock.now = 1.9
    assert limit.pass_through("garbage", 1000) is None
    clock.now = 2.1
    assert limit.pass_through("garbage", 1000) == 4
    clock.now = 1000.0
    assert [limit.pass_through("garbage", 1000) for _ in range(3)] == [0, 0, None]


@given(st.lists(st.floats(0, 3), min_size=1, max_size=200), st.floats(0.1, 5), st.integers(1, 5))
def test_a_limit_is_kept_and_forgets_nothing(pauses: list[float], per_s: float, burst: int) -> None:
    clock = Clock()
    limit = RateLimit(per_s, clock, burst=burst)
    answers = []
    for pause in pauses:
        clock.now += pause
        answers.append(limit.pass_through("key"))
    passed = [answer for answer in answers if answer is not None]
    assert answers[0] == 0
    assert len(passed) <= burst + clock.now * per_s + 1e-6
    held_since = len(answers) - 1 - max(index for index, answer in enumerate(answers) if answer is not None)
    assert sum(passed) + len(passed) + held_since == len(pauses)


def refused(limits: EventLimits, socket: str) -> int | None:
    """How many lines were held back before this one; None where it is, too."""
    try:
        line = limits(None, "warning", {"event": "frame_refused", "socket": socket})
    except structlog.DropEvent:
        return None
    return int(line.get("suppressed", 0))


def test_what_was_held_back_is_told_once() -> None:
    clock = Clock()
    limits = EventLimits(clock)
    assert [refused(limits, "control") for _ in range(4)] == [0, None, None, None]
    assert refused(limits, "workers") == 0
    assert limits.settle() == {}  # a line may still come that tells
    clock.now = 11.0
    assert refused(limits, "control") == 3
    assert [refused(limits, "control") for _ in range(2)] == [None, None]
    assert limits.settle() == {}
    clock.now = 30.0
    assert limits.settle() == {"frame_refused": 2}
    assert limits.settle() == {}
    assert refused(limits, "control") == 0


def test_lines_held_back_of_keys_that_were_forgotten_are_told() -> None:
    limit = RateLimit(0.001, Clock(), burst=1)
    assert [limit.pass_through("first") for _ in range(4)] == [0, None, None, None]
    for key in range(2000):
        limit.pass_through(key)
    assert limit.settle() == 3


@pytest.mark.parametrize("keys", [10_000])
def test_strangers_cannot_fill_memory_with_keys(keys: int) -> None:
    limit = RateLimit(1, Clock())
    for key in range(keys):
        assert limit.pass_through(key) == 0
    assert len(limit._buckets) <= 1024


def test_what_libraries_say_stands_in_the_log() -> None:
    done = subprocess.run([sys.executable, "-c", LIBRARIES], capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["event"], line["library"], line["level"]) for line in lines] == [
        ("library_said", "some.library", "error"),
        ("library_said", "some.library", "error"),
        ("library_said", "py.warnings", "warning"),
        ("library_said", "asyncio", "error"),
    ]
    assert lines[1]["line"] == "%d of them"
    assert "use the other one" in lines[2]["line"]
    assert "in fails" in lines[3]["exception"]
    assert "knee" not in json.dumps(lines)
    assert "abcdef123" not in done.stderr
