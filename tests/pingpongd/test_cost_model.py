"""What placements are predicted to take, by figures whose outcome is known, and by what must hold of any figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_figures import H200, PAIR, scaled
from pingpong_bus.messages import BesideFigure, EngineFigures, Literals, OutputOf, Placement, PreparedAgent
from pingpongd.agent_task import Stage
from pingpongd.cost_model import AgentProgress, Cost, CostModel, RunningChain
from pingpongd.engine_cost import EngineCost
from pingpongd.placement import MARGIN, Plan, place
from pingpongd.shapes import ChainShape, GroupView, chain_shape

LINE = ((), (0,), (1,), (2,), (3,))
FAN_IN = ((), (), (), (), (0, 1, 2, 3))


def chain(
    prefix: int,
    output: int = 256,
    *,
    reads: Sequence[Sequence[int]] = LINE,
    document: int = 0,
    seed: int = 0,
    grid: int | None = None,
) -> ChainShape:
    """Agents with own text of `prefix` tokens, behind a document that all share; the last writes a quarter."""
    common = list(range(1_000_000, 1_000_000 + document))
    prepared = [
        PreparedAgent(
            segments=[
                Literals(ids=[*common, *range((seed * 9 + at) * prefix, (seed * 9 + at + 1) * prefix)]),
                *(OutputOf(agent=upstream) for upstream in upstreams),
                *([Literals(ids=[7] * 16)] if upstreams else []),
            ]
        )
        for at, upstreams in enumerate(reads)
    ]
    outputs = [output] * (len(reads) - 1) + [max(1, output // 4)]
    return chain_shape(reads, prepared, grid, outputs=outputs)


def group(
    name: str, figures: EngineFigures | None = H200, *, holds: ChainShape | None = None, hops: int = 0
) -> GroupView:
    held = frozenset(digest for rungs in holds.rungs for digest, _ in rungs) if holds else frozenset[str]()
    return GroupView(name, hops, held, bool(figures and figures.beside), figures)


def costs(shape: ChainShape, views: Sequence[GroupView], *placed: tuple[Placement, str]) -> list[Cost]:
    """Of placements with one letter for each agent's group, or one for all of them."""
    model = CostModel(views)
    return [
        model.predict(shape, how, groups if len(groups) > 1 else groups * len(shape.outputs)) for how, groups in placed
    ]


# Measured on two H200 in one run: serial, ping-pong; 6,800 and 8,194 in series in a tensor-parallel pair.
@pytest.mark.parametrize(("prefix", "serial_ms", "ahead_ms"), [(4096, 10_124, 9_528), (12_288, 12_657, 10_332)])
def test_predictions_come_near_what_was_measured(prefix: int, serial_ms: float, ahead_ms: float) -> None:
    shape = chain(prefix)
    views = [group("a"), group("b"), group("t", PAIR)]
    found = [cost.prediction for cost in costs(shape, views, ("serial", "a"), ("ping-pong", "ababa"), ("serial", "t"))]
    assert found[0].e2e_ms == pytest.approx(serial_ms, rel=0.03)
    assert found[1].e2e_ms == pytest.approx(ahead_ms, rel=0.03)
    assert found[2].e2e_ms < found[1].e2e_ms
    for prediction in found:
        parts = prediction.prefill_ms + prediction.decode_ms + prediction.wait_ms
        assert prediction.e2e_ms == pytest.approx(parts, abs=0.01)


HELD = chain(12_288)


