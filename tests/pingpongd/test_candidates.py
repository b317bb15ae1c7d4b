"""Which placements are considered where there are many groups."""

from __future__ import annotations

from pingpongd.candidates import candidates
from pingpongd.shapes import ChainShape, GroupView


def test_two_idle_groups_that_are_no_neighbours_are_considered_for_ping_pong() -> None:
    groups = [GroupView(f"g{at}", hops=0 if at in (3, 8) else 1) for at in range(12)]
    shape = ChainShape(((), (0,), (1,)), (("", 0),) * 3)
    first, second, *_ = (names for kind, names in candidates(shape, "ping-pong", groups, 0))
    assert {first, second} == {("g3", "g8", "g3"), ("g8", "g3", "g8")}
