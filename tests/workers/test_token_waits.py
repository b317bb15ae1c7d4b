"""How long answers are said to have waited for their tokens, and beside what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.messages import StepCounts
from pingpong_bus.step_times import bucket_of
from pingpong_worker.step_meter import StepMeter, Submission
from pingpong_worker.token_waits import MAX_CELLS, TokenWaits, context_label, decodes_label


class Run:
    """A meter and its time, in ms."""

    def __init__(self) -> None:
        self.meter = StepMeter()
        self.ms = 0.0

    def wait(self, ms: float) -> None:
        self.ms += ms

    def begin(self, tokens: int = 10, *, append: bool = False) -> Submission:
        return self.meter.submitted(tokens, self.ms / 1e3, is_append=append, context=tokens)

    def give(self, *submissions: Submission, tokens: int = 1) -> None:
        """One step's outputs, one after the other."""
        for submission in submissions:
            self.meter.output(submission, self.ms / 1e3, tokens=tokens)
            self.ms += 0.05

    def end(self, submission: Submission) -> None:
        self.meter.ended(submission, self.ms / 1e3)

    def answer(self, tokens: int = 10) -> Submission:
        """One that is being decoded."""
        submission = self.begin(tokens)
        self.wait(100)
        self.give(submission)
        self.meter.take_counts()
        return submission

    def taken(self) -> dict[tuple[str, int, int], int]:
        """Tokens by cell."""
        return {(one.kind, one.decodes, one.context): sum(one.buckets.values()) for one in self.meter.take_counts()}


def test_a_first_token_is_no_wait_between_tokens() -> None:
    run = Run()
    answer = run.begin()
    run.wait(500)
    run.give(answer)
    assert run.meter.take_counts() == []
    for _ in range(3):
        run.wait(8)
        run.give(answer)
    (counts,) = run.meter.take_counts()
    assert counts.buckets == {bucket_of(8.05): 3}
    assert (counts.kind, counts.decodes, counts.context) == ("decode", 1, 0)
    assert counts.worst_ms == pytest.approx(8.05)
    assert counts.total_ms == pytest.approx(3 * 8.05)
    assert run.meter.take_counts() == [], "they were taken"


def test_what_comes_together_shares_the_wait_and_the_worst_is_the_whole() -> None:
    run = Run()
    answer = run.answer()
    run.wait(299.95)
    run.give(answer, tokens=30)
    (counts,) = run.meter.take_counts()
    assert counts == StepCounts(
        kind="decode",
        decodes=1,
        context=0,
        buckets={bucket_of(10): 30},
        worst_ms=pytest.approx(300),
        total_ms=pytest.approx(300),
    )


def test_a_stop_token_took_a_step_too() -> None:
    run = Run()
    answer = run.answer()
    run.wait(8)
    run.give(answer, tokens=0)
    assert run.taken() == {("decode", 1, 0): 1}


@pytest.mark.parametrize(("append", "kind"), [(True, "appends"), (False, "prompts")])
def test_a_wait_beside_a_prefill_is_told_apart(append: bool, kind: str) -> None:
    run = Run()
    answer = run.answer()
    other = run.begin(append=append)
    run.wait(20)
    run.give(answer)
    assert run.taken() == {(kind, 1, 0): 1}, "in flight"
    run.wait(10)
    run.give(other)
    run.end(other)
    run.wait(10)
    run.give(answer)
    assert run.taken() == {(kind, 1, 0): 1}, "in flight for half of the wait"
    run.wait(8)
    run.give(answer)
    assert run.taken() == {("decode", 1, 0): 1}


def test_a_prompt_counts_before_an_append() -> None:
    run = Run()
    answer = run.answer()
    run.begin(append=True)
    run.begin()
    run.wait(20)
    run.give(answer)
    assert run.taken() == {("prompts", 1, 0): 1}


@pytest.mark.parametrize("first", [True, False])
def test_what_was_answered_in_the_same_step_is_not_waited_for_again(first: bool) -> None:
    run = Run()
    answer, append = run.answer(), run.begin(append=True)
    run.wait(20)
    run.give(*((append, answer) if first else (answer, append)))
    run.end(append)
    assert run.taken() == {("appends", 1, 0): 1}
    run.wait(8)
    run.give(answer)
    assert run.taken() == {("decode", 1, 0): 1}