@pytest.mark.parametrize(
    ("shape", "views", "placement", "groups"),
    [
        pytest.param(chain(4096), [group("a"), group("b")], "ping-pong", "ab", id="cold, two GPUs"),
        pytest.param(HELD, [group("a"), group("b")], "ping-pong", "ab", id="cold, two GPUs, long prompts"),
        pytest.param(HELD, [group("a", holds=HELD), group("b", holds=HELD)], "serial", "a", id="warm: nothing to gain"),
        pytest.param(HELD, [group("a"), group("b", holds=HELD)], "serial", "b", id="one group is warm"),
        pytest.param(HELD, [group("a")], "overlap", "a", id="cold, one GPU"),
        pytest.param(HELD, [group("a", holds=HELD)], "serial", "a", id="warm, one GPU"),
        pytest.param(chain(64, document=12_288), [group("a"), group("b")], "serial", "a", id="a shared document first"),
        pytest.param(
            HELD, [group("a"), group("b"), group("t", scaled(PAIR, 1, 0.9))], "overlap", "t", id="a fast pair of GPUs"
        ),
        pytest.param(chain(4096, 8, reads=FAN_IN), [group("a")], "overlap", "a", id="decodes share steps"),
        pytest.param(chain(512, reads=((),) * 6), [group("a")], "overlap", "a", id="agents that read nobody"),
        pytest.param(
            chain(512, reads=((),) * 6, grid=512), [group("a"), group("b")], "ping-pong", "ab", id="the same on a grid"
        ),
        pytest.param(chain(12_288, grid=512), [group("a")], "serial", "a", id="no overlap on a grid"),
        pytest.param(chain(12_288, grid=512), [group("a"), group("b")], "ping-pong", "ab", id="two GPUs on a grid"),
    ],
)
def test_auto_takes_what_is_known_to_win(
    shape: ChainShape, views: list[GroupView], placement: Placement, groups: str
) -> None:
    plan = place(shape, "auto", views, 0)
    assert plan.placement == placement, plan.why
    assert set(plan.groups) == set(groups)
    assert plan.predicted is not None
    assert plan.predicted in plan.predictions
    assert [one.e2e_ms for one in plan.predictions] == sorted(one.e2e_ms for one in plan.predictions)


def test_overlap_is_left_where_appends_slow_decodes_more_than_they_hide() -> None:
    dear = [BesideFigure(context=2048, tokens=4096, append_ms=900.0, decode_ms=26.0)]
    figures = EngineFigures(
        measured_at="", prefill=H200.prefill, finalize=H200.finalize, decode=H200.decode, batch=H200.batch, beside=dear
    )
    assert place(chain(4096), "auto", [group("a", figures)], 0).placement == "serial"


def test_a_placement_that_is_told_is_predicted_too() -> None:
    plan = place(chain(4096), "ping-pong", [group("a"), group("b")], 1)
    assert plan.groups == ("b", "a", "b", "a", "b")
    assert plan.why == "asked for"
    assert plan.predictions == (plan.predicted,)


def test_groups_that_were_not_measured_are_left_out_and_alone_go_by_the_rule_of_thumb() -> None:
    views = [group("a", None), group("b", None)]
    assert place(chain(4096), "auto", views, 0).placement == "ping-pong"
    assert not place(chain(4096), "auto", views, 0).predictions
    plan = place(chain(4096), "auto", [group("a", None), group("b")], 0)
    assert set(plan.groups) == {"b"}
    plan = place(chain(4096), "auto", [group("a", None), group("b", hops=1)], 0)
    assert (set(plan.groups), plan.why) == ({"a"}, "a is idle, though it was not measured")


def test_why_tells_that_series_was_preferred_to_what_is_hardly_less() -> None:
    plan = place(HELD, "auto", [group("a", holds=HELD), group("b", holds=HELD)], 0)
    least = plan.predictions[0]
    assert (plan.placement, least.placement) == ("serial", "ping-pong")
    assert plan.why.endswith(f"; ping-pong on a, b {least.e2e_ms:.0f} ms, within the 2% by which series is preferred")


def test_what_ended_before_the_start_of_the_daemon_is_in_no_cache() -> None:
    shape = chain(4096, document=4096)
    first, second = (CostModel([group("a")]).predict(shape, "serial", "aaaaa", done) for done in (frozenset(), {0}))
    assert first.prediction.e2e_ms - second.prediction.e2e_ms == pytest.approx(256 * 8.7 + 206, rel=0.05)


def test_what_is_kept_of_a_model_predicts_the_same_for_its_groups() -> None:
    running = [
        RunningChain(chain(4096, seed=at + 1), "serial", (AgentProgress(name, Stage.WRITING),) * 5)
        for at, name in enumerate("abca")
    ]
    model = CostModel([group(name, holds=HELD) for name in "abc"], running)
    for names in ("aaaaa", "ababa"):
        assert model.of(names).predict(HELD, "ping-pong", names) == model.predict(HELD, "ping-pong", names)


def running(shape: ChainShape, plan: Plan) -> RunningChain:
    return RunningChain(shape, plan.placement, tuple(AgentProgress(name) for name in plan.groups))


