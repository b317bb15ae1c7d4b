"""Chains over several models, on workers and a store that the test plays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from chains_desk import LIMITS, FakeWorker, Service, advance
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import ChainError, Overloaded, UsageError
from pingpong_bus.messages import PROTOCOL_VERSION, HopFinalized, OutputSource, Submit, TokenizerSource

SMALL = msgspec.structs.replace(LIMITS, model="small model", tokenizer="t", max_model_len=100)
LARGE = msgspec.structs.replace(LIMITS, model="large model", tokenizer="u")
GROUPS: dict[str, Any] = {
    "model": "small",
    "models": {"large": {"model": "x"}, "unused": {"model": "y"}},
    "groups": [
        {"name": "a", "devices": ["cpu:0"]},
        {"name": "b", "devices": ["cpu:0"], "model": "large"},
        {"name": "c", "devices": ["cpu:0"], "model": "large"},
        {"name": "d", "devices": ["cpu:0"], "model": "small"},
    ],
}


@pytest.fixture
def models() -> Iterator[Service]:
    """The default model on "a" and "d", the large one on "b" and "c"; their tokenizers differ."""
    found = Service(limits=SMALL, more=GROUPS, limits_of={"large": LARGE}, groups="abcd")
    yield found
    found.close()


def chain(*agents: dict[str, Any], **more: Any) -> Chain:
    document = {"name": "c", "agents": [{"max_tokens": 8, **agent} for agent in agents]} | more
    return parse_chain(json.dumps(document).encode())


PAIR = chain({"name": "one", "prompt": "x"}, {"name": "two", "model": "large", "prompt": "read {{one}}"})


def started(service: Service) -> dict[str, str]:
    """Which worker runs which hop's agent."""
    return {
        hop.spec.hop.split("/")[1]: worker.name
        for worker in service.fleet.workers.values()
        for hop in worker.running.values()
    }


@pytest.mark.parametrize("mode", ["auto", "serial", "ping-pong", "overlap"])
def test_each_agent_runs_on_groups_of_its_model(models: Service, mode: str) -> None:
    for _ in range(3):
        number = models.submit(PAIR, mode)
        models.settle()
        result = models.result(number)
        assert result.state == "finished", result.error
        assert [agent.worker in names for agent, names in zip(result.agents, ("ad", "bc"), strict=True)] == [True, True]
        assert [agent.model for agent in result.agents] == ["small model", "large"]


def test_outputs_of_another_tokenizer_are_joined_as_text_ahead(models: Service) -> None:
    models.submit(PAIR, "ping-pong")
    while "1" not in started(models):
        _one_step(models)
    spec = next(hop.spec for hop in models.fleet.running() if hop.spec.hop.split("/")[1] == "1")
    assert spec.joined is not None
    assert spec.joined.ahead
    assert spec.session == "prefix-cache"
    assert spec.joined.sources == {0: OutputSource(tokenizer=TokenizerSource(model=""))}
    assert spec.joined.expected == {0: 8}
    assert spec.match == spec.joined


def test_equal_tokenizers_splice_ids() -> None:
    service = Service(
        limits=SMALL, more=GROUPS, limits_of={"large": msgspec.structs.replace(LARGE, tokenizer="t")}, groups="abcd"
    )
    number = service.submit(PAIR)
    assert not service.record(number).prepared[1].text
    service.close()


def test_an_unknown_model_is_refused_with_those_that_there_are(models: Service) -> None:
    with pytest.raises(ChainError, match=r'agents\[0\]\.model: there is no model "huge"') as caught:
        models.submit(chain({"name": "one", "model": "huge", "prompt": "x"}))
    assert caught.value.hint == "There are: small (the default), large."
    with pytest.raises(ChainError, match='no group serves the model "unused"'):
        models.submit(chain({"name": "one", "model": "unused", "prompt": "x"}))


def test_the_default_model_goes_by_its_name_too(models: Service) -> None:
    number = models.submit(chain({"name": "one", "model": "small", "prompt": "x"}))
    assert models.record(number).chain.agents[0].model is None
    models.settle()
    assert models.result(number).agents[0].worker in "ad"


def test_an_agent_is_held_to_the_length_of_its_own_model(models: Service) -> None:
    six = [{"name": f"n{at}", "model": "large", "prompt": "x", "max_tokens": 16} for at in range(6)]
    reads = " ".join(f"{{{{n{at}}}}}" for at in range(6))
    with pytest.raises(ChainError, match=r'agent "last" needs up to 155 tokens .* takes 100'):  # 6 * 24 + 3 + 8
        models.submit(chain(*six, {"name": "last", "prompt": reads}))
    models.submit(chain(*six, {"name": "last", "model": "large", "prompt": reads}))


def test_a_named_group_has_to_serve_every_model(models: Service) -> None:
    with pytest.raises(UsageError, match='the group "a" serves the default model, and agent "two" is another'):
        models.submit(PAIR, "serial", group="a")
    number = models.submit(chain({"name": "one", "model": "large", "prompt": "x"}), "serial", group="c")
    models.settle()
    assert models.result(number).agents[0].worker == "c"


def test_ids_cannot_be_read_from_another_tokenizer(models: Service) -> None:
    with pytest.raises(ChainError, match=r"agents\[1\]\.prompt_ids: prompt_ids takes ids, and .*another tokenizer"):
        models.submit(
            chain({"name": "one", "prompt": "x"}, {"name": "two", "model": "large", "prompt_ids": [1, "{{one}}"]})
        )


