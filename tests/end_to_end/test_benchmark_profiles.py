"""The chains that are measured, the way runs are ordered, and how presend takes a chain apart."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import msgspec
import pytest

from bare_chain import bare_agents
from chain import build_chain, parse_arguments
from cores import on_allowed_cores
from harness import check_ready, chosen_ways, in_order
from pingpong_bus.chain import parse_chain, raw_parts, upstreams, validate_chain
from pingpong_bus.errors import ConfigError, DaemonUnavailable, DataError, UsageError
from pingpong_bus.messages import AgentResult, ChainResult, EngineLimits, StatusReply, WorkerStatus
from presend import chained, presend_agents
from profiles import (
    PROFILES,
    Profile,
    filling_chain,
    ids_chain,
    text_chain,
    with_forced_length,
    with_sampling,
)
from provenance import command_line

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = Profile(name="small", prefix=50, output=8, last_output=2, agents=3, suffix=4)


def test_ids_chain_has_the_shape_of_its_profile() -> None:
    chain = ids_chain(SMALL, vocabulary=500)
    validate_chain(chain)
    assert [agent.max_tokens for agent in chain.agents] == [8, 8, 2]
    assert [upstreams(chain, index) for index in range(3)] == [[], [0], [1]]
    assert all(agent.ignore_eos for agent in chain.agents)
    for index, agent in enumerate(chain.agents):
        ids = [item for item in agent.prompt_ids or [] if isinstance(item, int)]
        assert len(ids) == 54
        assert all(100 <= item < 500 for item in ids)
        assert len(raw_parts(chain, index, {})) == (3 if index else 1)


def test_ids_chain_depends_on_its_seed_alone() -> None:
    assert ids_chain(SMALL, seed=1) == ids_chain(SMALL, seed=1)
    assert ids_chain(SMALL, seed=1) != ids_chain(SMALL, seed=2)


def test_agents_have_different_prefixes() -> None:
    prefixes = {tuple(agent.prompt_ids or [])[:50] for agent in ids_chain(PROFILES["cpu"]).agents}
    assert len(prefixes) == 5


def test_the_cpu_profile_is_the_published_case() -> None:
    profile = PROFILES["cpu"]
    assert (profile.prefix, profile.suffix, profile.output, profile.last_output, profile.agents) == (
        1000,
        16,
        64,
        16,
        5,
    )


def test_forced_length_and_sampling() -> None:
    chain = with_sampling(with_forced_length(text_chain()), temperature=0.7, seed=40)
    validate_chain(chain)
    assert all(agent.ignore_eos and agent.temperature == 0.7 for agent in chain.agents)
    assert [agent.seed for agent in chain.agents] == [40, 41, 42, 43, 44]


def test_what_fills_the_caches_has_the_prefixes_and_no_more() -> None:
    chain = ids_chain(PROFILES["smoke"], vocabulary=5000)
    filling = filling_chain(chain)
    validate_chain(filling)
    assert [agent.max_tokens for agent in filling.agents] == [1] * 5
    first, asked = filling.agents[0].prompt_ids or [], chain.agents[0].prompt_ids or []
    assert first[:200] == asked[:200]
    assert first[200] != asked[200]
    assert [agent.prompt_ids for agent in filling.agents[1:]] == [agent.prompt_ids for agent in chain.agents[1:]]
    text = filling_chain(text_chain())
    validate_chain(text)
    assert [agent.messages for agent in text.agents] == [agent.messages for agent in text_chain().agents]


def test_command_line_changes_the_profile() -> None:
    options = parse_arguments(["--profile", "cpu", "--prefix", "30", "--output", "40", "--agents", "2"])
    chain = build_chain(options, 1000)
    assert [agent.max_tokens for agent in chain.agents] == [40, 10]
    assert len(chain.agents[0].prompt_ids or []) == 46


def test_unknown_profiles_and_modes_are_refused() -> None:
    with pytest.raises(UsageError, match="no profile or file nowhere"):
        build_chain(parse_arguments(["--profile", "nowhere"]), 1000)
    with pytest.raises(UsageError, match="no mode 'fast'"):
        chosen_ways("serial,fast")


def test_alternating_order_turns_every_other_run_round() -> None:
    modes = chosen_ways("serial,ping-pong,presend")
    assert in_order(modes, 0, "alternate") == modes
    assert in_order(modes, 1, "alternate") == modes[::-1]
    assert in_order(modes, 1, "fixed") == modes


def test_presend_takes_prompts_apart_at_the_upstreams_output() -> None:
    chain = ids_chain(SMALL, vocabulary=500)
    agents = presend_agents(chain, _serial_result())
    assert [len(agent.prefix) for agent in agents] == [54, 50, 50]
    assert [len(agent.suffix) for agent in agents] == [0, 4, 4]
    request = agents[1].request([900, 901])
    validate_chain(request)
    assert request.agents[0].prompt_ids == [*agents[1].prefix, 900, 901, *agents[1].suffix]
    assert request.agents[0].max_tokens == 8
    assert (agents[1].ahead().agents[0].prompt_ids, agents[1].ahead().agents[0].max_tokens) == (agents[1].prefix, 1)


def test_presend_counts_what_the_client_takes_between_two_requests() -> None:
    """Two requests of 200 ms each, the second 30 ms after the first's last token."""
    alone = AgentResult(name="a", ttft_ms=50.0, total_ms=200.0, first_token_ms=50.0, last_token_ms=200.0)
    first, second = chained([alone, alone], [1.0, 231.0])
    assert (first.ttft_ms, first.total_ms, first.last_token_ms) == (51.0, 201.0, 201.0)
    assert (second.first_token_ms, second.last_token_ms) == (281.0, 431.0)
    assert (second.ttft_ms, second.total_ms) == (80.0, 230.0)


