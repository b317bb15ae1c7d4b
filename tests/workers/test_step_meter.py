"""What is counted of an engine's work, and how long its next output is said to take."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.errors import EngineError
from pingpong_bus.messages import DraftCounts, Sampling, SessionKind
from pingpong_worker.engine import OutputTokens
from pingpong_worker.metered_session import MeteredSession
from pingpong_worker.step_meter import StepMeter


def after_prefills(meter: StepMeter, tokens: int, seconds: float, count: int = 1, *, cached: int = 0) -> None:
    """Prompts of `tokens`, of which `cached` need not be computed, each alone in the engine."""
    for _ in range(count):
        submission = meter.submitted(tokens, 0.0)
        meter.output(submission, seconds, computed=tokens - cached)
        meter.ended(submission, 0.0)


def after_decode(meter: StepMeter, seconds: float, count: int) -> None:
    submission = meter.submitted(1, 0.0)
    for step in range(count + 1):
        meter.output(submission, step * seconds)
    meter.ended(submission, 0.0)


def predicted_s(meter: StepMeter, tokens: int, *others: int) -> float:
    """For a prompt of `tokens` beside other prompts."""
    submissions = [meter.submitted(count, 0.0) for count in (tokens, *others)]
    predicted = meter.predicted_step_ms / 1000
    for submission in submissions:
        meter.ended(submission, 0.0)
    return predicted


def test_an_idle_engine_waits_for_nothing() -> None:
    meter = StepMeter()
    assert (meter.steps, meter.waiting, meter.predicted_step_ms) == (0, 0, 0.0)
    after_prefills(meter, 500, 1.0)
    assert (meter.steps, meter.waiting, meter.predicted_step_ms) == (1, 0, 0.0)


def test_before_anything_is_known_the_time_is_generous() -> None:
    assert predicted_s(StepMeter(), 6000) >= 60
    assert predicted_s(StepMeter(), 1) >= 1


def test_outputs_count_by_their_tokens_and_at_least_once() -> None:
    meter = StepMeter()
    submission = meter.submitted(5, 0.0)
    steps = []
    for tokens in (1, 4, 0):
        meter.output(submission, 1.0, tokens=tokens)
        steps.append(meter.steps)
    assert steps == [1, 5, 6]
    assert meter.waiting == 1
    meter.ended(submission, 0.0)
    meter.ended(submission, 0.0)
    assert meter.waiting == 0


def test_all_that_is_not_computed_counts() -> None:
    meter = StepMeter()
    after_prefills(meter, 1000, 1.0, 50)
    after_decode(meter, 0.02, 100)
    assert predicted_s(meter, 4000) == pytest.approx(4.02, rel=0.1)
    assert predicted_s(meter, 4000, 2000) == pytest.approx(6.02, rel=0.1)
    submission = meter.submitted(4000, 0.0)
    meter.output(submission, 4.0)
    assert meter.predicted_step_ms == pytest.approx(20, rel=0.1), "its prompt is through"
    meter.ended(submission, 0.0)


def test_what_the_cache_held_makes_no_engine_fast() -> None:
    meter = StepMeter()
    after_prefills(meter, 1000, 1.0, 5)
    cold = predicted_s(meter, 8000)
    after_prefills(meter, 8000, 0.02, 500, cached=7984)
    for _ in range(500):  # appends, of which nobody says what was found
        submission = meter.submitted(8000, 0.0)
        meter.output(submission, 0.02)
        meter.ended(submission, 0.0)
    assert predicted_s(meter, 8000) == cold


def test_a_prompt_that_waits_behind_others_says_nothing_of_their_speed() -> None:
    meter = StepMeter()
    after_prefills(meter, 1000, 1.0, 5)
    before = predicted_s(meter, 8000)
    running = meter.submitted(1, 0.0)
    queued = meter.submitted(100, 0.0)
    for second in range(100):
        meter.output(running, second)
    meter.output(queued, 100.0, computed=100)
    meter.ended(running, 0.0)
    meter.ended(queued, 0.0)
    assert predicted_s(meter, 8000) <= before + 1.0


def test_slower_is_learnt_at_once_and_faster_slowly() -> None:
    meter = StepMeter()
    after_decode(meter, 0.01, 100)
    after_decode(meter, 0.03, 5)
    slow = predicted_s(meter, 0)
    assert slow > 0.028
    after_decode(meter, 0.01, 10)
    assert slow > predicted_s(meter, 0) > 0.02


def test_one_sleep_of_the_machine_is_soon_forgotten() -> None:
    meter = StepMeter()
    after_decode(meter, 0.01, 100)
    after_decode(meter, 3600.0, 1)
    assert predicted_s(meter, 0) < 0.03


@given(
    st.lists(st.tuples(st.sampled_from(["submit", "output", "end"]), st.integers(0, 5), st.integers(0, 9000))),
    st.lists(st.floats(0, 1e5), min_size=1),
)
def test_whatever_happens_the_numbers_make_sense(work: list[tuple[str, int, int]], gaps: list[float]) -> None:
    meter = StepMeter()
    open_ones = []
    now = 0.0
    steps = 0
    for (kind, which, tokens), gap in zip(work, itertools.cycle(gaps)):
        now += gap
        if kind == "submit":
            open_ones.append(meter.submitted(tokens, now))
        elif open_ones and kind == "output":
            meter.output(open_ones[which % len(open_ones)], now, computed=tokens or None)
            steps += 1
        elif open_ones:
            meter.ended(open_ones.pop(which % len(open_ones)), now)
        assert meter.waiting == len(open_ones)
        assert meter.steps == steps
        assert meter.predicted_step_ms >= 0
        assert open_ones or meter.predicted_step_ms == 0


# ------------------------------------------------------------------------------------------------------------- sessions


class Script:
    """A session that answers when it is let."""

    def __init__(self, kind: SessionKind, outputs: Sequence[OutputTokens]) -> None:
        self.kind: SessionKind = kind
        self.go = asyncio.Semaphore(0)
        self.error: EngineError | None = None
        self._outputs = outputs

    async def append(self, ids: Sequence[int]) -> None:
        await self._pass()

    async def finalize(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[OutputTokens, None]:
        for tokens in self._outputs:
            await self._pass()
            yield tokens

    async def abort(self) -> None: ...

    async def _pass(self) -> None:
        await self.go.acquire()
        if self.error:
            raise self.error


SAMPLING = Sampling(max_tokens=4)


async def test_sessions_count_what_they_are_given_and_what_comes_back() -> None:
    meter = StepMeter()
    script = Script("prefix-cache", [OutputTokens([1, 2], cached_tokens=3), OutputTokens([3], "length")])
    session = MeteredSession(script, meter)
    assert session.kind == "prefix-cache"
    append = asyncio.create_task(session.append([1] * 600))
    await asyncio.sleep(0)
    assert (meter.waiting, meter.steps) == (1, 0)
    assert meter.predicted_step_ms > 6000
    script.go.release()
    await append
    assert (meter.waiting, meter.steps) == (0, 1), "a session that reads waits for nothing"
    outputs = session.finalize([2], SAMPLING)
    for waiting, steps in ((1, 3), (1, 4)):
        script.go.release()
        await anext(outputs)
        assert (meter.waiting, meter.steps) == (waiting, steps)
    with pytest.raises(StopAsyncIteration):
        await anext(outputs)
    assert meter.waiting == 0


async def test_what_a_cancelled_append_did_not_compute_is_left_to_finalize() -> None:
    meter = StepMeter()
    session = MeteredSession(Script("streaming-input", [OutputTokens([1])]), meter)
    append = asyncio.create_task(session.append([1] * 600))
    await asyncio.sleep(0)
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    assert meter.waiting == 0
    async with aclosing(session.finalize([2], SAMPLING)) as outputs:
        first = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0)
        assert meter.predicted_step_ms > 6000
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    assert meter.waiting == 0


async def test_failures_end_what_waits() -> None:
    meter = StepMeter()
    script = Script("prefix-cache", [OutputTokens([1])])
    session = MeteredSession(script, meter)
    script.error = EngineError("it burns.")
    script.go.release()
    with pytest.raises(EngineError):
        await session.append([1])
    script.go.release()
    with pytest.raises(EngineError):
        await anext(session.finalize([1], SAMPLING))
    assert (meter.waiting, meter.steps) == (0, 0)


def test_tokens_that_one_step_gave_together_are_one_wait() -> None:
    meter = StepMeter()
    answer = meter.submitted(10, 0.0, context=10)
    meter.output(answer, 1.0)
    meter.output(answer, 1.02, tokens=5, steps=1)
    meter.output(answer, 1.06, tokens=4, steps=2)  # two steps, merged
    (cell,) = meter.take_counts()
    assert sum(cell.buckets.values()) == 3
    assert cell.worst_ms == pytest.approx(40)
    assert cell.total_ms == pytest.approx(60)


@pytest.mark.parametrize(
    ("outputs", "waits"),
    [
        (
            [
                OutputTokens([1]),
                OutputTokens([2, 3, 4], drafts=DraftCounts(steps=2, drafted=2, accepted=2)),
                OutputTokens([5, 6, 7], drafts=DraftCounts(steps=4, drafted=3, accepted=3)),
                OutputTokens([8], "length", drafts=DraftCounts(steps=5, drafted=3, accepted=3)),
            ],
            4,  # one, two merged ones, and one
        ),
        (
            [
                OutputTokens([1]),
                OutputTokens([2]),
                OutputTokens([3, 4, 5]),  # three steps, merged, before anything is guessed for it
                OutputTokens([6, 7, 8], "length", drafts=DraftCounts(steps=6, drafted=2, accepted=2)),
            ],
            5,
        ),
    ],
)
async def test_a_session_with_guesses_counts_steps_as_waits(outputs: list[OutputTokens], waits: int) -> None:
    meter = StepMeter()
    script = Script("prefix-cache", outputs)
    session = MeteredSession(script, meter)
    for _ in outputs:
        script.go.release()
    async with aclosing(session.finalize([9], SAMPLING)) as answer:
        assert [token async for output in answer for token in output.ids] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sum(sum(cell.buckets.values()) for cell in meter.take_counts()) == waits
