"""Logs: a state machine over writers, readers and slots; then the single promises."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from pingpong_bus.errors import BusError, LogClosed, LogFull, SlabFull, StreamGone
from pingpong_bus.messages import StreamRef
from pingpong_bus.slab import MAX_GENERATION, LogState, Slab, pack_word
from pingpong_bus.token_log import LogView, TokenLogReader, TokenLogWriter

SLOTS, CAPACITY = 3, 8
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=4)


class Log:
    """What a log should be, and who has it open."""

    def __init__(self, stream: StreamRef, slab: Slab) -> None:
        self.stream = stream
        self.ids: list[int] = []
        self.state = LogState.OPEN
        self.end: tuple[str | None, int | None] = (None, None)
        self.gone = False
        self.writer = TokenLogWriter(slab, stream)
        self.reader = TokenLogReader(slab, stream)


class LogMachine(RuleBasedStateMachine):
    """Three slots near the end of their generations, used by many logs one after the other."""

    logs = Bundle("logs")

    @initialize(target=logs)
    def begin(self) -> Log:
        self.slab = Slab.create(SLOTS, CAPACITY)
        for slot in range(SLOTS):
            self.slab.words[self.slab.word_index(slot)] = pack_word(MAX_GENERATION - slot, LogState.FREE, 0)
        self.live: list[Log] = []
        self.gone: list[Log] = []
        return self.allocate()

    @rule(target=logs)
    @precondition(lambda self: len(self.live) < SLOTS)
    def allocate(self) -> Log:
        log = Log(self.slab.allocate(), self.slab)
        assert 1 <= log.stream.generation <= MAX_GENERATION
        self.live.append(log)
        return log

    @rule()
    @precondition(lambda self: len(self.live) == SLOTS)
    def allocate_too_many(self) -> None:
        with pytest.raises(SlabFull):
            self.slab.allocate()

    @rule(log=logs, ids=token_ids)
    def append(self, log: Log, ids: list[int]) -> None:
        if log.gone:
            with pytest.raises(StreamGone):
                log.writer.append(ids)
        elif log.state is not LogState.OPEN:
            with pytest.raises(LogClosed):
                log.writer.append(ids)
        elif len(log.ids) + len(ids) > CAPACITY:
            with pytest.raises(LogFull):
                log.writer.append(ids)
        else:
            assert log.writer.append(ids) == len(log.ids)
            log.ids += ids

    @rule(log=logs, ids=token_ids)
    def append_an_id_that_is_none(self, log: Log, ids: list[int]) -> None:
        for wrong in (-1, 2**32):
            with pytest.raises(OverflowError):
                log.writer.append([*ids, wrong])

    @rule(log=logs, reason=st.sampled_from(["stop", "length"]), stop=st.none() | st.integers(0, 2**32 - 1))
    def close(self, log: Log, reason: str, stop: int | None) -> None:
        if log.gone or log.state is not LogState.OPEN:
            with pytest.raises((StreamGone, LogClosed)):
                log.writer.close(reason, stop)  # type: ignore[arg-type]
        else:
            log.writer.close(reason, stop)  # type: ignore[arg-type]
            log.state, log.end = LogState.CLOSED, (reason, stop)

    @rule(log=logs)
    def abort(self, log: Log) -> None:
        if log.gone or log.state is not LogState.OPEN:
            with pytest.raises((StreamGone, LogClosed)):
                log.writer.abort()
        else:
            log.writer.abort()
            log.state = LogState.ABORTED

    @rule(log=logs, ids=token_ids)
    def lose_the_writer_before_its_commit(self, log: Log, ids: list[int]) -> None:
        """Its ids are in the memory and nothing says so; the next writer writes over them."""
        if log.gone or log.state is not LogState.OPEN:
            with pytest.raises((StreamGone, LogClosed)):
                TokenLogWriter(self.slab, log.stream)
            return
        at = self.slab.ids_index(log.stream.slot) + len(log.ids)
        for offset, token in enumerate(ids[: CAPACITY - len(log.ids)]):
            self.slab.ids[at + offset] = token
        log.writer = TokenLogWriter(self.slab, log.stream)
        assert log.writer.count == len(log.ids)

    @rule(log=consumes(logs))
    def free(self, log: Log) -> None:
        if log.gone:
            with pytest.raises(StreamGone):
                self.slab.free(log.stream)
            return
        self.slab.free(log.stream)
        log.gone = True
        self.live.remove(log)
        self.gone.append(log)

    @rule(log=logs, start=st.integers(0, CAPACITY + 1))
    def read_from(self, log: Log, start: int) -> None:
        if not log.gone:
            assert log.reader.read(start).ids == log.ids[start:]

    @invariant()
    def every_reader_sees_its_log_or_that_it_is_gone(self) -> None:
        if not hasattr(self, "slab"):
            return
        assert self.slab.free_slots == SLOTS - len(self.live)
        for log in self.live:
            expected = LogView(log.ids, 0, len(log.ids), log.state, *log.end)  # type: ignore[arg-type]
            assert log.reader.read() == TokenLogReader(self.slab, log.stream).read() == expected
            assert log.reader.peek() == (len(log.ids), log.state)
        for log in self.gone:
            for look in (log.reader.peek, log.reader.read):
                with pytest.raises(StreamGone):
                    look()
            with pytest.raises(StreamGone):
                TokenLogReader(self.slab, log.stream)

    def teardown(self) -> None:
        if hasattr(self, "slab"):
            self.slab.close()


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(SLOTS, CAPACITY) as made:
        yield made


def test_neighbouring_logs_do_not_touch(slab: Slab) -> None:
    streams = [slab.allocate() for _ in range(SLOTS)]
    for stream in streams:
        TokenLogWriter(slab, stream).append([2**32 - 1 - stream.slot] * CAPACITY)
    for stream in streams:
        view = TokenLogReader(slab, stream).read()
        assert view.ids == [2**32 - 1 - stream.slot] * CAPACITY
        assert view.state is LogState.OPEN


def test_a_writer_that_wakes_up_in_a_reused_slot_writes_nothing(slab: Slab) -> None:
    old = slab.allocate()
    sleeper = TokenLogWriter(slab, old)
    sleeper.append([1, 2])
    slab.free(old)
    new = next(stream for stream in (slab.allocate() for _ in range(SLOTS)) if stream.slot == old.slot)
    for attempt in (lambda: sleeper.append([3]), lambda: sleeper.close("stop"), sleeper.abort):
        with pytest.raises(StreamGone, match=f"Generation {old.generation} of slot {old.slot}"):
            attempt()
    assert TokenLogReader(slab, new).read() == LogView([], 0, 0, LogState.OPEN)


def test_a_second_writer_is_noticed(slab: Slab) -> None:
    stream = slab.allocate()
    first, second = TokenLogWriter(slab, stream), TokenLogWriter(slab, stream)
    second.append([1])
    with pytest.raises(BusError, match="second writer"):
        first.append([2])
    assert TokenLogReader(slab, stream).read().ids == [1]


def test_a_slot_reused_while_it_is_copied_is_noticed(slab: Slab) -> None:
    stream = slab.allocate()
    TokenLogWriter(slab, stream).append([1, 2, 3])
    reader = TokenLogReader(slab, stream)

    class ReusedDuringCopy:
        """Stands in for the memory: its owner moves on between the reader's two looks at the word."""

        def __getitem__(self, where: slice) -> memoryview:
            copied = ids[where]
            slab.words[slab.word_index(stream.slot)] = pack_word(stream.generation + 1, LogState.OPEN, 3)
            return copied

    ids, slab.ids = slab.ids, ReusedDuringCopy()  # type: ignore[assignment]
    try:
        with pytest.raises(StreamGone):
            reader.read()
    finally:
        slab.ids = ids