@pytest.mark.parametrize(("append", "kind"), [(True, "appends"), (False, "prompts")])
def test_what_is_given_up_still_rides_in_the_step_that_runs(append: bool, kind: str) -> None:
    run = Run()
    answer, other = run.answer(), run.begin(append=append)
    run.wait(2)
    run.end(other)
    kinds = []
    for _ in range(3):
        run.wait(8)
        run.give(answer)
        kinds += list(run.taken())
    assert kinds == [(kind, 1, 0), (kind, 1, 0), ("decode", 1, 0)]


def test_answers_are_counted_together_and_so_is_their_context() -> None:
    run = Run()
    answers = [run.answer(tokens=600) for _ in range(3)]
    run.give(*answers)
    assert run.taken() == {("decode", 3, 1024): 1, ("prompts", 3, 1024): 2}, "two waited beside the last one's prompt"
    run.wait(8)
    run.give(*answers)
    assert run.taken() == {("decode", 3, 1024): 3}
    run.end(answers.pop())
    run.wait(8)
    run.give(*answers)
    assert run.taken() == {("decode", 3, 1024): 2}, "the one that ended was in the step before"
    run.wait(8)
    run.give(*answers)
    assert run.taken() == {("decode", 2, 1024): 2}
    for answer in answers:
        run.end(answer)
    lonely = run.answer()
    run.wait(8)
    run.give(lonely)
    assert run.taken() == {("decode", 1, 0): 1}, "nothing is left of the others"


def test_an_answer_that_grows_moves_on_to_longer_contexts() -> None:
    run = Run()
    answer = run.answer(tokens=1000)
    for _ in range(30):
        run.wait(8)
        run.give(answer)
    assert run.taken() == {("decode", 1, 0): 23, ("decode", 1, 1024): 7}


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200_000)), max_size=300))
def test_memory_is_bounded_and_no_token_is_counted_twice(steps: list[tuple[int, int]]) -> None:
    waits = TokenWaits()
    for decodes, context in steps:
        waits.add("decode", decodes, context, 10.0, 1)
    counts = waits.take()
    assert len(counts) <= MAX_CELLS
    counted = sum(sum(one.buckets.values()) for one in counts)
    assert counted <= len(steps)
    if len({(decodes_label(decodes), context_label(context)) for decodes, context in steps}) <= MAX_CELLS:
        assert counted == len(steps)
    assert waits.take() == []


@given(st.integers(1, 5000), st.integers(0, 2_000_000))
def test_labels_are_the_least_of_their_cell_and_cells_double(decodes: int, context: int) -> None:
    label = decodes_label(decodes)
    assert label <= decodes <= max(1, 2 * (label - 1))
    assert decodes_label(label) == label
    least = context_label(context)
    assert least <= context < max(1024, 2 * least)
    assert context_label(least) == least


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "append", "give", "end"]), st.integers(0, 9), st.floats(0, 30)), max_size=80
    )
)
def test_whatever_happens_every_token_but_the_first_is_counted_once(steps: list[tuple[str, int, float]]) -> None:
    run, live, expected = Run(), list[tuple[Submission, bool]](), 0
    for what, which, ms in steps:
        run.wait(ms)
        if what in ("begin", "append"):
            live.append((run.begin(append=what == "append"), what == "append"))
        elif live and what == "give":
            submission, append = live[which % len(live)]
            expected += submission.answered and not append
            run.give(submission)
        elif live:
            run.end(live.pop(which % len(live))[0])
    for submission, _ in live:
        run.end(submission)
    counts = run.meter.take_counts()
    assert sum(sum(one.buckets.values()) for one in counts) == expected
    assert run.meter.waiting == 0
    after = run.answer()
    run.wait(8)
    run.give(after)
    run.wait(8)
    run.give(after)
    assert ("decode", 1, 0) in run.taken(), "nothing is left in flight"
