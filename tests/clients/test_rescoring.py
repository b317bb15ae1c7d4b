"""What the engine is asked where two outputs part, and what is said where there is nothing to ask."""

import msgspec
import pytest

from pingpong_bus.errors import DaemonUnavailable, EngineError, Overloaded
from pingpong_bus.messages import AgentResult, ChainResult, Score
from pingpong_client.certificate import compare_agents, compare_runs, digest
from pingpong_client.rescoring import question, with_gaps


def agent(output, prompt=(1, 2), **fields):
    values = {
        "prompt_ids": list(prompt),
        "prompt_digest": digest(prompt),
        "output_ids": output,
        "finish_reason": "stop",
        "stop_token": 9,
    }
    return AgentResult(name="a", state="finished", **(values | fields))


def asked(serial, read_ahead):
    return question(compare_agents(serial, read_ahead).difference, serial, read_ahead)


def test_both_tokens_at_the_common_prefix():
    assert asked(agent([5, 6, 7]), agent([5, 8])) == ([1, 2, 5], [6, 8])


def test_an_output_that_ends_there_has_its_stop_token():
    assert asked(agent([5]), agent([5, 6])) == ([1, 2, 5], [9, 6])
    assert asked(agent([5]), agent([5], stop_token=8)) == ([1, 2, 5], [9, 8])


@pytest.mark.parametrize(
    ("serial", "read_ahead", "why"),
    [
        (agent([5]), agent([5], prompt=(1, 3)), "the prompts differ"),
        (agent([5], prompt_ids=None), agent([6], prompt_ids=None), "joined as text"),
        (agent([5], stop_token=None, finish_reason="length"), agent([5, 6]), "without a token of its own"),
        (agent([5]), agent([5], finish_reason="length"), "the tokens are equal"),
    ],
)
def test_why_there_is_nothing_to_ask(serial, read_ahead, why):
    assert why in asked(serial, read_ahead)
    assert why in asked(read_ahead, serial)


async def gap(link, serial, read_ahead, grid=64):
    results = [
        ChainResult(id="x", name="n", state="finished", agents=[each], exactness="grid", grid=grid)
        for each in (serial, read_ahead)
    ]
    async with link.client() as client:
        run = await with_gaps(client, compare_runs(*results), *results)
    return run.agents[0].difference


async def test_the_gap_is_the_difference_of_the_log_probabilities(link, daemon):
    found = await gap(link, agent([5]), agent([6]))
    assert (found.logit_gap, found.no_gap) == (0.25, "")
    [score] = [request for request in daemon.requests if isinstance(request, Score)]
    assert score.grid == 64
    daemon.logprobs = [-1.0, None]
    found = await gap(link, agent([5]), agent([6]))
    assert (found.logit_gap, found.no_gap) == (None, "the engine finds a token too unlikely to say how much")


@pytest.mark.parametrize("error", [EngineError("it is too long."), Overloaded("it is too long.")])
async def test_a_refusal_is_why_there_is_no_gap(link, daemon, error):
    daemon.refuse[Score] = error
    found = await gap(link, agent([5]), agent([6]))
    assert (found.logit_gap, found.no_gap) == (None, "it is too long")


async def test_a_daemon_that_has_gone_ends_it(link, daemon):
    daemon.refuse[Score] = DaemonUnavailable("it has gone.")
    with pytest.raises(DaemonUnavailable):
        await gap(link, agent([5]), agent([6]))


async def test_equal_runs_ask_nothing(link, daemon):
    assert await gap(link, agent([5]), agent([5])) is None
    assert not any(isinstance(request, Score) for request in daemon.requests)


def test_no_gap_is_kept_in_json():
    found = compare_agents(agent([5]), agent([6])).difference
    assert msgspec.to_builtins(found)["logit_gap"] is None