def test_the_close_record_of_an_earlier_log_is_not_seen(slab: Slab) -> None:
    for _ in range(SLOTS):
        stream = slab.allocate()
        TokenLogWriter(slab, stream).close("length", 7)
        slab.free(stream)
    stream = slab.allocate()
    assert TokenLogReader(slab, stream).read().finish_reason is None
    TokenLogWriter(slab, stream).abort()
    assert TokenLogReader(slab, stream).read() == LogView([], 0, 0, LogState.ABORTED)


def test_the_writer_leaves_its_pid(slab: Slab) -> None:
    stream = slab.allocate()
    assert slab.writer_pid(stream) == 0
    TokenLogWriter(slab, stream)
    assert slab.writer_pid(stream) == os.getpid()


def test_a_stop_token_that_is_no_uint32_changes_nothing(slab: Slab) -> None:
    stream = slab.allocate()
    writer = TokenLogWriter(slab, stream)
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            writer.close("stop", wrong)
    assert TokenLogReader(slab, stream).peek() == (0, LogState.OPEN)


def test_a_negative_start_is_refused(slab: Slab) -> None:
    stream = slab.allocate()
    TokenLogWriter(slab, stream).append([1, 2])
    with pytest.raises(ValueError, match="start"):
        TokenLogReader(slab, stream).read(-1)
