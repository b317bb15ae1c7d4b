"""Steps are run as they are allowed: attempts, how many at once, limits of output, and no secrets in errors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pingpong_bus.chain import Agent, Extract
from pingpong_bus.errors import ChainFailed
from pingpongd.config import CallConfig
from pingpongd.step_runner import StepRunner, StepWork


@pytest.fixture
async def runner() -> AsyncIterator[StepRunner]:
    runner = StepRunner({}, {"PATH": os.environ["PATH"], "KEY": "very-secret"})
    yield runner
    await runner.close()


def sh(script: str, *arguments: str) -> list[str]:
    return ["sh", "-c", script, "sh", *arguments]


def work(text: str = "", *, call: str = "x", max_chars: int = 100) -> StepWork:
    return StepWork("0badcafe", Agent(name="step", input="i", call=call, max_chars=max_chars), text)


def nothing() -> None:
    pass


async def test_a_call_gets_its_input_and_a_name_of_its_own(runner: StepRunner) -> None:
    runner.configure({"x": CallConfig(command=sh('cat; printf " %s" "$PINGPONG_STEP"'))})
    assert await runner.run(work("in"), nothing) == "in 0badcafe/step"


async def test_an_extract_step(runner: StepRunner) -> None:
    step = StepWork("0badcafe", Agent(name="s", input="i", extract=Extract(json="$.a")), 'x {"a": "b"}')
    began: list[int] = []
    assert await runner.run(step, lambda: began.append(1)) == "b"
    assert began == [1]


async def test_more_output_than_allowed_is_an_error(runner: StepRunner) -> None:
    runner.configure({"x": CallConfig(command=["cat"])})
    assert await runner.run(work("ü" * 100), nothing) == "ü" * 100
    with pytest.raises(ChainFailed, match="101 characters, and max_chars is 100"):
        await runner.run(work("a" * 101), nothing)
    with pytest.raises(ChainFailed, match="more than 404 bytes"):
        await runner.run(work("a" * 500), nothing)


async def test_it_is_tried_as_often_as_is_allowed(runner: StepRunner, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    script = f"echo x >> {tries}; test $(wc -l < {tries}) -ge 3 && echo third"
    runner.configure({"x": CallConfig(command=sh(script), attempts=3)})
    assert await runner.run(work(), nothing) == "third"
    tries.unlink()
    runner.configure({"x": CallConfig(command=sh(script), attempts=2)})
    with pytest.raises(ChainFailed, match=r'call "x" \(attempt 2 of 2\): it ended with exit code 1'):
        await runner.run(work(), nothing)
    assert tries.read_text() == "x\nx\n"


async def test_only_so_many_run_at_once_and_in_turn(runner: StepRunner, tmp_path: Path) -> None:
    go = tmp_path / "go"
    runner.configure({"x": CallConfig(command=sh(f"while [ ! -e {go} ]; do sleep 0.02; done; cat"), at_once=2)})
    began: list[int] = []

    def begin(number: int) -> asyncio.Task[str]:
        return asyncio.create_task(runner.run(work(str(number)), lambda: began.append(number)))

    tasks = [begin(number) for number in range(5)]
    async with asyncio.timeout(30):
        while len(began) < 2:
            await asyncio.sleep(0.01)
    tasks[2].cancel()  # which waits, and leaves the line
    await asyncio.sleep(0)
    assert began == [0, 1]
    go.touch()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() or task.result() for task in tasks] == ["0", "1", True, "3", "4"]
    assert began == [0, 1, 3, 4]
    assert await runner.run(work("again"), nothing) == "again"


async def test_those_that_wait_get_in_when_more_are_allowed(runner: StepRunner, tmp_path: Path) -> None:
    go = tmp_path / "go"
    command = sh(f"while [ ! -e {go} ]; do sleep 0.02; done; cat")
    runner.configure({"x": CallConfig(command=command, at_once=1)})
    began: list[int] = []
    tasks = [asyncio.create_task(runner.run(work(), lambda: began.append(1))) for _ in range(3)]
    async with asyncio.timeout(30):
        while len(began) < 1:
            await asyncio.sleep(0.01)
        runner.configure({"x": CallConfig(command=command, at_once=3)})
        while len(began) < 3:
            await asyncio.sleep(0.01)
    go.touch()
    await asyncio.gather(*tasks)


async def test_those_whose_call_is_no_more_wait_for_it_and_say_so(runner: StepRunner, tmp_path: Path) -> None:
    go = tmp_path / "go"
    runner.configure({"x": CallConfig(command=sh(f"while [ ! -e {go} ]; do sleep 0.02; done"), at_once=1)})
    began: list[int] = []
    told: list[str] = []
    runs = [asyncio.create_task(runner.run(work(), lambda: began.append(1), told.append)) for _ in range(2)]
    async with asyncio.timeout(30):
        while not began:
            await asyncio.sleep(0.01)
    runner.configure({})
    go.touch()
    assert await runs[0] == ""
    assert told[-1] == 'the call "x", which the daemon\'s configuration does not have any more'
    assert not runs[1].done()
    runner.configure({"x": CallConfig(command=["echo", "back"])})
    assert told[-1] == 'its turn at the call "x"'
    assert await runs[1] == "back"


async def test_no_other_attempt_is_made_at_a_call_that_is_no_more(runner: StepRunner, tmp_path: Path) -> None:
    runner.configure({"x": CallConfig(command=sh(f"echo >> {tmp_path}/tries; exit 1"), attempts=10)})
    told: list[str] = []
    run = asyncio.create_task(runner.run(work(), nothing, told.append))
    async with asyncio.timeout(30):
        while not (tmp_path / "tries").exists():
            await asyncio.sleep(0.01)
        runner.configure({})
        while "any more" not in told[-1]:
            await asyncio.sleep(0.01)
    tries = (tmp_path / "tries").read_text()
    runner.configure({"x": CallConfig(command=["echo", "mended"], attempts=10)})
    assert await run == "mended"
    assert (tmp_path / "tries").read_text() == tries


async def test_secrets_are_blotted_out_of_errors(runner: StepRunner) -> None:
    runner.configure(
        {"x": CallConfig(command=sh('echo "denied for $TOKEN" >&2; exit 1'), environment={"TOKEN": "$KEY"})}
    )
    with pytest.raises(ChainFailed, match=r"denied for \*\*\*") as caught:
        await runner.run(work(), nothing)
    assert "very-secret" not in str(caught.value)


async def test_secrets_of_a_call_that_runs_stay_secret_when_it_is_configured_anew(
    runner: StepRunner, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = f'while [ ! -e {go} ]; do sleep 0.02; done; echo "denied for $TOKEN" >&2; exit 1'
    runner.configure({"x": CallConfig(command=sh(script), environment={"TOKEN": "$KEY"})})
    began = asyncio.Event()
    task = asyncio.create_task(runner.run(work(), began.set))
    await began.wait()  # it is started in the turn that its beginning is told in
    runner.configure({"x": CallConfig(command=["true"], environment={"TOKEN": "another-one"})})
    go.touch()
    with pytest.raises(ChainFailed, match=r"denied for \*\*\*"):
        await task
