"""Where chains are placed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_figures import H200
from pingpong_bus.errors import UsageError
from pingpong_bus.messages import Literals, OutputOf, PreparedAgent
from pingpongd.cost_model import AgentProgress, CostModel, RunningChain
from pingpongd.placement import ChainShape, GroupView, PrefixMemory, chain_shape, place, replacement

CHAIN = ((), (0,), (1,), (2,), (3,))
COLD = ChainShape(CHAIN, tuple((f"prefix{index}", 1000) for index in range(5)))
TWO = [GroupView("a", 0), GroupView("b", 0)]


def warm(*names: str, held: range = range(5)) -> list[GroupView]:
    return [GroupView(name, 0, frozenset(f"prefix{index}" for index in held)) for name in names]


def test_ping_pong_alternates_and_the_next_chain_starts_on_the_next_group() -> None:
    assert place(COLD, "ping-pong", TWO, 0).groups == ("a", "b", "a", "b", "a")
    assert place(COLD, "ping-pong", TWO, 1).groups == ("b", "a", "b", "a", "b")


def test_ping_pong_starts_where_the_caches_hold_most() -> None:
    groups = [GroupView("a", 0, frozenset({"prefix1", "prefix3"})), GroupView("b", 0)]
    assert place(COLD, "ping-pong", groups, 0).groups == ("b", "a", "b", "a", "b")


def test_ping_pong_is_refused_with_one_group() -> None:
    with pytest.raises(UsageError, match="two device groups and one is ready.*serial"):
        place(COLD, "ping-pong", TWO[:1], 0)


def test_series_takes_the_least_busy_group() -> None:
    plan = place(COLD, "serial", [GroupView("a", 2), GroupView("b", 1)], 0)
    assert plan.groups == ("b",) * 5
    assert plan.placement == "serial"


def test_auto_reads_ahead_where_prefixes_are_cold() -> None:
    plan = place(COLD, "auto", TWO, 0)
    assert plan.placement == "ping-pong"
    assert "4000" in plan.why


def test_auto_stays_in_series_where_prefixes_are_warm() -> None:
    assert place(COLD, "auto", warm("a", "b"), 0).placement == "serial"


def test_auto_prefers_the_warm_group_for_series() -> None:
    assert place(COLD, "auto", [GroupView("a", 0), *warm("b")], 0).groups == ("b",) * 5


@pytest.mark.parametrize("reads", [((),), ((), ())])
def test_auto_stays_in_series_where_nothing_can_be_read_ahead(reads: tuple[tuple[int, ...], ...]) -> None:
    shape = ChainShape(reads, tuple((f"p{index}", 5000) for index in range(len(reads))))
    assert place(shape, "auto", TWO, 0).placement == "serial"


def test_auto_with_one_group_is_series() -> None:
    assert place(COLD, "auto", TWO[:1], 3).placement == "serial"


def test_a_named_group_is_used_or_refused() -> None:
    assert place(COLD, "auto", TWO, 0, group="b").groups == ("b",) * 5
    with pytest.raises(UsageError, match='no device group "c".*a, b'):
        place(COLD, "auto", TWO, 0, group="c")


def test_overlap_takes_the_best_group_that_is_able_to() -> None:
    idle, busy = GroupView("a", 0), GroupView("b", 3, overlap=True)
    plan = place(COLD, "overlap", [idle, busy], 0)
    assert plan.placement == "overlap"
    assert plan.groups == ("b",) * 5
    free = GroupView("c", 0, overlap=True)
    assert place(COLD, "overlap", [idle, busy, free], 0).groups == ("c",) * 5
    assert place(COLD, "overlap", [busy], 7).groups == ("b",) * 5


def test_overlap_on_a_named_group() -> None:
    groups = [GroupView("a", 0, overlap=True), GroupView("b", 3, overlap=True)]
    plan = place(COLD, "overlap", groups, 0, group="b")
    assert (plan.placement, plan.groups) == ("overlap", ("b",) * 5)


@pytest.mark.parametrize("group", [None, "a"])
def test_overlap_is_refused_where_nothing_holds_appends_back(group: str | None) -> None:
    groups = [GroupView("a", 0)] if group is None else [GroupView("a", 0), GroupView("b", 0, overlap=True)]
    with pytest.raises(UsageError, match="mode: overlap takes an engine that holds appends to a budget.* on a\\."):
        place(COLD, "overlap", groups, 0, group=group)


def test_auto_never_overlaps_by_rule_of_thumb() -> None:
    assert place(COLD, "auto", [GroupView("a", 0, overlap=True)], 0).placement == "serial"


def test_a_lost_agent_keeps_apart_from_its_neighbours_or_joins_them() -> None:
    groups = [GroupView("a", 2, overlap=True), GroupView("b", 1, overlap=True), GroupView("c", 0)]
    assert replacement(groups, frozenset("c")) == "b"
    assert replacement(groups, frozenset("a"), join=True) == "a"
    assert replacement(groups, frozenset(), join=True) == "b"
    assert replacement(groups, frozenset("c"), join=True) == "b"
    assert replacement(groups[2:], frozenset("a"), join=True) == "c"
    assert replacement([], frozenset("a")) is None


@given(st.data(), st.integers(2, 6), st.integers(0, 50))
def test_no_agent_runs_beside_the_upstream_that_ends_last(data: st.DataObject, count: int, number: int) -> None:
    size = data.draw(st.integers(1, 8))
    reads = tuple(
        tuple(sorted(data.draw(st.sets(st.integers(0, index - 1), max_size=3)))) if index else ()
        for index in range(size)
    )
    groups = [GroupView(f"g{at}", data.draw(st.integers(0, 3))) for at in range(count)]
    shape = ChainShape(reads, tuple((f"p{index}", 10) for index in range(size)))
    plan = place(shape, "ping-pong", groups, number)
    for index, upstream in enumerate(reads):
        if upstream:
            assert plan.groups[index] != plan.groups[max(upstream)]


def test_prefix_memory_forgets_the_oldest_first() -> None:
    memory = PrefixMemory(1000)
    memory.computed([("a", 300)], 400)
    memory.computed([("b", 300)], 400)
    memory.computed([("a", 300)], 400)
    memory.computed([("c", 300)], 400)
    assert memory.held == {"a", "c"}
    memory.forget()
    assert memory.held == frozenset()


def test_the_shape_counts_only_the_ids_a_prompt_begins_with() -> None:
    prepared = [
        PreparedAgent(segments=[Literals(ids=[1, 2, 3])]),
        PreparedAgent(segments=[OutputOf(agent=0), Literals(ids=[4])]),
        PreparedAgent(segments=[Literals(ids=[5, 6]), OutputOf(agent=0)], joined=True),
    ]
    shape = chain_shape([[], [0], [0]], prepared)
    assert [length for _, length in shape.prefixes] == [3, 0, 0]


def test_prompts_cut_on_a_grid_share_prefixes_with_their_like_alone() -> None:
    prepared = [PreparedAgent(segments=[Literals(ids=list(range(600)))])]
    shapes = [chain_shape([[]], prepared, grid) for grid in (None, 64, 256, 64)]
    digests = [shape.prefixes[0][0] for shape in shapes]
    assert len(set(digests)) == 3
    assert digests[1] == digests[3]


def test_on_a_grid_whole_cells_of_a_prefix_count() -> None:
    ids = list(range(1000))
    prepared = [PreparedAgent(segments=[Literals(ids=ids[:length])]) for length in (300, 500, 511, 512)]
    shape = chain_shape([[]] * 4, prepared, 256)
    assert [length for _, length in shape.prefixes] == [256, 256, 256, 512]
    assert len({digest for digest, _ in shape.prefixes}) == 2, "what follows the last cell is not cached"


def late(name: str, *, slowdown: float = 2.0, overlap: bool = False, hops: int = 0) -> GroupView:
    return GroupView(name, hops, overlap=overlap, degraded=True, slowdown=slowdown, cause="thermal_throttle")


def test_auto_gives_nothing_to_a_degraded_group_while_another_can_take_it() -> None:
    plan = place(COLD, "auto", [GroupView("a", 3), late("b")], 0)
    assert set(plan.groups) == {"a"}
    assert plan.why.endswith("without b: its tokens take 2.0 times as long now (thermal throttle)")
    three = place(COLD, "auto", [GroupView("a", 0), late("b"), GroupView("c", 0)], 0)
    assert (three.placement, set(three.groups)) == ("ping-pong", {"a", "c"})


def test_degraded_groups_are_used_where_there_are_no_others() -> None:
    plan = place(COLD, "auto", [late("a"), late("b", slowdown=1.0)], 0)
    assert set(plan.groups) == {"a", "b"}
    assert plan.why.endswith(
        "; a: its tokens take 2.0 times as long now (thermal throttle); b: it recovers (thermal throttle)"
    )


def test_a_mode_that_was_asked_for_takes_a_degraded_group_only_where_it_needs_it() -> None:
    two = [late("a", overlap=True), GroupView("b", 5)]
    assert set(place(COLD, "serial", two, 0).groups) == {"b"}
    assert set(place(COLD, "overlap", two, 0).groups) == {"a"}
    both = place(COLD, "ping-pong", two, 0)
    assert set(both.groups) == {"a", "b"}
    assert both.why == "asked for; a: its tokens take 2.0 times as long now (thermal throttle)"
    assert set(place(COLD, "ping-pong", [*two, GroupView("c", 0)], 0).groups) == {"b", "c"}
    named = place(COLD, "auto", two, 0, group="a")
    assert set(named.groups) == {"a"}
    assert "2.0 times as long" in named.why


def test_a_group_that_is_late_takes_its_share_where_the_others_are_busy_and_it_is_sooner_all_the_same() -> None:
    shape = ChainShape(
        upstreams=((),),
        prefixes=(("p", 12_000),),
        rungs=((("p", 12_000),),),
        shared=((),),
        parts=((12_000,),),
        outputs=(200,),
        joined=(False,),
    )
    others = [RunningChain(shape, "serial", (AgentProgress("a"),)) for _ in range(6)]

    def chosen(slowdown: float, running: list[RunningChain]) -> str:
        views = [
            GroupView("a", len(running), figures=H200),
            GroupView("b", 0, figures=H200, degraded=True, slowdown=slowdown),
        ]
        plan = place(shape, "auto", views, 0, model=CostModel(views, running))
        assert ("without b: " in plan.why) is (plan.groups == ("a",))
        return plan.groups[0]

    assert chosen(1.3, []) == "a"
    assert chosen(1.3, others) == "b"
    assert chosen(30.0, others) == "a"
