"""The benchmark's figures, on runs whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from figures import (
    Spread,
    comparable,
    decode_step_ms,
    downstream_ttft_ratio,
    exactness,
    hidden_share,
    measured,
    saved_percent,
)
from pingpong_bus.errors import DataError
from pingpong_bus.messages import AgentResult, AppendEntry, ChainResult
from report import render
from runs import Run, RunMode, append_line, length_faults, read_runs

STEP_MS = 20.0
TOKENS = 11


def agent(name: str, ttft_ms: float, *, output: list[int] | None = None, digest: str = "p") -> AgentResult:
    ids = output or list(range(TOKENS))
    return AgentResult(
        name=name,
        state="finished",
        output_ids=ids,
        output_tokens=len(ids),
        prompt_tokens=100,
        ttft_ms=ttft_ms,
        total_ms=ttft_ms + STEP_MS * (TOKENS - 1),
        prompt_digest=digest,
        prompt_token_match=True,
    )


def run(mode: RunMode, index: int, e2e_ms: float, ttfts: list[float], *, warmup: bool = False) -> Run:
    agents = [agent(f"a{at}", ttft) for at, ttft in enumerate(ttfts)]
    return with_agents(mode, index, e2e_ms, agents, warmup=warmup)


def with_agents(mode: RunMode, index: int, e2e_ms: float, agents: list[AgentResult], *, warmup: bool = False) -> Run:
    result = ChainResult(id="c", name="chain", state="finished", e2e_ms=e2e_ms, agents=agents)
    return Run(
        profile="chain",
        mode=mode,
        cache="cold",
        index=index,
        warmup=warmup,
        e2e_ms=e2e_ms,
        wall_ms=e2e_ms + 5,
        result=result,
        max_tokens=[TOKENS] * len(agents),
    )


SERIAL = [run("serial", index, 4000 + index, [1000, 1000, 1000]) for index in range(3)]
AHEAD = [run("ping-pong", index, 2000, [1000, 60, 40]) for index in range(3)]


def test_spread() -> None:
    assert Spread.of([1, 2, 6]) == Spread(mean=3, median=2, least=1, greatest=6)


def test_saved_percent_of_a_slower_run_is_negative() -> None:
    assert saved_percent(4000, 3000) == 25
    assert saved_percent(4000, 4400) == pytest.approx(-10)


def test_decode_step_leaves_the_first_token_out() -> None:
    assert decode_step_ms(SERIAL) == STEP_MS


def test_hidden_share_counts_what_could_be_hidden() -> None:
    # Hideable: two downstream agents with 1000 ms each, less one step. Hidden: 2000 - (60 + 40).
    assert hidden_share(SERIAL, AHEAD) == pytest.approx(1900 / (2 * (1000 - STEP_MS)))
    assert hidden_share(SERIAL, SERIAL) == 0


def test_hidden_share_of_all_that_can_be_hidden_is_one() -> None:
    perfect = [run("ping-pong", 0, 2000, [1000, STEP_MS, STEP_MS])]
    assert hidden_share(SERIAL, perfect) == pytest.approx(1)


def test_where_nothing_is_left_to_hide_no_share_is_shown() -> None:
    # Of two downstream agents, less than a step each is hideable: what the ratio would say is noise.
    warm = [run("serial", index, 400, [1000, 30, 45]) for index in range(3)]
    assert hidden_share(warm, warm) is None
    assert "hidden ÷ hideable TTFT -" in render([*warm, *(replace(found, mode="ping-pong") for found in warm)])
    assert hidden_share([run("serial", 0, 400, [1000, 40, 41])], AHEAD) is not None


def test_downstream_ratio_leaves_the_first_agent_out() -> None:
    assert downstream_ttft_ratio(SERIAL, AHEAD) == pytest.approx(100 / 2000)


def test_warm_up_runs_do_not_count() -> None:
    assert measured([run("serial", -1, 9000, [1.0], warmup=True), *AHEAD]) == {"ping-pong": AHEAD}


def test_equal_runs_are_exact() -> None:
    equal = exactness(SERIAL, AHEAD)
    assert (equal.exact, equal.compared, equal.first_difference) == (3, 3, "")


def test_other_output_is_found_with_its_place() -> None:
    other = with_agents("ping-pong", 1, 2000, [agent("a0", 1), agent("a1", 1, output=[0, 1, 2, 99, 4]), agent("a2", 1)])
    found = exactness(SERIAL, [AHEAD[0], other, AHEAD[2]])
    assert (found.exact, found.compared) == (2, 3)
    assert found.first_difference == "run 1, a1: output ids differ from token 3 on"


def test_a_shorter_output_is_another_output() -> None:
    other = with_agents("ping-pong", 1, 2000, [agent("a0", 1, output=[0, 1]), agent("a1", 1), agent("a2", 1)])
    assert "a0: output ids differ from token 2 on" in exactness(SERIAL, [other]).first_difference


def test_other_prompt_ids_are_found_even_where_outputs_are_equal() -> None:
    other = with_agents("ping-pong", 0, 2000, [agent("a0", 1), agent("a1", 1, digest="q"), agent("a2", 1)])
    assert exactness(SERIAL, [other]).first_difference == "run 0, a1: other prompt ids"


def test_the_reference_is_compared_with_its_own_first_run() -> None:
    unlike = with_agents("serial", 2, 4000, [agent("a0", 1, output=[7]), agent("a1", 1), agent("a2", 1)])
    assert exactness(SERIAL, SERIAL).exact == 2
    found = exactness([*SERIAL[:2], unlike], [*SERIAL[:2], unlike])
    assert (found.exact, found.compared) == (1, 2)


def test_report_shows_the_figures() -> None:
    appended = [AppendEntry(at_ms=0, tokens=90, sent=90, done_ms=900), AppendEntry(at_ms=1000, tokens=5, sent=95)]
    last = AHEAD[2].result.agents
    ahead = [*AHEAD[:2], with_agents("ping-pong", 2, 2000, [*last[:2], _appended(last[2], appended)])]
    text = render([*SERIAL, *ahead, run("presend", 0, 2500, [1000, 100, 90])])
    assert "| serial | 3 | 4,001 | 4,001 | 4,000 | 4,002 | - |" in text
    assert "| ping-pong | 3 | 2,000 | 2,000 | 2,000 | 2,000 | 50.0 % |" in text
    assert "| a1 | 1,000 / 1,200 | 60 / 260 | 100 / 300 |" in text
    assert "ping-pong: exact 3 of 3 against the serial runs; downstream TTFT 5.0 % of serial" in text
    assert "0 % of prompt tokens cached at the end; prompt_token_match 9 of 9; 2.0 appends an agent" in text
    assert "timed by the client" in text


def test_report_of_different_cache_states_keeps_them_apart() -> None:
    warm = [_warm(found) for found in SERIAL]
    text = render([*SERIAL, *warm])
    assert text.count("| serial | 3 |") == 2
    assert "cold cache" in text
    assert "warm cache" in text


ENGINE = {
    "group": "a",
    "devices": ["cpu:0"],
    "engine": "vllm 1",
    "model": "/models/m",
    "dtype": "float32",
    "kv_tokens": 1,
}
MADE_WITH = {"commit": "c" * 40, "dirty": False, "machine": {"cpu": "x", "cores": 2}, "engines": [ENGINE]}


@pytest.mark.parametrize(
    "change",
    [
        {"append_tokens": 64},
        {"forced_lengths": True},
        {"max_tokens": [TOKENS, TOKENS, 1]},
        {"seed": 1},
        {"provenance": MADE_WITH | {"commit": "d" * 40}},
        {"provenance": MADE_WITH | {"dirty": True}},
        {"provenance": MADE_WITH | {"machine": {"cpu": "y", "cores": 2}}},
        *({"provenance": MADE_WITH | {"engines": [ENGINE | {key: "other"}]}} for key in ("engine", "model", "dtype")),
    ],
)
def test_runs_of_different_conditions_are_not_pooled(change: dict[str, object]) -> None:
    ours = [replace(found, provenance=MADE_WITH) for found in SERIAL]
    theirs = [replace(found, **change) for found in ours]
    assert comparable([*ours, *theirs]) == [ours, theirs]
    assert render([*ours, *theirs]).count("## chain") == 2


def test_what_differs_with_every_start_keeps_nothing_apart() -> None:
    later = {"date": "2030-01-01", "load": 1.5, "engines": [ENGINE | {"kv_tokens": 2}]}
    ours = [replace(found, provenance=MADE_WITH) for found in SERIAL]
    theirs = [replace(found, provenance=MADE_WITH | later, index=found.index + 3) for found in SERIAL]
    assert len(comparable([*ours, *theirs])) == 1
    assert "vllm 1, m, float32" in render(ours)


def test_a_file_without_the_newer_fields_is_read(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    fields = msgspec.to_builtins(SERIAL[0])
    for name in ("append_tokens", "forced_lengths"):
        del fields[name]
    file.write_text(json.dumps(fields) + "\n\n")
    assert read_runs([file]) == SERIAL[:1]


@pytest.mark.parametrize("content", [None, b"{", b'{"profile": "cpu"}\n', b"\xff", b'{"profile": "\xff"}'])
def test_a_file_that_holds_no_runs_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "runs.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"runs\.jsonl"):
        read_runs([file])


def test_runs_survive_their_file(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    for found in SERIAL:
        append_line(file, found)
    assert read_runs([file]) == SERIAL


def test_an_answer_that_ended_early_is_a_fault() -> None:
    early = with_agents("serial", 0, 1, [agent("a0", 1), agent("a1", 1, output=[1, 2])])
    assert length_faults(SERIAL[0]) == []
    assert length_faults(early) == [f"serial run 0: a1 wrote 2 tokens, not {TOKENS}"]


def _appended(result: AgentResult, appends: list[AppendEntry]) -> AgentResult:
    return replace(result, appends=appends)


def _warm(found: Run) -> Run:
    return replace(found, cache="warm")
