"""Who says whether tokens are guessed, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chains_desk import LIMITS
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import ChainError, UsageError
from pingpong_bus.messages import SubmitOptions
from pingpongd.speculation import check_speculation, speculates

ABLE = {"": [("g", msgspec.structs.replace(LIMITS, speculation="chain"))]}
UNABLE = {"": [("g", msgspec.structs.replace(LIMITS, speculation_refusal="its model is hybrid."))]}


def chain(agent: bool | None = None, whole: bool | None = None, model: str | None = None) -> Chain:
    agents: list[dict[str, Any]] = [
        {"name": "a", "prompt": "x", "max_tokens": 3},
        {"name": "b", "prompt": "{{a}}", "max_tokens": 3},
        {"name": "s", "input": "{{b}}", "extract": {"fenced": ""}},
    ]
    if agent is not None:
        agents[1]["speculate"] = agent
    if model is not None:
        agents[1]["model"] = model
    document: dict[str, Any] = {"name": "c", "agents": agents}
    if whole is not None:
        document["speculate"] = whole
    return parse_chain(msgspec.json.encode(document))


@pytest.mark.parametrize(
    ("agent", "whole", "submission", "daemon", "expected"),
    [
        (None, None, None, False, False),
        (None, None, None, True, True),
        (None, None, True, False, True),
        (None, None, False, True, False),
        (None, False, True, True, False),
        (None, True, False, False, True),
        (False, True, True, True, False),
        (True, False, False, False, True),
    ],
)
def test_the_nearest_that_says_something_counts(
    agent: bool | None, whole: bool | None, submission: bool | None, daemon: bool, expected: bool
) -> None:
    options = SubmitOptions(speculate=submission)
    assert speculates(chain(agent, whole), 1, options, "fast", enabled=daemon) is expected
    assert speculates(chain(agent, whole), 1, options, "invariant", enabled=daemon) is expected
    assert not speculates(chain(agent, whole), 1, options, "grid", enabled=daemon)
    assert not speculates(chain(agent, whole), 2, options, "fast", enabled=daemon), "no step is guessed for"


def test_a_session_that_is_named_is_given_unless_guessing_is_asked_for() -> None:
    streaming = SubmitOptions(session="streaming-input")
    assert not speculates(chain(), 0, streaming, "fast", enabled=True)
    assert speculates(chain(whole=True), 0, streaming, "fast", enabled=False)
    assert speculates(chain(), 0, SubmitOptions(session="prefix-cache"), "fast", enabled=True)


def test_guessing_on_a_grid_is_refused_where_it_is_asked_for_alone() -> None:
    check_speculation(chain(), SubmitOptions(), "grid", ABLE)
    check_speculation(chain(False), SubmitOptions(speculate=False), "grid", ABLE)
    with pytest.raises(ChainError, match='exactness "grid" cannot be kept.*agent "b"') as chains:
        check_speculation(chain(True), SubmitOptions(), "grid", ABLE)
    assert chains.value.field == "agents[1].speculate"
    with pytest.raises(UsageError, match='exactness "grid" cannot be kept.*take exactness "fast"') as refused:
        check_speculation(chain(), SubmitOptions(speculate=True), "grid", ABLE)
    assert refused.value.field == "speculate"
    with pytest.raises(ChainError, match='exactness "grid" cannot be kept'):
        check_speculation(chain(whole=True), SubmitOptions(), "grid", ABLE)


def test_agents_that_sample_are_left_out_and_refused_where_they_ask_themselves() -> None:
    def sampling(one: Chain) -> Chain:
        agents = [
            msgspec.structs.replace(agent, temperature=0.7) if agent.name == "b" else agent for agent in one.agents
        ]
        return msgspec.structs.replace(one, agents=agents)

    check_speculation(sampling(chain(whole=True)), SubmitOptions(speculate=True), "fast", ABLE)
    for index, guessed in ((0, True), (1, False)):
        one = sampling(chain(whole=True))
        assert speculates(one, index, SubmitOptions(), "fast", enabled=True) is guessed
    with pytest.raises(ChainError, match='"b" cannot be guessed: it samples.*temperature 0') as refused:
        check_speculation(sampling(chain(True)), SubmitOptions(), "fast", ABLE)
    assert refused.value.field == "agents[1].speculate"


def test_engines_that_cannot_are_named_with_the_reason() -> None:
    check_speculation(chain(True, True), SubmitOptions(speculate=True), "fast", ABLE)
    check_speculation(chain(), SubmitOptions(), "fast", UNABLE)
    with pytest.raises(ChainError, match='"b".*group "g" does not guess: its model is hybrid') as refused:
        check_speculation(chain(True), SubmitOptions(), "fast", UNABLE)
    assert refused.value.field == "agents[1].speculate"
    assert refused.value.hint == "Leave speculate out.", "it is enabled already"
    with pytest.raises(UsageError, match="its model is hybrid"):
        check_speculation(chain(), SubmitOptions(speculate=True), "fast", UNABLE)
    with pytest.raises(ChainError, match="`\\[speculation\\] enabled` is not set.*or set `"):
        check_speculation(chain(whole=True), SubmitOptions(), "fast", {"": [("g", LIMITS)]})
    # One group that can is enough: the chain runs with guesses there, and without elsewhere.
    check_speculation(chain(True), SubmitOptions(), "fast", {"": UNABLE[""] + ABLE[""]})


def test_only_engines_of_an_agents_own_model_count() -> None:
    other = {"": ABLE[""], "large": UNABLE[""]}
    with pytest.raises(ChainError, match='"b".* does not guess'):
        check_speculation(chain(True, model="large"), SubmitOptions(), "fast", other)
    check_speculation(chain(False, True, model="large"), SubmitOptions(), "fast", other)
