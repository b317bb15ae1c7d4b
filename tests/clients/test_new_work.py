"""What the client shows of steps, several models, guesses and joined texts."""

from __future__ import annotations

import msgspec
import pytest
from rich.cells import cell_len

from pingpong_bus.chain import Agent, Chain, Extract
from pingpong_bus.messages import (
    ChainEvent,
    ChainResult,
    ChainSummary,
    DraftCounts,
    EngineLimits,
    Explained,
    Prediction,
    ResumeEntry,
    SeamCounts,
    WorkerStatus,
)
from pingpong_client.abilities import ability_lines
from pingpong_client.certificate import compare_agents, describe
from pingpong_client.explained_table import explained_lines
from pingpong_client.guesses import guessed_words, seam_words, tokens_a_step
from pingpong_client.live import agent_block, render
from pingpong_client.progress import ChainProgress
from pingpong_client.report import list_lines
from pingpong_client.rescoring import question
from pingpong_client.result_table import result_table
from pingpong_client.timeline_account import account
from timeline_samples import with_steps

CHAIN = Chain(
    name="steps",
    agents=[
        Agent(name="one", prompt="Say it as JSON."),
        Agent(name="title", input="{{one}}", extract=Extract(json="$.title")),
        Agent(name="look-up", input="{{title}}", call="search"),
    ],
)


def event(kind: str, agent: str, at_ms: float = 0.0, **data: object) -> ChainEvent:
    return ChainEvent(chain="c1", at_ms=at_ms, kind=kind, agent=agent, data=data)  # type: ignore[arg-type]


def test_the_table_of_a_result_has_models_steps_and_tokens_a_step() -> None:
    lines = result_table(with_steps())
    rows = [line.split() for line in lines]
    assert rows[0][:5] == ["agent", "model", "worker", "prompt", "cached"]
    assert rows[1][:8] == ["one", "small", "a", "200", "0", "40", "1.60", "-"]
    assert rows[2] == ["extract", "-", "(extract)", "-", "-", "25", "chars", "-", "-", "-", "finished"]
    assert rows[4][:7] == ["two", "large", "b", "160", "96", "20", "-"]
    assert "two: joined as text: taken back 2 times, 9 tokens" in lines
    assert "15 of 30 guessed tokens were right, 1.60 tokens a step" in lines


def test_a_model_in_a_folder_is_called_by_the_folders_name() -> None:
    result = with_steps()
    agents = [
        msgspec.structs.replace(result.agents[0], model="/var/cache/models/small-instruct"),
        msgspec.structs.replace(result.agents[3], model="org/large"),
    ]
    rows = [line.split()[1] for line in result_table(msgspec.structs.replace(result, agents=agents))]
    assert rows[:3] == ["model", "small-instruct", "org/large"]


