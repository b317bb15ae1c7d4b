"""Commands of call steps: what they get, what is taken of them, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from pingpong_bus.errors import ChainFailed
from pingpongd.call_command import environment_of, run_command


async def run(command: Sequence[str], text: str = "", *, timeout_s: float = 30.0, most: int = 100_000) -> str:
    return await run_command(command, environment_of(os.environ, {}), text, timeout_s=timeout_s, most_bytes=most)


def sh(script: str, *arguments: str) -> list[str]:
    return ["sh", "-c", script, "sh", *arguments]


def alive(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def until_gone(mark: str) -> None:
    async with asyncio.timeout(30):
        while alive(mark):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("command", "text", "answer"),
    [
        (["cat"], "hello ü\n\n", "hello ü\n"),
        (["cat"], "x" * 90_000, "x" * 90_000),
        (["true"], "y" * 1_000_000, ""),
        (sh("echo a; echo b >&2"), "", "a"),
        (sh("printf '%s|' \"$@\"", "a b", "$HOME", ";"), "", "a b|$HOME|;|"),
    ],
)
async def test_its_output_is_the_answer(command: list[str], text: str, answer: str) -> None:
    assert await run(command, text) == answer


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            sh("echo something went wrong >&2; exit 3"),
            'exit code 3; the end of its error output: "something went wrong"\\.',
        ),
        (sh("kill -9 $$"), "SIGKILL"),
        (["/nowhere/no-such-program"], "/nowhere/no-such-program cannot be started: No such file.*whole path"),
        (["printf", "\\377"], "not UTF-8: byte 0 is 0xff"),
        (["yes"], "more than 100000 bytes"),
        (sh("exec >&-; exit 4"), "exit code 4"),
    ],
)
async def test_what_goes_wrong_is_said(command: list[str], says: str) -> None:
    with pytest.raises(ChainFailed, match=says):
        await run(command)


async def test_only_the_end_of_what_it_complains_of_is_told() -> None:
    with pytest.raises(ChainFailed, match="the end") as caught:
        await run(sh("i=0; while [ $i -lt 2000 ]; do echo noise $i >&2; i=$((i+1)); done; echo the end >&2; exit 1"))
    assert len(str(caught.value)) < 2200


async def test_its_environment_has_nothing_of_ours() -> None:
    own = {"PATH": os.environ["PATH"], "HOME": "/h", "SECRET": "x"}
    answer = await run_command(["env"], environment_of(own, {"GIVEN": "1"}), "", timeout_s=30, most_bytes=10_000)
    assert set(answer.splitlines()) == {f"PATH={os.environ['PATH']}", "HOME=/h", "GIVEN=1"}


async def test_it_has_a_session_of_its_own() -> None:
    code = "import os; print(os.getsid(0) == os.getpid() == os.getpgid(0))"
    assert await run([sys.executable, "-c", code]) == "True"


@pytest.mark.parametrize("script", ["sleep 300", "trap '' TERM; sleep 300 & wait; sleep 300"])
async def test_one_that_takes_too_long_is_ended_with_all_that_it_started(script: str) -> None:
    mark = uuid.uuid4().hex
    with pytest.raises(ChainFailed, match=r"longer than 0\.5 s"):
        await run(sh(f"sh -c '{script.replace(chr(39), '')}' {mark} & {script}", mark), timeout_s=0.5)
    await until_gone(mark)


async def test_what_it_leaves_in_the_background_is_ended() -> None:
    mark = uuid.uuid4().hex
    assert await run(sh(f"sh -c 'sleep 300; true' {mark} & echo done")) == "done"
    await until_gone(mark)


async def test_a_cancelled_one_is_ended(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    began = tmp_path / "began"
    task = asyncio.create_task(run(sh(f"touch {began}; sleep 300; true", mark)))
    async with asyncio.timeout(30):
        while not began.exists():
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_gone(mark)


@pytest.mark.parametrize("text", ["", "x" * 1_000_000])
async def test_one_that_is_cancelled_at_its_start_leaves_nothing_open(text: str) -> None:
    mark = uuid.uuid4().hex
    before = psutil.Process().num_fds()
    for turns in range(20):  # of the event loop: its pipes are taken one by one
        task = asyncio.create_task(run(sh("sleep 300; true", mark), text))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
    gc.collect()  # a pipe that nobody has closed is a ResourceWarning, and so an error
    await until_gone(mark)
    assert psutil.Process().num_fds() == before


async def test_it_may_be_asked_to_end_in_order(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with pytest.raises(ChainFailed, match="longer than"):
        await run(sh(f"trap 'echo bye > {said}; exit' TERM; while true; do sleep 0.05; done"), timeout_s=0.5)
    assert said.read_text() == "bye\n"


async def test_one_that_has_become_another_users_is_seen_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "killpg", refuse)
    async with asyncio.timeout(20):
        assert await run(["echo", "done"]) == "done"
    with pytest.raises(ChainFailed, match="longer than"):
        await run(["sleep", "3"], timeout_s=0.1)