LIMITS = EngineLimits(
    engine="e", model="m", max_model_len=1, vocabulary_size=9, block_size=1, kv_tokens=1, max_num_seqs=1
)


@pytest.mark.parametrize(
    ("state", "worker_state", "limits", "says"),
    [
        ("starting", "loading", None, "the daemon is starting, b is loading."),
        ("ready", "dead", LIMITS, "the daemon is ready, b is dead."),
        ("ready", "ready", LIMITS, ""),
    ],
)
def test_a_daemon_that_is_not_all_there_is_refused(
    state: str, worker_state: str, limits: EngineLimits | None, says: str
) -> None:
    def worker(name: str, **fields: object) -> WorkerStatus:
        values = {"name": name, "devices": [], "state": "ready", "stage": "", "pid": 1, "hops": 0, "limits": LIMITS}
        return WorkerStatus(**(values | {"rss_bytes": 0, "output_tokens": 0} | fields))

    status = StatusReply(
        request=1, instance="i", version="1", pid=1, uptime_s=1.0, state=state, slots_free=1, slots_total=1,
        slot_capacity=1, workers=[worker("a"), worker("b", state=worker_state, limits=limits)], chains={},
    )  # fmt: skip
    if not says:
        check_ready(status)
        return
    with pytest.raises(DaemonUnavailable) as caught:
        check_ready(status)
    assert caught.value.message == says


def test_the_example_runs_on_other_cores_where_it_has_to() -> None:
    text = (EXAMPLES / "cpu.toml").read_text()
    assert on_allowed_cores(text, {0, 1, 2}) == text
    adapted = on_allowed_cores(text, {7, 12, 30})
    assert [group["devices"] for group in tomllib.loads(adapted)["groups"]] == [["cpu:7"], ["cpu:12"]]
    swapped = on_allowed_cores(text, {1, 5})  # one of the two is there: the other may not take its place twice
    assert [group["devices"] for group in tomllib.loads(swapped)["groups"]] == [["cpu:1"], ["cpu:5"]]
    with pytest.raises(ConfigError, match="takes 2 CPU cores and this process may use 1"):
        on_allowed_cores(text, {3})


def test_presend_wants_a_simple_chain() -> None:
    chain = parse_chain((EXAMPLES / "fan_in.json").read_bytes())
    result = ChainResult(id="c", name="c", state="finished", agents=[AgentResult(name=a.name) for a in chain.agents])
    with pytest.raises(DataError, match="critic|judge"):
        presend_agents(chain, result)


def test_bare_chain_takes_the_same_ids() -> None:
    chain = ids_chain(SMALL, vocabulary=500)
    taken = bare_agents(chain)
    seen = presend_agents(chain, _serial_result())
    assert [(agent.prefix, agent.suffix) for agent in taken] == [(agent.prefix, agent.suffix) for agent in seen]
    with pytest.raises(DataError):
        bare_agents(text_chain())


@pytest.mark.parametrize("name", ["five_agents", "two_agents", "fan_in"])
def test_examples_are_valid_chains(name: str) -> None:
    chain = text_chain(EXAMPLES / f"{name}.json")
    last = len(chain.agents) - 1
    assert len(upstreams(chain, last)) == (2 if name == "fan_in" else 1)


def test_the_two_agent_example_has_an_input_with_a_default() -> None:
    assert text_chain(EXAMPLES / "two_agents.json").inputs == {"topic": "sleeping well"}


def test_five_agents_bring_about_a_thousand_words_of_prose_each() -> None:
    """Repeated filler would compress far better than prose does."""
    import zlib

    chain = text_chain()
    assert [agent.max_tokens for agent in chain.agents] == [64, 64, 64, 64, 16]
    for agent in chain.agents:
        text = " ".join(message.content for message in agent.messages or []).encode()
        assert len(text) / len(zlib.compress(text, 9)) < 2.6


@pytest.mark.engine
def test_five_agents_bring_about_a_thousand_tokens_each() -> None:
    from pingpong_worker.model_store import resolve_model

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    for agent in json.loads(msgspec.json.encode(text_chain()))["agents"]:
        messages = [{**message, "content": _without_references(message["content"])} for message in agent["messages"]]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert 900 <= len(ids) <= 1100, agent["name"]


def _without_references(text: str) -> str:
    return text if "{{" not in text else text[: text.index("{{")] + text[text.index("}}") + 2 :]


def _serial_result() -> ChainResult:
    """What a serial run of the small chain could give, with prompt ids."""
    chain = ids_chain(SMALL, vocabulary=500)
    outputs = [[600 + index * 10 + at for at in range(agent.max_tokens)] for index, agent in enumerate(chain.agents)]
    agents = []
    for index, agent in enumerate(chain.agents):
        prompt: list[int] = []
        for item in agent.prompt_ids or []:
            prompt += [item] if isinstance(item, int) else outputs[index - 1]
        agents.append(AgentResult(name=agent.name, output_ids=outputs[index], prompt_ids=prompt))
    return ChainResult(id="c", name=chain.name, state="finished", agents=agents)


def test_the_command_line_is_kept_without_the_machines_folders() -> None:
    given = ["--out", "/srv/x y/a.jsonl", "--side=ours=/run/pp:auto", '{"model": "/m/q", "n": 1}', "examples/cpu.toml"]
    assert command_line(given) == ["--out", "a.jsonl", "--side=ours=pp:auto", '{"model": "q", "n": 1}', given[-1]]