def test_the_table_of_plain_chains_is_as_it_was() -> None:
    result = with_steps()
    plain = [msgspec.structs.replace(agent, drafts=None, seam=None, model="m") for agent in result.agents[::3]]
    headers = result_table(msgspec.structs.replace(result, agents=plain))[0].split("  ")
    assert [name.strip() for name in headers if name] == [
        "agent", "worker", "prompt", "cached", "output", "TTFT ms", "total ms", "finish",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits(width: int) -> None:
    assert max(map(cell_len, result_table(with_steps(), width)[:5])) <= width


def test_a_call_that_is_begun_again_is_told() -> None:
    result = with_steps()
    again = [ResumeEntry(at_ms=520.0, tokens=0, worker="", why="the daemon ended when it may have been running")]
    agents = [*result.agents[:2], msgspec.structs.replace(result.agents[2], resumed=again), result.agents[3]]
    lines = result_table(msgspec.structs.replace(result, agents=agents))
    assert "call: begun again at 520 ms: the daemon ended when it may have been running" in lines


@pytest.mark.parametrize(
    ("counts", "words", "pace"),
    [
        (DraftCounts(steps=10, drafted=20, accepted=10), "10 of 20 guessed tokens were right, 2.00 tokens a step", 2.0),
        (DraftCounts(steps=10, drafted=0, accepted=0), "no token was guessed: nothing looked like coming again", 1.0),
        (DraftCounts(steps=0, drafted=4, accepted=0), "0 of 4 guessed tokens were right", None),
    ],
)
def test_guesses_in_words(counts: DraftCounts, words: str, pace: float | None) -> None:
    assert guessed_words(counts) == words
    assert tokens_a_step(counts) == pace


def test_what_was_taken_back_in_words() -> None:
    assert seam_words(SeamCounts(rollbacks=0, tokens=0)) == ""
    assert seam_words(SeamCounts(rollbacks=1, tokens=1)) == "joined as text: taken back once, 1 token"


def test_a_step_is_followed_by_its_characters() -> None:
    progress = ChainProgress.of_chain("c1", CHAIN)
    assert [agent.kind for agent in progress.agents] == ["agent", "extract", "call"]
    title = progress.agents[1]
    progress.apply(event("opened", "title", worker="", prompt_tokens=0))
    assert "extract runs" in _drawn(progress)
    progress.apply(event("agent_finished", "title", output_tokens=0, characters=7, finish_reason="stop"))
    assert not title.has_all_text  # what it has given was lost on the way
    progress.apply(event("tokens", "title", ids=[], text="Walden.", first_index=0, first_character=0, output_tokens=0))
    assert title.has_all_text
    assert "extract: 7 characters" in _drawn(progress)
    assert title.rate is None
    assert agent_block(title.name, title.text) == "== title ==\nWalden.\n\n"


def test_a_snapshot_knows_steps() -> None:
    progress = ChainProgress.of_result(with_steps())
    call = progress.agents[2]
    assert (call.kind, call.written, call.has_all_text) == ("call", 60, True)
    assert "call: 60 characters" in _drawn(progress)


def _drawn(progress: ChainProgress) -> str:
    return "\n".join(str(line) for line in render(progress, 100, 20, 1.0).renderables)


def test_steps_are_compared_by_their_texts() -> None:
    extract = with_steps().agents[1]
    same = compare_agents(extract, extract)
    assert (same.equal, same.step, same.output_tokens) == (True, True, 25)
    other = compare_agents(extract, msgspec.structs.replace(extract, text=extract.text[:-1] + "ß"))
    assert other.difference is not None
    assert describe(other.difference) == "character 24 of its text is 'x' in series and 'ß' read ahead"
    longer = compare_agents(extract, msgspec.structs.replace(extract, text=extract.text + "!"))
    assert longer.difference is not None
    assert describe(longer.difference) == "character 25 of its text is nothing in series and '!' read ahead"
    assert question(longer.difference, extract, extract) == "no engine wrote it: it is a step's"
    assert msgspec.json.decode(msgspec.json.encode(other), type=type(other)) == other


def test_predictions_of_chains_with_steps_have_a_column_for_them() -> None:
    given = {"placement": "serial", "e2e_ms": 900.0, "prefill_ms": 300.0, "decode_ms": 500.0}
    with_step = Prediction(groups=("gpu0", "", "gpu1"), steps_ms=100.0, **given)  # type: ignore[arg-type]
    without = Prediction(groups=("gpu0", "gpu1"), **given)  # type: ignore[arg-type]

    def table(prediction: Prediction) -> list[str]:
        explained = Explained(
            request=1, predictions=[prediction], chosen=prediction, placement="serial", why="least", advice=[]
        )
        return explained_lines(explained, 100)

    assert table(with_step)[0].split() == [
        "placement", "groups", "E2E", "ms", "prefill", "decode", "steps", "wait", "hidden", "factor",
    ]  # fmt: skip
    assert table(with_step)[1].split() == ["*", "serial", "gpu0,", "gpu1", "900", "300", "500", "100", "-", "-", "1.00"]
    assert any("decode, steps and wait" in line for line in table(with_step))
    assert "steps" not in "\n".join(table(without))
    guessed = msgspec.structs.replace(with_step, unknown_steps=(1,))
    assert "steps: a guess, for one that has not run since the daemon's start" in table(guessed)
    assert not any("guess" in line for line in table(with_step))


def test_a_prediction_with_a_step_that_was_not_known_is_not_held_against_what_it_took() -> None:
    known = with_steps()
    predictions = [msgspec.structs.replace(one, unknown_steps=(2,)) for one in known.predictions]
    unknown = msgspec.structs.replace(known, predictions=predictions)
    off = {one.name: one.off_words for one in account(unknown).comparisons}
    before = {one.name: one.off_words for one in account(known).comparisons}
    assert off["end to end"] == off["steps"] == "step not known yet"
    assert (off["prefill"], off["decode"]) == (before["prefill"], before["decode"])
    assert "step not known yet" not in before.values()
    assert any("(step not known yet)" in line for line in result_table(unknown))
    assert not any("step not known yet" in line for line in result_table(known))


def _worker(name: str, **known: object) -> WorkerStatus:
    plain = EngineLimits("vllm 0.32.0", "m", 4096, 50_000, 16, 65_536, 8)
    limits = msgspec.structs.replace(plain, **known)
    return WorkerStatus(
        name=name,
        devices=[name],
        state="ready",
        stage="ready",
        pid=1,
        restarts=0,
        hops=0,
        output_tokens=0,
        rss_bytes=0,
        limits=limits,
    )


def test_abilities_are_told_once_where_all_have_them() -> None:
    given = {"speculation": "chain", "abilities": ("prefill-progress", "die-with-parent")}
    both = [_worker("a", **given), _worker("b", **given)]
    assert list(ability_lines(both)) == [
        "guesses tokens: chain",
        "patches to vLLM: prefill-progress, die-with-parent",
    ]
    one = [
        _worker("a", keep_tokens=4096, host_cache_bytes=2**30),
        _worker("b", speculation_refusal="its model has two vocabularies."),
    ]
    assert list(ability_lines(one)) == [
        "no guesses on b: its model has two vocabularies.",
        "keeps prefixes on a: 4,096 tokens in the cache, 1.0 GiB in host memory",
    ]
    assert list(ability_lines([_worker("a")])) == []


def test_results_of_older_daemons_have_no_kinds() -> None:
    result = msgspec.json.decode(
        b'{"id": "c", "name": "n", "state": "finished", "agents": [{"name": "one"}]}', type=ChainResult
    )
    assert result_table(result)[1].split()[0] == "one"


def test_a_chain_that_runs_is_not_called_queued_where_an_agent_of_it_waits() -> None:
    why = 'agent "s1" waits for its turn at the call "x"'
    chain = ChainSummary(
        id="c0",
        name="n",
        state="running",
        placement="serial",
        agents=2,
        finished_agents=0,
        age_s=1.0,
        e2e_ms=None,
        why=why,
    )
    assert list_lines([chain])[-1] == f"c0: {why}"
    assert list_lines([msgspec.structs.replace(chain, state="queued")])[-1] == f"c0 is queued: {why}"
