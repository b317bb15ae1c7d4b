"""Chains of several models, with steps between agents, and with guessed tokens: where they go and what they take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_figures import H200
from pingpong_bus.errors import UsageError
from pingpong_bus.messages import EngineFigures, Literals, OutputOf, Placement, PreparedAgent
from pingpongd.advice import advise
from pingpongd.agent_task import Stage
from pingpongd.candidates import candidates, without_second
from pingpongd.cost_model import AgentProgress, CostModel, RunningChain
from pingpongd.moving import LateHop, Seat, stay_ms, there_ms
from pingpongd.placement import MARGIN, place
from pingpongd.replanning import replan
from pingpongd.shapes import ChainShape, GroupView, chain_shape

LINE = ((), (0,), (1,))


def group(name: str, model: str = "", figures: EngineFigures | None = H200, hops: int = 0) -> GroupView:
    return GroupView(name, hops, overlap=True, figures=figures, model=model)


def shape(
    models: Sequence[str | None],
    reads: Sequence[Sequence[int]] = LINE,
    *,
    prefix: int = 4096,
    output: int = 200,
    step_ms: float = 50.0,
    step_tokens: int = 40,
) -> ChainShape:
    """Per agent its model; None: a step."""
    prepared = [
        PreparedAgent(
            segments=[
                *([Literals(ids=list(range(at * prefix, (at + 1) * prefix)))] if model is not None else []),
                *(OutputOf(agent=upstream) for upstream in upstreams),
            ]
        )
        for at, (model, upstreams) in enumerate(zip(models, reads, strict=True))
    ]
    return chain_shape(
        reads,
        prepared,
        outputs=[step_tokens if model is None else output for model in models],
        models=[model or "" for model in models],
        steps=[step_ms if model is None else None for model in models],
    )


TWO_MODELS = [group("a0"), group("a1"), group("b0", "b"), group("b1", "b")]

# ------------------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("figures", [H200, None], ids=["measured", "by thumb"])
@pytest.mark.parametrize("mode", ["auto", "serial", "ping-pong", "overlap"])
def test_each_agent_runs_on_a_group_of_its_model(figures: EngineFigures | None, mode: Placement) -> None:
    views = [group(view.name, view.model, figures) for view in TWO_MODELS]
    plan = place(shape(["", "b", ""]), mode, views, 0)
    assert [name[0] for name in plan.groups] == ["a", "b", "a"]


def test_in_series_all_agents_of_a_model_share_a_group() -> None:
    plan = place(shape(["", "b", "", "b"], ((), (0,), (1,), (2,))), "serial", TWO_MODELS, 0)
    assert plan.groups == ("a0", "b0", "a0", "b0")
    busy = [group("a0", hops=2), *TWO_MODELS[1:]]
    assert place(shape(["", "b", ""]), "serial", busy, 0).groups == ("a1", "b0", "a1")


def test_ping_pong_takes_turns_among_the_groups_of_each_model() -> None:
    plan = place(shape(["", "", "b", "b", "b"], ((), (0,), (1,), (2,), (3,))), "ping-pong", TWO_MODELS, 0)
    assert plan.groups == ("a0", "a1", "b0", "b1", "b0")


def test_one_group_of_each_model_is_a_fine_ping_pong_where_models_alternate() -> None:
    views = [group("a"), group("b", "b")]
    plan = place(shape(["", "b", ""]), "ping-pong", views, 0)
    assert (plan.placement, plan.groups) == ("ping-pong", ("a", "b", "a"))
    assert place(shape(["", "b", ""]), "auto", views, 0).placement == "ping-pong"


def test_ping_pong_is_refused_where_an_agent_has_no_second_group() -> None:
    views = [group("a"), group("b", "b"), group("c", "c")]
    with pytest.raises(UsageError, match=r'agents\[2\] and that one are both of the model "b", which one'):
        place(shape(["", "b", "b"]), "ping-pong", views, 0)
    assert without_second(shape(["", "b", "b"]), views) == 2


def test_a_model_that_no_group_serves_is_refused() -> None:
    with pytest.raises(UsageError, match='no device group that is ready serves the model "c"'):
        place(shape(["", "c", ""]), "auto", TWO_MODELS, 0)
    with pytest.raises(UsageError, match="no device group that is ready serves the default model"):
        place(shape(["", "b", ""]), "auto", TWO_MODELS[2:], 0)


def test_a_named_group_has_to_serve_all_models() -> None:
    with pytest.raises(UsageError, match='takes the model "b".* "a0" does not serve it'):
        place(shape(["", "b", ""]), "auto", TWO_MODELS, 0, group="a0")
    assert place(shape(["b", "b", "b"]), "auto", TWO_MODELS, 0, group="b1").groups == ("b1",) * 3


def test_caches_of_another_model_hold_nothing() -> None:
    one = shape(["", "b", ""])
    held = frozenset(digest for rungs in one.rungs for digest, _ in rungs)
    views = [GroupView("a0", 0), GroupView("a1", 0), GroupView("b0", 0), GroupView("b1", 0, held, model="b")]
    views = [view if view.model or view.name[0] == "a" else GroupView("b0", 0, model="b") for view in views]
    assert place(one, "serial", views, 0).groups == ("a0", "b1", "a0")


def test_groups_that_are_late_are_left_out_of_each_model_by_itself() -> None:
    late = GroupView("a0", 0, overlap=True, figures=H200, degraded=True, slowdown=2.0, cause=None)
    plan = place(shape(["", "b", ""]), "serial", [late, *TWO_MODELS[1:]], 0)
    assert plan.groups == ("a1", "b0", "a1")
    only = [late, group("b0", "b")]
    assert place(shape(["", "b", ""]), "auto", only, 0).groups == ("a0", "b0", "a0")


def test_of_many_groups_combinations_are_bounded() -> None:
    views = [group(f"{model or 'x'}{at}", model) for model in ("", "b", "c", "d") for at in range(30)]
    found = candidates(shape(["", "b", "c", "d"], ((), (0,), (1,), (2,))), "auto", views, 3)
    assert 0 < len(found) <= 12


def test_the_rest_of_a_chain_stays_with_its_models() -> None:
    one = shape(["", "b", "", "b"], ((), (0,), (1,), (2,)))
    begun = AgentProgress("a0", Stage.WRITING, 4096, 3)
    waiting = [AgentProgress("b0"), AgentProgress("a0"), AgentProgress("b1")]
    chain = RunningChain(one, "ping-pong", (begun, *waiting))
    views = [group("a1"), group("b0", "b")]
    found = replan(chain, [1, 2, 3], "auto", views, CostModel(TWO_MODELS))
    assert found is not None
    assert found.groups == ("a0", "b0", "a1", "b0")
    # Where none of a model is at hand, its agents stay where they are.
    found = replan(chain, [1, 2, 3], "auto", views[:1], CostModel(TWO_MODELS))
    assert found is not None
    assert found.groups == ("a0", "b0", "a1", "b1")
    assert replan(chain, [1, 2, 3], "auto", [], CostModel(TWO_MODELS)) is None


def test_the_rest_of_a_chain_overlaps_where_the_whole_may() -> None:
    one = shape(["", "b"], ((), (0,)))
    views = [msgspec.structs.replace(view, overlap=False) for view in TWO_MODELS]
    assert place(one, "overlap", views, 0).placement == "overlap", "each has its engine to itself"
    chain = RunningChain(one, "overlap", (AgentProgress("a0", Stage.WRITING, 4096, 3), AgentProgress("b0")))
    found = replan(chain, [1], "overlap", [views[0], views[3]], CostModel(views))
    assert found is not None
    assert (found.placement, found.groups) == ("overlap", ("a0", "b1"))


# ------------------------------------------------------------------------------------------------------------- steps


def test_a_step_takes_its_time_and_no_group() -> None:
    one = shape(["", None, ""], step_ms=300.0)
    plan = place(one, "serial", [group("a")], 0)
    assert plan.groups == ("a", "", "a")
    assert plan.predicted is not None
    assert plan.predicted.steps_ms == pytest.approx(300.0)
    parts = plan.predicted.prefill_ms + plan.predicted.decode_ms + plan.predicted.wait_ms + 300.0
    assert plan.predicted.e2e_ms == pytest.approx(parts, abs=0.01)


def test_what_reads_a_step_is_read_ahead_while_the_upstream_writes_and_the_step_runs() -> None:
    model = CostModel([group("a"), group("b")])
    quick, slow = shape(["", None, ""], step_ms=1.0), shape(["", None, ""], step_ms=2000.0)
    for one in (quick, slow):
        series = model.predict(one, "serial", ("a", "", "a")).prediction
        ahead = model.predict(one, "ping-pong", ("a", "", "b")).prediction
        assert series.e2e_ms - ahead.e2e_ms > 0.8 * ahead.hidden_ms > 100.0
        assert ahead.steps_ms == pytest.approx(one.steps[1] or 0.0)


def test_ping_pong_looks_through_steps() -> None:
    plan = place(shape(["", None, ""]), "ping-pong", [group("a"), group("b")], 0)
    assert plan.groups == ("a", "", "b")
    assert place(shape(["", None, ""]), "auto", [group("a"), group("b")], 0).placement == "ping-pong"
    with pytest.raises(UsageError, match="ping-pong takes two device groups and one is ready"):
        place(shape(["", None, ""]), "ping-pong", [group("a")], 0)


def test_steps_that_read_nobody_run_at_once_and_side_by_side() -> None:
    one = shape([None, None, ""], ((), (), (0, 1)), step_ms=400.0)
    ahead = CostModel([group("a")]).predict(one, "overlap", ("", "", "a")).prediction
    assert ahead.steps_ms == pytest.approx(400.0)
    series = CostModel([group("a")]).predict(one, "serial", ("", "", "a")).prediction
    assert series.steps_ms == pytest.approx(800.0)


def test_a_chain_whose_step_runs_is_walked_to_its_end() -> None:
    agents = (AgentProgress("", Stage.ENDED), AgentProgress("", Stage.WRITING), AgentProgress("b", Stage.READING, 4096))
    running = RunningChain(shape(["", None, ""], step_ms=100.0), "ping-pong", agents)
    model = CostModel([group("a"), group("b")])
    rest = model.rest(running).prediction
    assert rest.steps_ms == pytest.approx(100.0)
    assert rest.e2e_ms > 100.0
    beside = CostModel([group("a"), group("b")], [running])
    assert beside.busy(["b"])
    assert not beside.busy(["a"])
    assert beside.predict(shape(["", "", ""]), "serial", ("b",) * 3).prediction.e2e_ms > 0


def test_the_rest_of_a_chain_leaves_steps_without_a_group() -> None:
    begun = AgentProgress("a", Stage.WRITING, 4096, 3)
    chain = RunningChain(shape(["", None, ""]), "ping-pong", (begun, AgentProgress(""), AgentProgress("a")))
    found = replan(chain, [1, 2], "ping-pong", [group("b"), group("c")], CostModel([group(name) for name in "abc"]))
    assert found is not None
    assert (found.placement, found.groups) == ("ping-pong", ("a", "", "b"))
    found = replan(chain, [1, 2], "serial", [group("b")], CostModel([group(name) for name in "ab"]))
    assert found is not None
    assert found.groups == ("a", "", "b")


def test_many_steps_in_a_row_cost_no_more_than_their_number() -> None:
    count = 240
    reads = [(), (0,), *((at - 1, at - 2) for at in range(2, count - 1)), (count - 2,)]
    one = shape(["", *[None] * (count - 2), ""], reads, step_ms=1.0)
    assert one.sources()[-1] == (0,)
    assert place(one, "auto", [group("a"), group("b")], 0).groups[0] == "a"


# ----------------------------------------------------------------------------------------------------------- guesses


def guessed(one: ChainShape, tokens: float, rows: float) -> ChainShape:
    return ChainShape(
        **{name: getattr(one, name) for name in one.__struct_fields__ if name != "paces"},
        paces=((tokens, rows),) * len(one.upstreams),
    )


def test_tokens_that_are_guessed_shorten_decoding_by_what_a_step_gives() -> None:
    one, model = shape(["", "", ""]), CostModel([group("a")])
    usual = model.predict(one, "serial", ("a",) * 3).prediction
    fast = model.predict(guessed(one, 4.0, 1.0), "serial", ("a",) * 3).prediction
    assert fast.decode_ms == pytest.approx(usual.decode_ms / 4.0, rel=0.02)
    checked = model.predict(guessed(one, 4.0, 6.0), "serial", ("a",) * 3).prediction
    assert fast.decode_ms < checked.decode_ms < usual.decode_ms
    assert checked.prefill_ms == usual.prefill_ms


def test_less_time_to_hide_prefill_in_makes_series_the_sooner_choice_at_last() -> None:
    """With decodes that short there is hardly anything to read ahead beside; what is predicted to gain shrinks too."""
    views = [group("a"), group("b")]
    gains = []
    for tokens in (1.0, 4.0, 16.0):
        model, one = CostModel(views), guessed(shape(["", "", ""], output=60), tokens, 1.0)
        series = model.predict(one, "serial", ("a",) * 3).prediction.e2e_ms
        gains.append(series - model.predict(one, "ping-pong", ("a", "b", "a")).prediction.e2e_ms)
    assert gains[0] > gains[1] > gains[2]


def test_a_hop_that_is_guessed_for_has_less_to_gain_by_moving() -> None:
    view = group("a")
    cost = CostModel([view]).cost("a")
    assert cost is not None
    seat = Seat(cost, writers=1, slowdown=3.0, lasts_ms=1e9)
    there = Seat(cost, writers=0)
    hop = LateHop("h", "a", prompt=4096, written=10, left=400, series_ms=-1.0, held={"b": 0})
    fast = LateHop("h", "a", prompt=4096, written=10, left=400, series_ms=-1.0, held={"b": 0}, pace=(4.0, 1.0))
    assert stay_ms(fast, seat) == pytest.approx(stay_ms(hop, seat) / 4.0, rel=0.01)
    assert stay_ms(hop, seat) - there_ms(hop, there, 0) > stay_ms(fast, seat) - there_ms(fast, there, 0)


# ------------------------------------------------------------------------------------------------------------ advice


def advice(one: ChainShape, views: Sequence[GroupView], texts: Sequence[Sequence[int]] | None = None) -> str:
    plan = place(one, "auto", views, 0)
    given = texts or [[at] * length for at, (_, length) in enumerate(one.prefixes)]
    return "\n".join(found.text for found in advise(one, given, plan.predictions, views))


def test_advice_on_steps_that_take_long() -> None:
    views = [group("a"), group("b")]
    assert "Steps between agents are" in advice(shape(["", None, ""], step_ms=3000.0), views)
    assert "agent 2 takes the longest, 3,000 ms" in advice(shape(["", None, ""], step_ms=3000.0), views)
    assert "Steps between agents" not in advice(shape(["", None, ""], step_ms=20.0), views)
    assert "agent 2" not in advice(shape(["", None, ""], step_tokens=9000, prefix=1), views), "a step decodes nothing"


def test_advice_to_guess_where_decoding_is_all_and_nothing_is_guessed() -> None:
    one = shape(["", "", ""], prefix=8)
    assert "`speculate` where agents repeat" in advice(one, [group("a")])
    assert "`speculate`" not in advice(guessed(one, 2.0, 3.0), [group("a")])


def test_text_that_agents_of_different_models_share_is_in_no_cache_for_both() -> None:
    document = list(range(5000, 9000))
    texts = [[1, *document], [2, *document]]
    one = shape(["", "b"], ((), (0,)), prefix=4001)
    assert "share 4,000 tokens" not in advice(one, TWO_MODELS, texts)
    assert "share 4,000 tokens" in advice(shape(["", ""], ((), (0,)), prefix=4001), TWO_MODELS, texts)


# --------------------------------------------------------------------------------------------------------- properties


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ChainShape, list[GroupView]]:
    """A chain of up to three models with steps, and groups of each model."""
    count = draw(st.integers(1, 6))
    models = [draw(st.sampled_from(["", "b", "c", None])) for _ in range(count)]
    if all(model is None for model in models):
        models[0] = ""
    reads = [tuple(sorted(draw(st.sets(st.integers(0, at - 1), max_size=2)))) if at else () for at in range(count)]
    one = shape(models, reads, prefix=draw(st.integers(1, 3000)), output=draw(st.integers(1, 60)))
    one = guessed(one, draw(st.floats(1.0, 5.0)), draw(st.floats(1.0, 9.0)))
    views = [
        group(f"{model or 'a'}{at}", model, hops=draw(st.integers(0, 2)))
        for model in ("", "b", "c")
        for at in range(draw(st.integers(1, 3)))
    ]
    return one, views


@given(worlds(), st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_auto_keeps_models_apart_and_never_loses_to_series(
    world: tuple[ChainShape, list[GroupView]], number: int
) -> None:
    one, views = world
    of = {view.name: view.model for view in views}
    plan = place(one, "auto", views, number)
    for at, name in enumerate(plan.groups):
        assert (name == "") == one.is_step(at)
        assert one.is_step(at) or of[name] == one.model(at)
    assert plan.predicted is not None
    series = min(found.e2e_ms for found in plan.predictions if found.placement == "serial")
    assert plan.predicted.e2e_ms <= series * (1 - MARGIN if plan.placement != "serial" else 1.0) * 1.011
    for found in plan.predictions:
        times = (found.prefill_ms, found.decode_ms, found.wait_ms, found.steps_ms, found.hidden_ms)
        assert min(times) >= -1e-6
        assert found.e2e_ms == pytest.approx(sum(times[:4]), rel=1e-4, abs=0.01)


@given(worlds(), st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_in_ping_pong_no_agent_runs_beside_what_it_reads_last(
    world: tuple[ChainShape, list[GroupView]], number: int
) -> None:
    one, views = world
    index = without_second(one, views)
    if index is not None:
        with pytest.raises(UsageError, match="ping-pong (takes two|runs an agent on another) device group"):
            place(one, "ping-pong", views, number)
        return
    plan = place(one, "ping-pong", views, number)
    for at, sources in enumerate(one.sources()):
        if sources and not one.is_step(at):
            assert plan.groups[at] != plan.groups[max(sources)]
