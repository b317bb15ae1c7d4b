"""The account of a chain's time: it adds up, and says what was hidden, waited for, and done twice."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pingpong_bus.messages import AgentResult, ChainResult, HopEntry, OutputRead, ResumeEntry
from pingpong_client.timeline_account import Account, account
from pingpong_client.timeline_spans import chain_spans, flows, hops_of, lanes
from pingpong_client.timeline_text import account_sentences
from pingpong_client.timeline_waste import Wasted
from timeline_samples import agent, append, chain, hop, in_series, lost_once, queued, read_ahead, void_once, with_steps


def spent(made: Account) -> dict[str, float]:
    kinds = ("queue", "wait", "prefill", "decode", "step", "recovery")
    return {kind: made.spent_ms(kind) for kind in kinds if made.spent_ms(kind)}


@pytest.mark.parametrize(
    "result", [read_ahead(), in_series(), lost_once(), void_once(), with_steps()], ids=lambda result: result.id
)
def test_the_path_adds_up(result: ChainResult) -> None:
    made = account(result)
    assert result.e2e_ms is not None
    assert sum(step.ms for step in made.path) == pytest.approx(result.e2e_ms)
    assert all(before.end_ms == after.start_ms for before, after in pairwise(made.path))


def test_what_is_read_ahead_is_hidden() -> None:
    made = account(read_ahead())
    assert spent(made) == {"queue": 10, "wait": 1, "prefill": 100 + 31, "decode": 400 + 200}
    # The third append was not through when the first agent ended, at 511.
    assert made.hidden_ms == 100 + 10 + 11
    assert made.hidden_tokens == 144  # two appends, and of the third what the cache held
    assert made.wasted == Wasted(tail_tokens=6, overtaken=1, overtaken_tokens=18)


def test_steps_are_on_the_path_and_no_prefill_or_decode() -> None:
    made = account(with_steps())
    # The call was sent at 517 and had to wait for its turn until 540; 641 to 662 is the second agent's prefill.
    assert spent(made) == {
        "queue": 10,
        "wait": 1 + 1 + 29 - 5,
        "prefill": 100 + 21,
        "decode": 400 + 200,
        "step": 4 + 101,
    }
    extract, call = made.agents[1:3]
    assert (extract.kind, extract.step_ms, extract.prefill_ms, extract.decode_ms) == ("extract", 4, None, None)
    assert (call.step_ms, call.hidden_ms, call.on_path) == (101, 0, True)
    assert made.agents[3].hidden_tokens == 100
    compared = {each.name: each for each in made.comparisons}
    assert (compared["steps"].predicted_ms, compared["steps"].took_ms) == (100, 105)
    said = dict(account_sentences(made))
    assert said["took"].endswith("600 decode + 105 steps between agents")
    assert said["guessed"] == "15 of 30 guessed tokens were right, 1.60 tokens a step"
    assert "9 tokens of joined texts taken back, 2 times" in said["wasted"]


def test_steps_have_a_lane_of_their_own_the_last() -> None:
    result = with_steps()
    assert [lane.title for lane in lanes(result)] == ["a", "b", "steps"]
    read = [(flow.writer.agent, flow.reader.agent, flow.span.kind, flow.tokens) for flow in flows(result)]
    assert read == [(0, 1, "step", 40), (1, 2, "step", 40), (2, 3, "prefill", 60)]


def test_a_step_that_waits_for_its_turn_has_no_span_yet() -> None:
    waiting = AgentResult(name="call", kind="call", state="reading", hops=[HopEntry(worker="", started_ms=20.0)])
    (found,) = chain_spans(chain([waiting], state="running", e2e_ms=None))
    assert found.spans == ()


def test_a_call_that_was_repeated_costs_recovery_until_it_began_again() -> None:
    result = with_steps()
    call = result.agents[2]
    lost = HopEntry(worker="", started_ms=517, opened_ms=518, ended_ms=530, state="aborted", why="the daemon ended")
    agents = [*result.agents[:2], msgspec.structs.replace(call, hops=[lost, *call.hops]), result.agents[3]]
    made = account(msgspec.structs.replace(result, agents=agents))
    assert spent(made)["step"] == 4 + 101
    assert sum(step.ms for step in made.path) == pytest.approx(862)


def test_in_series_nothing_is_hidden() -> None:
    made = account(in_series())
    assert spent(made) == {"queue": 10, "wait": 1 + 2, "prefill": 100 + 151, "decode": 600}
    assert (made.hidden_ms, made.hidden_tokens) == (0, 0)
    assert made.wasted.nothing


def test_in_series_agents_wait_for_the_one_before_though_they_do_not_read_it() -> None:
    first = agent("one", [hop("a", (11, 11, 111, 511))])
    second = agent("two", [hop("a", (512, 512, 522, 600))])
    made = account(chain([first, second], "serial"))
    assert [step.agent for step in made.path] == ["", "one", "one", "one", "two", "two", "two"]


def test_an_agent_beside_the_path_costs_nothing() -> None:
    first = agent("one", [hop("a", (10, 10, 20, 100))])
    beside = agent("two", [hop("b", (10, 10, 20, 50))])
    last = agent(
        "three", [hop("b", (51, 101, 111, 200))], [], [OutputRead(agent=n, at=5, tokens=8) for n in ("two", "one")]
    )
    made = account(chain([first, beside, last]))
    assert [found.on_path for found in made.agents] == [True, False, True]
    assert spent(made) == {"queue": 10, "prefill": 10 + 11, "decode": 80 + 89}


def test_a_loss_costs_the_time_until_the_next_hop_goes_on() -> None:
    made = account(lost_once())
    # 300 to 320 until it was sent elsewhere, to 421 until it wrote there.
    assert spent(made)["recovery"] == 121
    assert spent(made)["decode"] == (300 - 111) + (620 - 421) + 200
    wasted = made.wasted
    assert (wasted.prompt_tokens, wasted.resumed_tokens, wasted.again_ms) == (120, 20, 100)
    assert wasted.output_tokens == 0
    assert wasted.tail_tokens == 4
    assert [found.name for found in made.agents if found.wasted.prompt_tokens] == ["one"]


def test_what_is_void_is_wasted() -> None:
    made = account(void_once())
    assert spent(made) == {"queue": 10, "wait": 1, "recovery": 309, "prefill": 11, "decode": 400}
    assert (made.wasted.output_tokens, made.wasted.output_ms) == (20, 189)
    assert made.wasted.prompt_tokens == 8


def test_replayed_tokens_are_no_prompt() -> None:
    result = msgspec.structs.replace(lost_once(), exactness="grid")
    wasted = account(result).wasted
    assert (wasted.replayed_tokens, wasted.resumed_tokens) == (20, 0)


def test_a_streaming_session_computes_no_tail_twice() -> None:
    result = read_ahead()
    streaming = [msgspec.structs.replace(found, session="streaming-input") for found in result.agents]
    assert account(msgspec.structs.replace(result, agents=streaming)).wasted.tail_tokens == 0


def test_predictions_are_held_against_what_came() -> None:
    compared = {each.name: each for each in account(read_ahead()).comparisons}
    assert compared["end to end"].took_ms == 732
    assert compared["end to end"].off == pytest.approx(732 / 700 - 1)
    assert compared["prefill"].took_ms == 131
    assert "hidden" not in compared  # at full speed it takes less than beside decodes: that is no error
    assert dict(account_sentences(account(read_ahead())))["hidden"] == (
        "121 ms of appends, 144 prompt tokens read ahead, which at full speed take 100 ms by prediction"
    )
    assert compared["wait"].off is None
    assert sum(compared[name].took_ms for name in ("prefill", "decode", "wait")) == compared["end to end"].took_ms


def test_without_a_prediction_nothing_is_compared() -> None:
    assert account(in_series()).comparisons == ()


def _predicted(result: ChainResult, **fields: object) -> ChainResult:
    known = read_ahead()
    given = {"predictions": known.predictions, "predicted_ms": known.predicted_ms, **fields}
    return msgspec.structs.replace(result, **given)


def _entry() -> ResumeEntry:
    return ResumeEntry(at_ms=300, tokens=20, worker="a", why="it ended with signal 9.")


def _with(result: ChainResult, at: int, **fields: object) -> ChainResult:
    agents = list(result.agents)
    agents[at] = msgspec.structs.replace(agents[at], **fields)
    return msgspec.structs.replace(result, agents=agents)


@pytest.mark.parametrize(
    "result",
    [
        # All agents had finished; the second began anew; it did, and then lost its worker.
        _predicted(read_ahead(), resumed=True),
        _with(_predicted(read_ahead(), resumed=True), 1, attempt=2),
        _with(_predicted(lost_once(), resumed=True), 0, attempt=2, resumed=[_entry()]),
    ],
)
def test_a_prediction_of_what_a_restart_had_left_is_not_held_against_the_whole(result: ChainResult) -> None:
    made = account(result)
    assert made.comparisons == ()
    assert dict(account_sentences(made))["predicted"] == (
        "not compared: the daemon was restarted, and predicted anew for what was left"
    )


@pytest.mark.parametrize(
    "result",
    [
        _with(_predicted(lost_once(), resumed=True), 0, resumed=[_entry()]),
        _with(_predicted(void_once(), placement="ping-pong"), 0, attempt=2),
        _with(_predicted(void_once(), placement="ping-pong", resumed=True), 0, attempt=2, resumed=[_entry()]),
    ],
)
def test_a_chain_of_one_life_of_the_daemon_is_compared_whatever_it_lost(result: ChainResult) -> None:
    made = account(result)
    assert made.comparisons
    assert "predicted" not in dict(account_sentences(made))


def test_a_chain_that_waits_has_no_path() -> None:
    made = account(queued())
    assert (made.e2e_ms, made.path, made.hidden_ms) == (None, (), 0)
    assert made.agents[0].hops == 0


def test_a_chain_that_runs_is_told_of_as_far_as_it_has_come() -> None:
    result = read_ahead()
    running = msgspec.structs.replace(
        result.agents[1],
        state="reading",
        finalized_ms=None,
        first_token_ms=None,
        last_token_ms=None,
        hops=[hop("b", (112, None, None, None), state="running", tokens=0)],
        appends=result.agents[1].appends[:2],
    )
    first = result.agents[0]
    made = account(msgspec.structs.replace(result, state="running", e2e_ms=None, agents=[first, running]))
    assert made.path == ()
    assert made.hidden_tokens == 132
    assert made.agents[1].prefill_ms is None
    assert made.comparisons == ()


def test_results_of_older_daemons_are_read() -> None:
    """They had no hops, and did not say who reads whom."""
    result = read_ahead()
    old = [
        msgspec.structs.replace(found, hops=[], reads=[], ttft_ms=ttft)
        for found, ttft in zip(result.agents, (111.0, 31.0), strict=True)
    ]
    made = account(msgspec.structs.replace(result, agents=old, started_ms=None, devices={}))
    assert [step.agent for step in made.path] == ["one", "one", "one", "two", "two"]
    assert sum(step.ms for step in made.path) == 742
    assert made.hidden_ms == 121


def test_tokens_flow_from_decodes_to_what_takes_them() -> None:
    found = flows(read_ahead())
    assert [(flow.tokens, flow.span.kind, flow.at_ms) for flow in found] == [
        (22, "append", 300),
        (18, "append", 500),
    ]
    # Tokens 110 to 150 of the prompt are the output; the first append ended at 100.
    assert {flow.writer.agent for flow in found} == {0}


def test_tokens_flow_from_the_hop_that_wrote_them() -> None:
    assert [flow.writer.number for flow in flows(lost_once())] == [1, 1]


def test_a_joined_prompt_takes_its_outputs_at_once() -> None:
    result = in_series()
    joined = msgspec.structs.replace(result.agents[1], reads=[OutputRead(agent="one", at=None, tokens=40)])
    found = flows(msgspec.structs.replace(result, agents=[result.agents[0], joined]))
    assert [(flow.tokens, flow.span.kind) for flow in found] == [(40, "prefill")]


def test_hops_that_were_open_together_stand_in_rows_of_their_own() -> None:
    first, second = lanes(lost_once())
    assert (first.worker, second.worker) == ("a", "b")
    assert first.devices == ("GPU-11111111-2222-3333-4444-555555555555",)
    assert [[(hop.agent, hop.number) for hop in row] for row in second.rows] == [[(1, 0)], [(0, 1)]]


_ms = st.integers(0, 2000).map(float)


@st.composite
def any_agent(draw: st.DrawFn, name: str, before: list[str]) -> AgentResult:
    """An agent with moments in any order, as clocks that were joined badly might give."""
    hops: list[HopEntry] = []
    for _ in range(draw(st.integers(0, 3))):
        moments = (draw(_ms), draw(st.none() | _ms), draw(st.none() | _ms), draw(st.none() | _ms))
        state = draw(st.sampled_from(["running", "finished", "failed", "aborted", "lost", "moved"]))
        found = hop(draw(st.sampled_from("ab")), moments, state=state, before=draw(st.integers(0, 3)))
        hops.append(msgspec.structs.replace(found, cached_tokens=draw(st.integers(0, 100))))
    reads = [OutputRead(agent=other, at=draw(st.none() | st.integers(0, 50)), tokens=9) for other in before]
    appends = [append(draw(_ms), draw(st.none() | _ms), 10, 10 * at + 10) for at in range(draw(st.integers(0, 3)))]
    last = draw(_ms)
    if kind := draw(st.sampled_from(["", "extract", "call"])):
        hops = [msgspec.structs.replace(found, worker="") for found in hops]
        appends = []
    return AgentResult(
        name=name,
        kind=kind or "agent",  # type: ignore[arg-type]
        hops=hops,
        reads=reads,
        appends=appends,
        last_token_ms=last,
        first_token_ms=last,
    )


@given(data=st.data(), state=st.sampled_from(["finished", "running", "failed"]))
def test_no_result_is_too_odd_to_be_told_of(data: st.DataObject, state: str) -> None:
    names = ["one", "two", "three"]
    agents = [data.draw(any_agent(name, names[:at])) for at, name in enumerate(names)]
    result = chain(agents, state=state)
    made = account(result)
    assert all(step.ms >= 0 for step in made.path)
    assert made.hidden_ms >= 0
    for found in chain_spans(result):
        assert all(span.start_ms <= span.end_ms for span in found.spans)
        assert all(left.end_ms <= right.start_ms for left, right in pairwise(found.spans))
        assert all(found.entry.started_ms <= span.start_ms <= span.end_ms <= found.end_ms for span in found.spans)
    for lane in lanes(result):
        for row in lane.rows:
            assert all(left.end_ms <= right.entry.started_ms for left, right in pairwise(row))
    assert sum(len(hops_of(found)) for found in agents) == len(chain_spans(result))