def test_chains_that_come_together_spread_over_the_groups_and_are_never_worse_off_than_in_series() -> None:
    for count, prefix in ((2, 4096), (8, 4096), (8, 12_288)):
        shapes = [chain(prefix, seed=seed) for seed in range(count)]
        totals = []
        for mode in ("auto", "serial"):
            others: list[RunningChain] = []
            for number, shape in enumerate(shapes):
                loads = [sum(one.agents[0].group == name for one in others) for name in "ab"]
                views = [group("a", hops=loads[0]), group("b", hops=loads[1])]
                others.append(running(shape, place(shape, mode, views, number, model=CostModel(views, others))))
            loads = [sum(agent.group == name for one in others for agent in one.agents) for name in "ab"]
            assert abs(loads[0] - loads[1]) <= len(shapes) * 5 * 0.4, "one group has most of the load"
            # The last of them, beside all others.
            model = CostModel([group("a"), group("b")], others[:-1])
            last = model.predict(shapes[-1], others[-1].placement, [agent.group for agent in others[-1].agents])
            totals.append(last.prediction.e2e_ms)
        assert totals[0] <= totals[1] * 1.01


def test_a_busy_group_takes_longer_and_its_chains_are_delayed() -> None:
    one, other = chain(4096), chain(4096, seed=1)
    views = [group("a"), group("b")]
    begun = [AgentProgress("a", Stage.WRITING, 4096, 10), *(AgentProgress("a") for _ in range(4))]
    model = CostModel(views, [RunningChain(other, "serial", tuple(begun))])
    busy, idle = model.predict(one, "serial", "aaaaa"), model.predict(one, "serial", "bbbbb")
    alone = CostModel(views).predict(one, "serial", "aaaaa")
    assert idle.prediction.e2e_ms == alone.prediction.e2e_ms
    assert idle.delay_ms == 0
    assert busy.prediction.e2e_ms > alone.prediction.e2e_ms
    assert busy.delay_ms > 500, "five prompts of 200 ms stand between the other's tokens"


def test_on_a_grid_a_hop_waits_until_its_group_is_empty() -> None:
    one, other = chain(4096, grid=512), chain(4096, seed=1, grid=512)
    begun = [AgentProgress("a", Stage.WRITING, 4096, 0), *(AgentProgress("b", Stage.ENDED) for _ in range(4))]
    model = CostModel([group("a"), group("b")], [RunningChain(other, "serial", tuple(begun))])
    cost = model.predict(one, "serial", "aaaaa")
    assert cost.prediction.wait_ms == pytest.approx(256 * 8.6, rel=0.02)


# ---------------------------------------------------------------------------------------------------------- properties

milliseconds = st.floats(0.1, 500)


@st.composite
def figures(draw: st.DrawFn) -> EngineFigures:
    """Noise and all: tables that need not rise in their times."""

    def table(*at: int) -> list[tuple[int, float]]:
        return [(tokens, draw(milliseconds)) for tokens in at]

    return EngineFigures(
        measured_at="",
        prefill=table(64, 512, 4096)[: draw(st.integers(1, 3))],
        finalize=[(context, rest, draw(milliseconds)) for context in (256, 2048) for rest in (8, 64)]
        if draw(st.booleans())
        else [],
        decode=table(256, 4096)[: draw(st.integers(1, 2))],
        batch=table(2, 8)[: draw(st.integers(0, 2))],
        beside=[
            BesideFigure(context=at, tokens=512, append_ms=draw(milliseconds), decode_ms=draw(milliseconds))
            for at in (0, 2048)[: draw(st.integers(0, 2))]
        ],
    )


@st.composite
def reads(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(sorted(draw(st.sets(st.integers(0, at - 1), max_size=3)))) if at else ()
        for at in range(draw(st.integers(1, 5)))
    )


