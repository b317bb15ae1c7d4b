"""Where a running chain's agents go when the group that they were planned for decodes late."""

from __future__ import annotations

import pytest

from engine_figures import H200
from pingpong_bus.messages import Mode, OutputOf
from pingpongd import replanning
from pingpongd.agent_task import Stage
from pingpongd.cost_model import AgentProgress, Cost, CostModel, RunningChain
from pingpongd.replanning import replan
from pingpongd.shapes import ChainShape, GroupView

PARTS = tuple((4096, *([OutputOf(agent=at - 1)] if at else []), 16) for at in range(4))
SHAPE = ChainShape(
    upstreams=((), (0,), (1,), (2,)),
    prefixes=tuple((f"p{at}", 4096) for at in range(4)),
    rungs=tuple(((f"p{at}", 4096),) for at in range(4)),
    shared=tuple((0,) * at for at in range(4)),
    parts=PARTS,
    outputs=(256,) * 4,
    joined=(False,) * 4,
)
FIRST_WRITES = (AgentProgress("a", Stage.WRITING, 4112, 1), *(AgentProgress(name) for name in "bab"))
CHAIN = RunningChain(SHAPE, "ping-pong", FIRST_WRITES)


def view(name: str, hops: int = 0, *, overlap: bool = True, measured: bool = True) -> GroupView:
    return GroupView(name, hops, overlap=overlap, figures=H200 if measured else None)


def model(*views: GroupView) -> CostModel:
    return CostModel([*views, GroupView("b", 0, figures=H200, degraded=True, slowdown=2.0)])


def test_the_rest_goes_on_in_the_one_group_that_is_well() -> None:
    found = replan(CHAIN, [1, 2, 3], "auto", [view("a", 1)], model(view("a", 1)))
    assert found is not None
    assert found.groups == ("a",) * 4
    # Beside the upstream's decode prefill is nearly hidden: it costs less than 206 ms at full speed afterwards.
    assert found.placement == "overlap"


def test_without_a_pace_for_appends_it_goes_on_in_series() -> None:
    stock = view("a", 1, overlap=False)
    found = replan(CHAIN, [1, 2, 3], "auto", [stock], model(stock))
    assert found is not None
    assert (found.placement, found.groups) == ("serial", ("a",) * 4)


def test_two_groups_that_are_well_go_on_with_ping_pong() -> None:
    views = [view("a", 1), view("c")]
    found = replan(CHAIN, [1, 2, 3], "auto", views, model(*views))
    assert found is not None
    assert found.placement == "ping-pong"
    assert found.groups == ("a", "c", "a", "c")


def test_what_was_not_measured_is_planned_by_thumb() -> None:
    views = [view("a", 1, measured=False), view("c", measured=False)]
    found = replan(CHAIN, [1, 2, 3], "auto", views, CostModel(views))
    assert found is not None
    assert (found.placement, found.groups) == ("ping-pong", ("a", "c", "a", "c"))
    alone = replan(CHAIN, [1, 2, 3], "auto", views[:1], CostModel(views))
    assert alone is not None
    assert alone.placement == "overlap"


@pytest.mark.parametrize(("mode", "placement"), [("serial", "serial"), ("overlap", "overlap")])
def test_the_mode_that_was_asked_for_is_kept(mode: Mode, placement: str) -> None:
    views = [view("a", 1), view("c")]
    found = replan(CHAIN, [1, 2, 3], mode, views, model(*views))
    assert found is not None
    assert found.placement == placement


def test_ping_pong_that_was_asked_for_needs_two() -> None:
    assert replan(CHAIN, [1, 2, 3], "ping-pong", [view("a")], model(view("a"))) is None
    views = [view("a"), view("c")]
    found = replan(CHAIN, [1, 2, 3], "ping-pong", views, model(*views))
    assert found is not None
    assert found.placement == "ping-pong"


def test_what_has_started_stays_where_it_is() -> None:
    agents = (AgentProgress("a", Stage.ENDED), AgentProgress("b", Stage.WRITING, 4368, 100), *FIRST_WRITES[2:])
    found = replan(RunningChain(SHAPE, "ping-pong", agents), [2, 3], "auto", [view("a")], model(view("a")))
    assert found is not None
    assert found.groups == ("a", "b", "a", "a")


class Counting(CostModel):
    """Counts what is predicted."""

    predicted = 0

    def rest(self, chain: RunningChain) -> Cost:
        self.predicted += 1
        return super().rest(chain)


@pytest.mark.parametrize(("walked", "predicted"), [(4000, 9), (1000, 7), (1, 3)])
def test_the_larger_a_chain_the_fewer_ways_are_predicted(
    monkeypatch: pytest.MonkeyPatch, walked: int, predicted: int
) -> None:
    monkeypatch.setattr(replanning, "MOST_WALKED", walked)
    views = [view(name) for name in "acdef"]
    model = Counting([*views, view("b")])
    assert replan(CHAIN, [1, 2, 3], "auto", views, model) is not None
    assert model.predicted == predicted
