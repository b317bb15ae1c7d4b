"""In which order waiting chains start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pingpongd.chain_queue import ChainQueue

SECOND = 1_000_000_000
Add = Callable[..., None]


def waiting(*chains: dict[str, Any], aging_s: float = 30.0) -> ChainQueue:
    """Chains "0", "1", ... in the order of their arrival, at second 0 unless said otherwise."""
    queue = ChainQueue(aging_s)
    for name, given_ in enumerate(chains):
        arguments = {"priority": 0, "deadline_ns": None, "since_ns": 0, "slots": 1} | given_
        queue.add(str(name), **arguments)
    return queue


def order(queue: ChainQueue, now_ns: int = 0) -> str:
    found = []
    while (chain := queue.next(now_ns, 1_000_000)) is not None:
        found.append(chain)
    return "".join(found)


def test_first_come_first_served() -> None:
    assert order(waiting({"since_ns": 5}, {"since_ns": 3}, {"since_ns": 4}, {"since_ns": 3})) == "1320"


def test_the_higher_priority_goes_first_and_then_the_earlier_deadline() -> None:
    queue = waiting({"priority": 1}, {"priority": 2, "deadline_ns": 9}, {"priority": 2, "deadline_ns": 8}, {})
    assert order(queue) == "2103"


def test_no_deadline_is_the_last_one() -> None:
    assert order(waiting({}, {"deadline_ns": 10**18})) == "10"


def test_waiting_raises_the_priority() -> None:
    old = {"priority": -1, "since_ns": 0}
    assert order(waiting(old, {"priority": 1, "since_ns": 59 * SECOND})) == "10"
    assert order(waiting(old, {"priority": 1, "since_ns": 60 * SECOND})) == "01"  # two steps have passed: a tie
    assert order(waiting(old, {"priority": 1, "since_ns": 90 * SECOND})) == "01"


def test_chains_from_before_the_boot_count_too() -> None:
    assert order(waiting({"since_ns": -1}, {"since_ns": -40 * SECOND}, {"priority": 1, "since_ns": 0})) == "102"


def test_nobody_passes_a_chain_that_waits_for_many_logs() -> None:
    queue = waiting({"slots": 5}, {"slots": 1})
    assert queue.next(0, 4) is None
    assert len(queue) == 2
    assert queue.next(0, 5) == "0"
    assert queue.next(0, 0) is None
    assert queue.next(0, 1) == "1"


def test_past_its_deadline_a_chain_has_no_turn() -> None:
    queue = waiting({"deadline_ns": 10, "slots": 99}, {"deadline_ns": 20}, {"deadline_ns": 5})
    assert queue.position("1", 5) == 1
    assert queue.position("1", 10) == 0
    assert queue.next(10, 1) == "1"
    assert len(queue) == 2
    assert queue.expired(10) == ["2", "0"]
    assert queue.expired(10) == []
    assert len(queue) == 0


def test_one_that_left_is_gone_and_may_come_again() -> None:
    queue = waiting({"deadline_ns": 5}, {})
    queue.remove("0")
    queue.remove("0")
    queue.remove("unknown")
    assert "0" not in queue
    assert queue.expired(5) == []
    queue.add("0", priority=0, deadline_ns=7, since_ns=0, slots=1)
    assert queue.expired(6) == []
    assert "0" in queue
    assert order(queue) == "01"


def test_waiting_twice_is_an_error() -> None:
    queue = waiting({})
    with pytest.raises(ValueError, match="0 waits already"):
        queue.add("0", priority=0, deadline_ns=None, since_ns=0, slots=1)


def test_what_left_does_not_pile_up() -> None:
    queue = ChainQueue()
    for number in range(20_000):
        queue.add(str(number), priority=0, deadline_ns=number + 1, since_ns=number, slots=1)
        queue.remove(str(number - 5))
    assert len(queue) == 5
    assert len(queue._turns) < 200
    assert len(queue._deadlines) < 200
    assert [queue.next(0, 1) for _ in range(6)] == ["19995", "19996", "19997", "19998", "19999", None]


@given(st.lists(st.tuples(st.integers(-100, 100), st.integers(0, 600)), min_size=2, max_size=12))
def test_a_chain_is_overtaken_only_within_the_steps_of_its_lack_of_priority(chains: list[tuple[int, int]]) -> None:
    queue = waiting(*({"priority": priority, "since_ns": since * SECOND} for priority, since in chains), aging_s=30)
    found: list[int] = []
    while (chain := queue.next(0, 1)) is not None:
        found.append(int(chain))
    for at, winner in enumerate(found):
        for loser in found[at + 1 :]:
            steps = chains[winner][0] - chains[loser][0]
            assert chains[winner][1] - chains[loser][1] <= max(0, steps + 1) * 30


class QueueMachine(RuleBasedStateMachine):
    """The queue does what sorting all of it each time would do."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ChainQueue(10)
        self.model: dict[str, tuple[tuple[int, float, int, int], int | None, int]] = {}
        self.now = 0
        self.count = 0

    @rule(
        chain=st.sampled_from("abcdefgh"),
        priority=st.integers(-2, 2),
        wait=st.none() | st.integers(0, 40),
        ago=st.integers(0, 30),
        slots=st.integers(1, 3),
    )
    def add(self, chain: str, priority: int, wait: int | None, ago: int, slots: int) -> None:
        if chain in self.model:
            return
        self.count += 1
        since = self.now - ago * SECOND
        deadline = None if wait is None else self.now + wait * SECOND
        turn = (since // (10 * SECOND) - priority, float("inf") if deadline is None else deadline, since, self.count)
        self.model[chain] = (turn, deadline, slots)
        self.queue.add(chain, priority=priority, deadline_ns=deadline, since_ns=since, slots=slots)

    @rule(chain=st.sampled_from("abcdefgh"))
    def remove(self, chain: str) -> None:
        self.queue.remove(chain)
        self.model.pop(chain, None)

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.now += seconds * SECOND

    @rule(free=st.integers(0, 3))
    def take(self, free: int) -> None:
        line = self.line()
        expected = line[0] if line and self.model[line[0]][2] <= free else None
        assert self.queue.next(self.now, free) == expected
        if expected is not None:
            del self.model[expected]

    @rule()
    def expire(self) -> None:
        late = {
            chain for chain, (_, deadline, _) in self.model.items() if deadline is not None and deadline <= self.now
        }
        assert set(self.queue.expired(self.now)) == late
        for chain in late:
            del self.model[chain]

    @invariant()
    def same(self) -> None:
        assert len(self.queue) == len(self.model)
        assert all(chain in self.queue for chain in self.model)
        for position, chain in enumerate(self.line()):
            assert self.queue.position(chain, self.now) == position

    def line(self) -> list[str]:
        alive = [
            (turn, chain)
            for chain, (turn, deadline, _) in self.model.items()
            if deadline is None or deadline > self.now
        ]
        return [chain for _, chain in sorted(alive)]


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
