"""The chunk policy, driven by random arrivals and random append times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pingpong_worker.chunk_policy import Append, AppendPace, Finalize, PromptProgress, Wait, decide


def progress(**changes: object) -> PromptProgress:
    usual = {
        "pending": 100,
        "sent": 500,
        "in_flight": False,
        "complete": False,
        "literal_tail": True,
        "remaining": None,
    }
    return PromptProgress(**{**usual, **changes})  # type: ignore[arg-type]


class TestOneDecision:
    def test_first_append_takes_the_static_prefix_at_once(self) -> None:
        assert decide(progress(sent=0, pending=3), AppendPace(), 32, 1) == Append(3)

    def test_complete_prompt_is_finalized_without_an_append(self) -> None:
        assert decide(progress(sent=0, complete=True, literal_tail=False), AppendPace(), 32, 1) == Finalize()

    def test_finalize_overtakes_an_append(self) -> None:
        assert decide(progress(complete=True, in_flight=True, literal_tail=False), AppendPace(), 32, 1) == Finalize()

    def test_one_append_at_a_time(self) -> None:
        assert decide(progress(in_flight=True), AppendPace(), 32, 1) == Wait()

    def test_later_appends_are_coalesced(self) -> None:
        assert decide(progress(pending=31), AppendPace(), 32, 1) == Wait()
        assert decide(progress(pending=32), AppendPace(), 32, 1) == Append(32)

    def test_a_token_is_kept_back_where_nothing_else_is_sure_to_follow(self) -> None:
        assert decide(progress(pending=33, literal_tail=False), AppendPace(), 32, 1) == Append(32)
        assert decide(progress(sent=0, pending=1, literal_tail=False), AppendPace(), 32, 1) == Wait()

    def test_no_append_that_would_still_be_computed_at_the_end(self) -> None:
        pace = AppendPace(tokens=32, arrivals=4)
        assert decide(progress(pending=32, remaining=5), pace, 32, 1) == Wait()
        assert decide(progress(pending=32, remaining=6), pace, 32, 1) == Append(32)
        assert decide(progress(pending=64, remaining=8), pace, 32, 1) == Wait()

    def test_a_smaller_append_at_the_last_moment(self) -> None:
        pace = AppendPace(tokens=32, arrivals=4)
        decisions = {left: decide(progress(pending=40 - left, remaining=left), pace, 64, 1) for left in range(40)}
        assert {left: decision.tokens for left, decision in decisions.items() if isinstance(decision, Append)} == {
            7: 33,
            8: 32,
        }

    def test_a_handful_of_tokens_is_left_to_finalize(self) -> None:
        pace = AppendPace(tokens=32, arrivals=2)
        assert decide(progress(pending=8, remaining=5), pace, 32, 1) == Append(8)
        assert decide(progress(pending=7, remaining=5), pace, 32, 1) == Wait()

    def test_no_small_append_while_a_full_one_can_still_come_in_time(self) -> None:
        pace = AppendPace(tokens=32, arrivals=4)
        assert decide(progress(pending=28, remaining=11), pace, 32, 1) == Wait()
        assert decide(progress(pending=32, remaining=7), pace, 32, 1) == Append(32)

    def test_appends_end_with_a_block(self) -> None:
        assert decide(progress(sent=0, pending=100), AppendPace(), 32, 16) == Append(96)
        assert decide(progress(sent=0, pending=15), AppendPace(), 32, 16) == Wait()
        assert decide(progress(sent=96, pending=47), AppendPace(), 32, 16) == Append(32)
        assert decide(progress(sent=96, pending=33, literal_tail=False), AppendPace(), 32, 16) == Append(32)
        assert decide(progress(sent=96, pending=32, literal_tail=False), AppendPace(), 32, 16) == Wait()

    def test_the_last_append_is_timed_to_end_just_before_the_upstream(self) -> None:
        """An append takes 16 ms and 4 in reserve, which is 2.3 tokens of 8.6 ms."""
        pace = AppendPace(tokens=32, arrivals=2, ms=16.0)
        left = [left for left in range(20) if self._appends(pace, left, pending=31)]
        assert left == [3]
        left = [left for left in range(20) if self._appends(pace, left, pending=32)]
        assert left == [3, *range(11, 20)]  # full: at once, where another one could follow
        assert not any(self._appends(pace, left, pending=7) for left in range(20))

    def test_slow_appends_and_late_ones_are_not_begun(self) -> None:
        slow = AppendPace(tokens=32, arrivals=9, ms=80.0)
        assert [left for left in range(13) if self._appends(slow, left, pending=31)] == [12]
        assert self._appends(slow, 40, pending=64)
        assert not self._appends(slow, 22, pending=64)  # takes twice as long

    def test_the_static_prefix_says_nothing_of_what_a_small_append_takes(self) -> None:
        pace = AppendPace(tokens=4096, arrivals=24, ms=206.0)
        assert pace.ms_of(32) is None
        assert self._appends(pace, 6, pending=32)
        assert AppendPace().ms_of(32) is None

    @staticmethod
    def _appends(pace: AppendPace, left: int, *, pending: int) -> bool:
        return isinstance(decide(progress(pending=pending, remaining=left, token_ms=8.6), pace, 32, 1), Append)

    def test_estimate_scales_down_from_the_static_prefix(self) -> None:
        assert AppendPace(tokens=1000, arrivals=40).arrivals_during(32) == 3
        assert AppendPace(tokens=32, arrivals=4).arrivals_during(64) == 7
        assert AppendPace(tokens=32, arrivals=1).arrivals_during(64) == 1
        assert AppendPace(tokens=1000, arrivals=0).arrivals_during(32) == 1
        assert AppendPace().arrivals_during(32) == 1


def idle_before_the_end(step_ms: float, prefix_ms: float, append_ms: list[float]) -> float:
    """How long no append has run when an upstream of 256 tokens ends; negative: how long one still has to.

    Args:
        step_ms: of the upstream.
        prefix_ms: that the static prefix of 4096 tokens takes.
        append_ms: that later appends take, in turn.
    """
    sent, busy_until, count, pace = 0, 0.0, 0, AppendPace()
    begun, size, seen = 0.0, 0, 0
    for arrived in range(257):
        now = arrived * step_ms
        if size and busy_until <= now:
            pace, size = AppendPace(size, arrived - seen, busy_until - begun), 0
        left = 256 - arrived
        state = progress(
            pending=4096 + arrived - sent,
            sent=sent,
            in_flight=size > 0,
            remaining=left,
            token_ms=step_ms if now else None,
        )
        if left and isinstance(decision := decide(state, pace, 32, 16), Append):
            begun, size, seen = now, decision.tokens, arrived
            busy_until = now + (append_ms[count % len(append_ms)] if sent else prefix_ms)
            count += bool(sent)
            sent += size
    return 256 * step_ms - busy_until


@given(st.lists(st.floats(14.5, 19.0), min_size=1, max_size=9), st.lists(st.floats(20.0, 25.0), min_size=1, max_size=9))
def test_on_an_h200_the_last_append_ends_in_the_last_steps(short: list[float], long: list[float]) -> None:
    """Times of 4,096 and of 12,288 tokens of context, as measured."""
    assert -1.0 < idle_before_the_end(8.6, 206.0, short) < 2.5 * 8.6
    assert -1.0 < idle_before_the_end(8.95, 656.0, long) < 2.5 * 8.95


@given(
    static=st.integers(0, 300),
    expected=st.integers(1, 200),
    stops_at=st.integers(0, 200),
    tail=st.integers(0, 20),
    append_tokens=st.integers(1, 64),
    align=st.sampled_from([1, 16]),
    knows_length=st.booleans(),
    token_ms=st.none() | st.floats(0, 100),
    append_ms=st.floats(0, 1000),
    moments=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=80),
)
def test_every_schedule_sends_each_token_once_and_leaves_one_for_finalize(
    static: int,
    expected: int,
    stops_at: int,
    tail: int,
    append_tokens: int,
    align: int,
    knows_length: bool,
    token_ms: float | None,
    append_ms: float,
    moments: list[tuple[int, bool]],
) -> None:
    """A moment: so many upstream tokens arrive, and whether the append in flight is done then."""
    length = min(expected, stops_at)
    arrived = sent = 0
    in_flight = False
    pace = AppendPace()
    finalized: list[int] = []
    for tokens, done in [*moments, (length, True), (0, True)]:
        arrived = min(length, arrived + tokens)
        if done:
            in_flight = False
        complete = arrived == length
        known = static + arrived + (tail if complete else 0)
        seen = PromptProgress(
            pending=known - sent,
            sent=sent,
            in_flight=in_flight,
            complete=complete,
            literal_tail=tail > 0,
            remaining=expected - arrived if knows_length else None,
            token_ms=token_ms,
        )
        match decide(seen, pace, append_tokens, align):
            case Append(count):
                assert not in_flight
                assert 1 <= count <= known - sent
                assert sent == 0 or count >= append_tokens or knows_length
                sent += count
                assert sent % align == 0
                in_flight = True
                pace = AppendPace(count, tokens, append_ms)
            case Finalize():
                finalized.append(known - sent)
                break
            case Wait():
                assert not complete
    total = static + length + tail
    assert finalized == [total - sent]
    assert total == 0 or finalized[0] >= 1