@given(figures(), figures(), reads(), st.integers(1, 3000), st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_times_are_never_negative_and_add_up(
    first: EngineFigures,
    second: EngineFigures,
    upstreams: tuple[tuple[int, ...], ...],
    prefix: int,
    output: int,
    data: st.DataObject,
) -> None:
    shape = chain(prefix, output, reads=upstreams, grid=data.draw(st.sampled_from([None, 64])))
    views = [group("a", first, hops=1), group("b", second)]
    placed = data.draw(st.sampled_from(["serial", "ping-pong", "overlap"]))
    names = data.draw(st.text("ab", min_size=len(upstreams), max_size=len(upstreams)))
    others = [RunningChain(chain(500, 9, seed=3), "serial", tuple(AgentProgress("a") for _ in LINE))]
    cost = CostModel(views, others).predict(shape, placed, names)
    found = cost.prediction
    times = (found.e2e_ms, found.prefill_ms, found.decode_ms, found.wait_ms, found.hidden_ms, cost.delay_ms)
    assert min(times) >= -1e-6, times
    assert found.e2e_ms > 0
    assert found.e2e_ms == pytest.approx(found.prefill_ms + found.decode_ms + found.wait_ms, rel=1e-4, abs=0.01)


@given(figures(), st.lists(st.integers(1, 20_000), min_size=2, max_size=6), st.sampled_from([0, 16, 700, 5000]))
@settings(max_examples=80, deadline=None)
def test_longer_prompts_and_more_rows_never_take_less(measured: EngineFigures, lengths: list[int], cached: int) -> None:
    cost = EngineCost(measured)
    for shorter, longer in pairwise(sorted(lengths)):
        assert cost.read_ms(cached, cached + shorter) <= cost.read_ms(cached, cached + longer) + 1e-6
        assert cost.first_token_ms(cached, shorter) <= cost.first_token_ms(cached, longer) + 1e-6
        assert cost.decode_ms(shorter, 1) <= cost.decode_ms(longer, 1) + 1e-6
        assert cost.decode_ms(cached, 1 + shorter % 9) <= cost.decode_ms(cached, 1 + shorter % 9 + longer % 9) + 1e-6


@pytest.mark.parametrize("tokens", [700, 3000, 6000, 10_000, 20_000, 30_000])
def test_prefill_between_and_beyond_few_sizes_follows_the_square_of_attention(tokens: int) -> None:
    def takes(tokens: int) -> float:
        return 9.0 + 0.0437 * tokens + 6e-7 * tokens**2

    measured = [(size, takes(size)) for size in (256, 1024, 4096, 12_288)]
    figures = EngineFigures(measured_at="", prefill=measured, finalize=[], decode=[(256, 8.0)], batch=[])
    assert EngineCost(figures).first_token_ms(0, tokens) == pytest.approx(takes(tokens), rel=0.005)


@given(figures(), st.integers(0, 5000), st.integers(1, 9000), st.floats(0, 2000))
@settings(max_examples=60, deadline=None)
def test_what_is_read_in_a_time_takes_that_time(measured: EngineFigures, begin: int, tokens: int, ms: float) -> None:
    cost = EngineCost(measured)
    reached = cost.reached(begin, begin + tokens, ms)
    assert begin <= reached <= begin + tokens
    assert cost.read_ms(begin, reached) <= ms
    assert reached == begin + tokens or cost.read_ms(begin, reached + 1) > ms


def test_of_a_prompt_that_does_not_fit_into_the_decode_the_rest_is_left() -> None:
    found = costs(chain(12_288, 64), [group("a"), group("b")], ("serial", "a"), ("ping-pong", "ababa"))
    hidden = 3 * 63 * 8.95 + 63 * 8.95
    assert found[1].prediction.hidden_ms == pytest.approx(hidden, rel=0.02)
    gained = found[0].prediction.e2e_ms - found[1].prediction.e2e_ms
    assert gained == pytest.approx(hidden, rel=0.05), "what was hidden is not computed again"


@given(st.integers(0, 4))
def test_load_never_makes_a_chain_in_series_faster(count: int) -> None:
    others = [
        RunningChain(chain(2000, seed=at + 1), "serial", tuple(AgentProgress("a") for _ in LINE)) for at in range(count)
    ]
    less = CostModel([group("a")], others[:-1] if others else []).predict(chain(3000), "serial", "aaaaa")
    more = CostModel([group("a")], others).predict(chain(3000), "serial", "aaaaa")
    assert more.prediction.e2e_ms >= less.prediction.e2e_ms * (1 - 1e-9)


@given(figures(), st.integers(1, 4000), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_auto_leaves_series_only_for_a_gain_above_the_margin(measured: EngineFigures, prefix: int, output: int) -> None:
    views = [group("a", measured), group("b", measured)]
    plan = place(chain(prefix, output), "auto", views, 0)
    assert plan.predicted is not None
    series = min(one.e2e_ms for one in plan.predictions if one.placement == "serial")
    if plan.placement != "serial":
        assert plan.predicted.e2e_ms <= series * (1 - MARGIN) * 1.01
    else:
        assert plan.predicted.e2e_ms <= series * 1.01


def test_a_chain_that_waits_for_a_group_to_come_back_spoils_no_prediction() -> None:
    stuck = RunningChain(
        chain(1000, reads=((), (0,)), grid=512),
        "ping-pong",
        (AgentProgress("a", Stage.WAITING, written=3), AgentProgress("a", Stage.READING, 512)),
    )
    one = chain(4096, grid=512)
    found = CostModel([group("a")], [stuck]).predict(one, "serial", "aaaaa")
    assert found == CostModel([group("a")]).predict(one, "serial", "aaaaa")
