"""Spans as values: which there are, when, of what, and what they keep to themselves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pingpong_bus.chain import Agent
from pingpong_bus.messages import AgentResult, AppendEntry, DraftCounts, HopEntry, SeamCounts
from pingpongd.trace_spans import MOST_APPENDS, SpanPlan, spans_of, without_unneeded
from traced_chain import SECRET, at, changed, traced


def named(plans: list[SpanPlan], name: str) -> SpanPlan:
    (found,) = [plan for plan in plans if plan.name == name]
    return found


def test_the_tree_of_a_chain() -> None:
    plans = spans_of(traced())
    chain, adviser, editor = (
        named(plans, it) for it in ("invoke_workflow tips", "invoke_agent adviser", "invoke_agent editor")
    )
    assert plans[0] is chain
    assert chain.parent is None
    assert (adviser.parent, editor.parent) == (0, 0)
    assert editor.links == [plans.index(adviser)]
    assert adviser.links == []
    children = [plan.name for plan in plans if plan.parent == plans.index(editor)]
    assert children == ["append", "append", "chat m"]
    for number, plan in enumerate(plans):
        assert plan.parent is None or plan.parent < number
        assert all(link < number for link in plan.links)


def test_times_are_those_of_the_work_and_children_lie_within_their_parents() -> None:
    plans = spans_of(traced())
    chain, editor = plans[0], named(plans, "invoke_agent editor")
    assert (chain.start_ns, chain.end_ns) == (at(0), at(400))
    assert (editor.start_ns, editor.end_ns) == (at(31), at(400))
    assert named(plans, "queue").end_ns == at(3)
    first, overtaken = [plan for plan in plans if plan.name == "append"]
    assert (first.start_ns, first.end_ns) == (at(40), at(90))
    assert overtaken.end_ns == at(201)
    answer = [plan for plan in plans if plan.name == "chat m"][1]
    assert (answer.start_ns, answer.end_ns) == (at(201), at(400))
    assert [(event.name, event.at_ns) for event in answer.events] == [("first_token", at(215))]
    for plan in plans:
        assert plan.start_ns <= plan.end_ns
        if plan.parent is not None:
            assert plans[plan.parent].start_ns <= plan.start_ns
            assert plan.end_ns <= plans[plan.parent].end_ns


def test_attributes_are_those_of_the_conventions() -> None:
    plans = spans_of(traced())
    chain, editor = plans[0].attributes, named(plans, "invoke_agent editor").attributes
    assert chain["gen_ai.operation.name"] == "invoke_workflow"
    assert chain["gen_ai.workflow.name"] == chain["gen_ai.agent.name"] == "tips"
    assert chain["gen_ai.usage.input_tokens"] == 250
    assert chain["gen_ai.usage.output_tokens"] == 50
    assert chain["pingpong.chain.id"] == "c1"
    assert chain["pingpong.chain.placement"] == "ping-pong"
    assert editor["gen_ai.operation.name"] == "invoke_agent"
    assert editor["gen_ai.agent.name"] == "editor"
    assert editor["gen_ai.request.model"] == "m"
    assert editor["gen_ai.request.seed"] == 7
    assert editor["gen_ai.request.temperature"] == 0.5
    assert editor["gen_ai.response.finish_reasons"] == ["stop"]
    assert editor["pingpong.worker"] == "b"
    adviser = named(plans, "invoke_agent adviser").attributes
    assert adviser["gen_ai.usage.cache_read.input_tokens"] == 32
    assert "gen_ai.request.seed" not in adviser
    answer = [plan for plan in plans if plan.name == "chat m"][1].attributes
    assert answer["gen_ai.response.time_to_first_chunk"] == 0.014


def test_nothing_of_a_text_is_told_unless_it_is_asked_for() -> None:
    failed = changed(state="failed", error=f"agent: {SECRET}")
    assert SECRET not in repr([*spans_of(traced()), *spans_of(failed)])
    assert not any("messages" in name for plan in spans_of(traced()) for name in plan.attributes)


@pytest.mark.parametrize("texts", [False, True])
def test_spans_are_the_same_without_what_they_do_not_tell(texts: bool) -> None:
    agents = [msgspec.structs.replace(it, output_ids=[1, 2], prompt_ids=[3]) for it in traced().result.agents]
    whole = msgspec.structs.replace(changed(agents=agents), texts=texts)
    raw = [msgspec.structs.replace(it, system=None, prompt=None, messages=None) for it in whole.chain.agents]
    raw = [msgspec.structs.replace(raw[0], raw_prompt=SECRET), msgspec.structs.replace(raw[1], prompt_ids=[7])]
    other = msgspec.structs.replace(whole, chain=msgspec.structs.replace(whole.chain, agents=raw))
    for given in (whole, other):
        kept = without_unneeded(given)
        assert spans_of(kept) == spans_of(given)
        assert all((it.output_ids, it.prompt_ids) == ([], None) for it in kept.result.agents)
        assert texts or SECRET not in repr([it.text for it in kept.result.agents])
        assert texts or all(not it.raw_prompt and not it.prompt and not it.messages for it in kept.chain.agents)


def test_of_a_hop_that_failed_no_sentence_is_told_for_it_may_quote_the_prompt() -> None:
    hops = [
        HopEntry(worker="a", started_ms=2, ended_ms=50, state="lost", why="its engine is gone"),
        HopEntry(worker="b", started_ms=51, ended_ms=200, state="failed", why=f"it cannot be read: {SECRET}"),
    ]
    broken = AgentResult(name="adviser", state="failed", worker="b", opened_ms=5, finalized_ms=10, hops=hops)
    given: dict[str, Any] = {"state": "failed", "agents": [broken, traced().result.agents[1]]}
    assert SECRET not in repr(spans_of(changed(**given)))
    assert named(spans_of(changed(**given)), "hop a").attributes["pingpong.hop.why"] == "its engine is gone"


def test_texts_are_told_where_they_are_asked_for() -> None:
    answers = [plan.attributes for plan in spans_of(traced(texts=True)) if plan.name == "chat m"]
    assert answers[0]["gen_ai.request.stop_sequences"] == [SECRET]
    assert answers[0]["gen_ai.input.messages"] == (
        f'[{{"role":"system","parts":[{{"type":"text","content":"{SECRET}"}}]}},'
        f'{{"role":"user","parts":[{{"type":"text","content":"{SECRET}"}}]}}]'
    )
    assert '"finish_reason":"stop"' in str(answers[1]["gen_ai.output.messages"])


def test_a_chain_that_failed_ends_when_it_ended_with_an_error() -> None:
    never = AgentResult(name="editor", state="cancelled")
    broken = AgentResult(name="adviser", state="failed", worker="a", opened_ms=5, finalized_ms=10)
    plans = spans_of(changed(state="failed", error="it broke", agents=[broken, never], e2e_ms=None))
    assert [plan.name for plan in plans] == ["invoke_workflow tips", "queue", "invoke_agent adviser", "chat m"]
    assert [plan.error for plan in plans] == ["chain_failed", "", "chain_failed", "chain_failed"]
    assert {plan.end_ns for plan in plans if plan.name != "queue"} == {at(410)}


def test_hops_are_told_apart_where_one_was_lost_or_moved() -> None:
    hops = [
        HopEntry(worker="a", started_ms=2, ended_ms=50, state="moved", tokens=4, why="a is slow"),
        HopEntry(worker="b", started_ms=51, ended_ms=200, state="finished", tokens_before=4, tokens=16),
    ]
    found = traced().result.agents
    fields = {name: getattr(found[0], name) for name in found[0].__struct_fields__} | {"hops": hops}
    plans = spans_of(changed(agents=[AgentResult(**fields), found[1]]))
    assert named(plans, "invoke_agent adviser").start_ns == at(2)
    moved, finished = named(plans, "hop a"), named(plans, "hop b")
    assert (moved.start_ns, moved.end_ns) == (at(2), at(50))
    assert moved.attributes["pingpong.hop.state"] == "moved"
    assert finished.attributes["pingpong.hop.tokens_before"] == 4


def test_of_very_many_appends_the_first_and_the_last_are_told() -> None:
    appends = [AppendEntry(at_ms=float(at), tokens=1, sent=at, done_ms=at + 0.5) for at in range(1000)]
    found = traced().result.agents
    fields = {name: getattr(found[1], name) for name in found[1].__struct_fields__} | {"appends": appends}
    plans = spans_of(changed(agents=[found[0], AgentResult(**fields)]))
    sent = [plan.attributes["pingpong.append.sent_tokens"] for plan in plans if plan.name == "append"]
    assert len(sent) == MOST_APPENDS
    assert (sent[0], sent[-1]) == (0, 999)
    assert named(plans, "invoke_agent editor").attributes["pingpong.agent.appends"] == 1000


def test_a_step_is_a_tool_beside_the_agents_and_agents_have_models_of_their_own() -> None:
    adviser, editor = traced().result.agents
    hops = [HopEntry(worker="", started_ms=200, opened_ms=203, first_token_ms=260, ended_ms=260, state="finished")]
    look_up = AgentResult(
        name="look-up", kind="call", state="finished", text=SECRET, output_tokens=12, opened_ms=203, hops=hops,
        first_token_ms=260, last_token_ms=260, ttft_ms=60,
    )  # fmt: skip
    drafts, seam = DraftCounts(steps=10, drafted=9, accepted=5), SeamCounts(rollbacks=1, tokens=4)
    last = msgspec.structs.replace(editor, model="large", drafts=drafts, seam=seam)
    chain = msgspec.structs.replace(
        traced().chain,
        agents=[
            traced().chain.agents[0],
            Agent(name="look-up", input=SECRET, call="search"),
            traced().chain.agents[1],
        ],
    )
    given = changed(agents=[msgspec.structs.replace(adviser, model="small"), look_up, last])
    given = msgspec.structs.replace(given, chain=chain, reads=((), (0,), (1,)))

    plans = spans_of(given)

    step, agent = named(plans, "execute_tool look-up"), named(plans, "invoke_agent editor")
    assert (step.parent, step.start_ns, step.end_ns) == (0, at(203), at(260))
    assert step.links == [plans.index(named(plans, "invoke_agent adviser"))]
    assert agent.links == [plans.index(step)]
    assert step.attributes["gen_ai.operation.name"] == "execute_tool"
    assert step.attributes["gen_ai.tool.name"] == "search"
    assert step.attributes["pingpong.step.characters"] == 12
    assert (agent.attributes["gen_ai.request.model"], named(plans, "chat small").parent is not None) == ("large", True)
    assert agent.attributes["pingpong.drafts.accepted_tokens"] == 5
    assert agent.attributes["pingpong.seam.tokens"] == 4
    assert plans[0].attributes["gen_ai.usage.output_tokens"] == 50  # characters are none
    assert SECRET not in repr(plans)
    assert SECRET in repr(spans_of(msgspec.structs.replace(given, texts=True)))
    assert spans_of(without_unneeded(given)) == plans