def test_a_lost_hop_goes_on_where_its_model_is_served(models: Service) -> None:
    number = models.submit(chain({"name": "one", "model": "large", "prompt": "x"}))
    first = models.fleet.workers[started(models)["0"]]
    models.lose(first)
    second = started(models)["0"]
    assert {first.name, second} == {"b", "c"}
    models.lose(models.fleet.workers[second])
    assert started(models) == {}
    assert 'waits for a group that serves the model "large"' in models.result(number).why
    models.bring_back(first)
    models.settle()
    assert models.result(number).state == "finished"


def test_a_model_whose_groups_are_all_given_up_fails_its_chains(models: Service) -> None:
    number = models.submit(chain({"name": "one", "model": "large", "prompt": "x"}))
    other = models.submit(chain({"name": "one", "prompt": "x"}))
    gone: list[FakeWorker] = [models.fleet.workers[name] for name in "bc"]
    for worker in gone:
        models.lose(worker)
        worker.state = "failed"
        models.run(models.chains.runs.group_failed, worker, "it died again and again")
    result = models.result(number)
    assert result.state == "failed"
    assert 'every group is gone that serves the model "large"' in result.error
    models.settle()
    assert models.result(other).state == "finished"
    with pytest.raises(ChainError, match='no group serves the model "large"'):
        models.submit(chain({"name": "one", "model": "large", "prompt": "x"}))


def test_a_chain_waits_for_the_models_that_it_was_accepted_for(models: Service) -> None:
    number = models.submit(PAIR, "serial")
    models.limits_of = {"large": msgspec.structs.replace(LARGE, model="another large model")}
    models.kill()
    result = models.result(number)
    assert result.state == "queued"
    assert "accepted for the model large model, and the daemon serves another large model" in result.why
    models.limits_of = {"large": LARGE}
    models.kill()
    models.settle()
    assert models.result(number).state == "finished"


def test_a_named_group_that_serves_another_model_now_keeps_the_chain(models: Service) -> None:
    number = models.submit(chain({"name": "one", "model": "large", "prompt": "x"}), "serial", group="c")
    models.more = GROUPS | {"groups": [*GROUPS["groups"][:2], {"name": "c", "devices": ["cpu:0"]}]}
    models.names = "abc"
    models.kill()
    assert models.result(number).state == "queued"
    assert 'the group "c" serves the default model' in models.result(number).why
    models.more, models.names = GROUPS, "abcd"
    models.kill()
    models.settle()
    assert models.result(number).agents[0].worker == "c"


def test_a_model_that_is_no_longer_configured_keeps_the_chain(models: Service) -> None:
    number = models.submit(PAIR, "serial")
    models.more = GROUPS | {
        "models": {},
        "groups": [{"name": name, "devices": ["cpu:0"]} for name in "abcd"],
    }
    models.kill()
    result = models.result(number)
    assert result.state == "queued"
    assert 'there is no model "large"' in result.why


def test_the_grid_takes_one_kind_of_engine_for_each_model(models: Service) -> None:
    number = models.submit(PAIR, "ping-pong", exactness="grid")
    exact = models.record(number).job.exact
    assert exact.kind is not None
    assert (exact.kind.model, [other.model for other in exact.others]) == ("small model", ["large model"])
    models.settle()
    assert models.result(number).state == "finished"
    models.fleet.workers["c"].limits = msgspec.structs.replace(LARGE, dtype="other")
    models.run(models.chains.runs.worker_ready, models.fleet.workers["c"])
    with pytest.raises(UsageError, match='the groups "b" .* and "c" .* round differently'):
        models.submit(PAIR, exactness="grid")
    models.submit(chain({"name": "one", "prompt": "x"}), exactness="grid")  # it needs none of them


def test_probabilities_are_asked_of_the_model_that_is_named(models: Service) -> None:
    models.run(models.chains.score, [1], [2], None, "large")
    assert models.fleet.scored[-1][0] in "bc"
    models.run(models.chains.score, [1], [2], None, "small")
    assert models.fleet.scored[-1][0] in "ad"
    models.run(models.chains.score, [1], [2], None, "large model")  # as results call it
    assert models.fleet.scored[-1][0] in "bc"
    with pytest.raises(UsageError, match='no group serves the model "huge"'):
        models.run(models.chains.score, [1], [2], None, "huge")


def test_what_is_set_aside_follows_the_prompts_real_length(models: Service) -> None:
    models.submit(PAIR, "ping-pong")
    while "1" not in started(models):
        _one_step(models)
    worker = models.fleet.workers[started(models)["1"]]
    assert worker.kv_held_tokens == 32  # 3 of its own, 8 read and counted as 12, 8 to write
    (hop,) = worker.running
    models.run(
        models.chains.runs.hop_message,
        worker,
        HopFinalized(hop=hop, at_ns=1, prompt_tokens=70, prompt_digest="d", final_tokens=1),
    )
    assert worker.kv_held_tokens == 80
    models.settle()
    assert worker.kv_held_tokens == 0


def test_nothing_is_accepted_that_no_engine_can_tokenize_now(models: Service) -> None:
    for name in "bc":
        models.lose(models.fleet.workers[name])
    models.submit(chain({"name": "one", "prompt": "x"}))
    with pytest.raises(Overloaded, match="no engine serves now"):
        models.run(_submit_without_patience, models)


def _one_step(service: Service) -> None:
    """Let every hop do its next step."""
    for worker in service.fleet.workers.values():
        for hop in list(worker.running.values()):
            advance(worker, hop)
        while worker.reports:
            service.deliver(worker)


async def _submit_without_patience(service: Service) -> None:
    request = Submit(request=1, version=PROTOCOL_VERSION, chain=PAIR)
    await service.chains._intake.check(request, 0.0)
