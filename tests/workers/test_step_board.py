"""The board between scheduler and worker: what is posted is read, never torn, and outlives its name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pingpong_bus.messages import SchedulerState
from pingpong_worker.step_board import STEP_BOARD, BoardWriter, CollectionsSlot, StepBoard
from pingpong_worker.step_prices import StepPrices

HANG_S = 30


def state(number: int) -> SchedulerState:
    """One in which every figure follows from the number."""
    return SchedulerState(
        steps=number,
        step_ms=number * 0.5,
        decode_ms=number * 0.25,
        target_ms=number * 2.0,
        budget_tokens=number % 7,
        reason="x" * (number % 40),
        append_tokens=number * 3,
        withheld_steps=number + 1,
    )


def prices() -> StepPrices:
    learnt = StepPrices([1, 8])
    learnt.learn(1, 10, 8e-3, "decodes")
    learnt.learn(5, 10, 9e-3, "beside")
    return learnt


def test_what_is_posted_is_read(tmp_path: Path) -> None:
    path = tmp_path / "board"
    board = StepBoard(path)
    assert board.state() is None
    assert board.prices() is None
    writer = BoardWriter(path)
    assert writer.prices() is None
    path.unlink()  # the name is for the start only
    for number in (1, 2, 39):
        writer.post(state(number), prices())
        assert board.state() == state(number)
    assert board.prices() == prices().to_dict()


COLLECTS = """
import gc, os, sys
from pathlib import Path
from pingpong_worker.garbage_watch import collections_of_this_process
from pingpong_worker.step_board import CollectionsSlot
watch = collections_of_this_process()
watch.tell = CollectionsSlot(Path(sys.argv[1])).write
garbage = [[] for _ in range(100_000)]
gc.collect()
print(watch.total_ms, flush=True)
os._exit(0)  # the interpreter's end collects, too
"""


def test_collections_in_all_processes_of_an_engine_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "board"
    board = StepBoard(path)
    writer = BoardWriter(path)
    writer.post(state(3), prices())
    children = [
        subprocess.Popen([sys.executable, "-c", COLLECTS, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    took = [float(child.communicate(timeout=HANG_S)[0]) for child in children]
    assert min(took) > 0
    shown = board.state()
    assert shown is not None
    assert shown.gc_ms == pytest.approx(sum(took))
    assert board.prices() == prices().to_dict(), "the slots are beside the notes"


def test_more_processes_than_slots_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "board"
    board = StepBoard(path)
    BoardWriter(path).post(state(3), prices())
    for _ in range(256):
        CollectionsSlot(path).write(1.0)
    CollectionsSlot(path).write(50.0)
    shown = board.state()
    assert shown is not None
    assert shown.gc_ms == 256
    with pytest.raises(OSError, match="gone"):
        CollectionsSlot(tmp_path / "gone")


def test_the_worker_offers_prices_to_start_with(tmp_path: Path) -> None:
    board = StepBoard(tmp_path / "board")
    board.offer_prices(prices().to_dict())
    known = BoardWriter(tmp_path / "board").prices()
    assert known == prices().to_dict()
    assert StepPrices.from_dict(known, [1, 8]).price(1, 10, "decodes") == pytest.approx(8e-3)


def test_prices_are_posted_now_and_then(tmp_path: Path) -> None:
    board = StepBoard(tmp_path / "board")
    writer = BoardWriter(tmp_path / "board")
    learnt = prices()
    writer.post(state(1), learnt)
    learnt.learn(5, 10, 12e-3, "beside")
    for number in range(300):
        writer.post(state(number), learnt)
    assert board.prices() == learnt.to_dict()


def test_the_environment_names_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STEP_BOARD, raising=False)
    assert BoardWriter.open_from_environment() is None
    board = StepBoard(tmp_path / "board")
    monkeypatch.setenv(STEP_BOARD, str(tmp_path / "board"))
    writer = BoardWriter.open_from_environment()
    assert writer is not None
    writer.post(state(5), prices())
    assert board.state() == state(5)


def test_a_board_is_made_once_and_for_this_user(tmp_path: Path) -> None:
    StepBoard(tmp_path / "board")
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        StepBoard(tmp_path / "board")
    with pytest.raises(FileNotFoundError):
        BoardWriter(tmp_path / "other")


def test_a_writer_that_died_in_the_middle_leaves_the_last_state(tmp_path: Path) -> None:
    board = StepBoard(tmp_path / "board")
    writer = BoardWriter(tmp_path / "board")
    writer.post(state(3), prices())
    assert board.state() == state(3)
    writer._state._words[0] |= 1  # as between the first store and the last
    assert board.state() == state(3)
    writer.post(state(4), prices())
    assert board.state() == state(4)


WRITER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from test_step_board import prices, state
from pingpong_worker.step_board import BoardWriter
writer = BoardWriter(Path(sys.argv[1]))
learnt = prices()
number = 0
while not Path(sys.argv[2]).exists():
    number += 1
    writer.post(state(number), learnt)
print(number)
"""


def test_no_state_is_torn_while_another_process_writes(tmp_path: Path) -> None:
    board = StepBoard(tmp_path / "board")
    code = WRITER.format(path=[str(Path(__file__).parent)])
    command = [sys.executable, "-c", code, str(tmp_path / "board"), str(tmp_path / "enough")]
    process = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.PIPE)
    deadline = time.monotonic() + HANG_S
    try:
        seen = set()
        while len(seen) < 1000:
            assert time.monotonic() < deadline
            found = board.state()
            if found is not None:
                assert found == state(found.steps)
                seen.add(found.steps)
        (tmp_path / "enough").touch()
        written, _ = process.communicate(timeout=HANG_S)
        assert board.state() == state(int(written))
    finally:
        process.kill()
        process.communicate()
