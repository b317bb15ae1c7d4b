"""Which placements are considered where there are many groups."""

from __future__ import annotations

from pingpongd.candidates import FEW_GROUPS, candidates
from pingpongd.shapes import ChainShape, GroupView


def test_two_idle_groups_that_are_no_neighbours_are_considered_for_ping_pong() -> None:
    groups = [GroupView(f"g{at}", hops=0 if at in (3, 8) else 1) for at in range(12)]
    shape = ChainShape(((), (0,), (1,)), (("", 0),) * 3)
    first, second, *_ = (names for kind, names in candidates(shape, "ping-pong", groups, 0))
    assert {first, second} == {("g3", "g8", "g3"), ("g8", "g3", "g8")}


def test_agents_that_read_nobody_are_considered_side_by_side() -> None:
    groups = [GroupView(name, 0, overlap=True) for name in "ab"]
    alone = ChainShape(((),) * 4, (("", 0),) * 4)
    found = candidates(alone, "auto", groups, 0)
    assert {kind for kind, _ in found} == {"serial", "overlap", "ping-pong"}
    assert ("ping-pong", ("a", "b", "a", "b")) in found
    assert {kind for kind, _ in candidates(ChainShape(((),), (("", 0),)), "auto", groups, 0)} == {"serial"}


def test_of_large_chains_fewer_placements_are_looked_at() -> None:
    groups = [GroupView(f"g{number}", 0) for number in range(FEW_GROUPS)]
    line = ChainShape(tuple(() if at == 0 else (at - 1,) for at in range(250)), (("", 0),) * 250)
    assert len(candidates(line, "serial", groups, 0)) == 1
