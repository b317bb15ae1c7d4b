"""Which chains are taken, and which start."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import ChainError, Overloaded
from pingpong_bus.messages import EngineLimits, Literals, OutputOf, PreparedAgent
from pingpongd.admission import Room, check_fits, check_queue

ROOM = Room(slots_total=8, slot_tokens=500, max_queued=3)
LIMITS = EngineLimits(
    engine="test",
    model="m",
    max_model_len=1000,
    vocabulary_size=100,
    block_size=16,
    kv_tokens=10_000,
    max_num_seqs=4,
)


def chain(*agents: dict[str, Any]) -> Chain:
    return parse_chain(json.dumps({"name": "c", "agents": list(agents)}).encode())


def pair(first: int, second: int) -> Chain:
    return chain(
        {"name": "a", "prompt": "x", "max_tokens": first}, {"name": "b", "prompt": "{{a}}", "max_tokens": second}
    )


def prompts(first: int, second: int) -> list[PreparedAgent]:
    return [
        PreparedAgent(segments=[Literals(ids=[1] * first)]),
        PreparedAgent(segments=[Literals(ids=[1] * second), OutputOf(agent=0)]),
    ]


def test_a_chain_that_fills_the_engine_to_the_last_token_fits() -> None:
    check_fits(pair(400, 300), prompts(600, 300), [[LIMITS]] * 9, ROOM)


def test_one_token_more_is_refused_with_the_numbers() -> None:
    with pytest.raises(ChainError, match=r'agents\[1\]\.max_tokens: agent "b".*1001 tokens.*301.*400.*300.*takes 1000'):
        check_fits(pair(400, 300), prompts(600, 301), [[LIMITS]] * 9, ROOM)


def test_a_prompt_that_is_too_long_alone_is_to_blame() -> None:
    with pytest.raises(
        ChainError, match=r"agents\[0\]\.prompt: .*1001 tokens \(1000 of prompt \+ 1 max_tokens\).*takes 1000"
    ):
        check_fits(pair(1, 1), prompts(1000, 1), [[LIMITS]] * 9, ROOM)


@pytest.mark.parametrize(
    ("field", "value"),
    [("messages", [{"role": "user", "content": "x"}]), ("raw_prompt", "x"), ("prompt_ids", [1])],
)
def test_the_prompt_is_called_what_the_chain_calls_it(field: str, value: Any) -> None:
    with pytest.raises(ChainError, match=rf"agents\[0\]\.{field}: "):
        check_fits(chain({"name": "a", field: value, "max_tokens": 1}), prompts(1000, 1)[:1], [[LIMITS]] * 9, ROOM)


def test_what_an_agent_reads_may_be_too_long_for_any_answer() -> None:
    with pytest.raises(
        ChainError,
        match=r'agents\[1\]\.prompt: .*600 of prompt \+ up to 400 read from agent "a".*Lower max_tokens of "a", ',
    ):
        check_fits(pair(400, 1), prompts(1, 600), [[LIMITS]] * 9, ROOM)


def test_a_step_that_is_read_is_named_with_the_key_that_bounds_it() -> None:
    agents = [
        {"name": "a", "prompt": "x", "max_tokens": 100},
        {"name": "s", "input": "{{a}}", "extract": {"fenced": ""}, "max_chars": 450},
        {"name": "b", "prompt": "{{a}}{{s}}", "max_tokens": 1},
    ]
    prepared = [
        PreparedAgent(segments=[Literals(ids=[1])]),
        PreparedAgent(segments=[]),
        PreparedAgent(segments=[Literals(ids=[1] * 500), OutputOf(agent=0), OutputOf(agent=1)]),
    ]
    with pytest.raises(
        ChainError, match='550 read from step "s" and agent "a" .*Lower max_chars of "s" and max_tokens of "a"'
    ):
        check_fits(chain(*agents), prepared, [[LIMITS], [], [LIMITS]], ROOM)


def test_a_small_kv_cache_is_to_blame_where_it_is() -> None:
    small = EngineLimits(
        engine="t", model="m", max_model_len=1000, vocabulary_size=9, block_size=16, kv_tokens=50, max_num_seqs=1
    )
    check_fits(pair(1, 1), prompts(47, 1), [[LIMITS, small]] * 9, ROOM)
    with pytest.raises(ChainError, match=r"max_tokens: .*49 tokens.*KV cache holds 48.*more memory"):  # whole blocks
        check_fits(pair(2, 1), prompts(47, 1), [[LIMITS, small]] * 9, ROOM)
    with pytest.raises(ChainError, match=r"prompt: .*KV cache holds 48"):
        check_fits(pair(1, 1), prompts(48, 1), [[LIMITS, small]] * 9, ROOM)


def test_an_output_longer_than_a_log_is_refused() -> None:
    with pytest.raises(ChainError, match=r"agents\[0\]\.max_tokens.*501.*500"):
        check_fits(pair(501, 1), prompts(1, 1), [[LIMITS]] * 9, ROOM)


def test_more_agents_than_logs_are_refused() -> None:
    many = chain(*({"name": f"a{at}", "prompt": "x", "max_tokens": 1} for at in range(9)))
    with pytest.raises(ChainError, match="9 agents.*8 token logs"):
        check_fits(many, [PreparedAgent(segments=[Literals(ids=[1])])] * 9, [[LIMITS]] * 9, ROOM)


def test_a_full_queue_refuses() -> None:
    check_queue(2, ROOM)
    with pytest.raises(Overloaded, match="3 chains"):
        check_queue(3, ROOM)
