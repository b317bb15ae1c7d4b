"""Predictions: what `submit --explain` shows without running anything, and what results and groups show of them."""

import json

import msgspec
import pytest

from pingpong_bus.errors import ChainError, UsageError
from pingpong_bus.messages import Advice, EngineFigures, Explain, Explained, Prediction
from pingpong_client import Client
from pingpong_client.explained_table import MOST_ROWS, explained_lines

READ_AHEAD = Prediction(
    placement="ping-pong", groups=("gpu0", "gpu1", "gpu0"), e2e_ms=9120.4, prefill_ms=320.0, decode_ms=8800.4,
    hidden_ms=820.0, factor=1.02,
)  # fmt: skip
SERIAL = Prediction(
    placement="serial", groups=("gpu0",) * 3, e2e_ms=10100.0, prefill_ms=1300.0, decode_ms=8750.0, wait_ms=50.0
)
EXPLAINED = Explained(
    request=0, predictions=[READ_AHEAD, SERIAL], chosen=READ_AHEAD, placement="ping-pong",
    why="the least of 2 placements",
    advice=[
        Advice(text="Put the document of 4,096 tokens before the role text of writer and critic.", saves_ms=181.0),
        Advice(text="The chain is bound by decoding."),
    ],
)  # fmt: skip


async def test_explain_shows_predictions_choice_and_advice_in_80_columns(link, daemon, chain_file):
    daemon.explained = EXPLAINED
    outcome = await link.command("submit", str(chain_file), "--explain", "--mode", "auto", "--input", "topic=storms")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["placement", "groups", "E2E", "ms", "prefill", "decode", "wait", "hidden", "factor"]
    assert lines[1].split() == ["*", "ping-pong", "gpu0,", "gpu1", "9,120", "320", "8,800", "-", "820", "1.02"]
    assert lines[2].split() == ["serial", "gpu0", "10,100", "1,300", "8,750", "50.0", "-", "1.00"]
    assert "* ping-pong on gpu0, gpu1 would be taken: the least of 2 placements." in lines
    assert " ".join(" ".join(lines).split()).endswith(
        "Advice: - Put the document of 4,096 tokens before the role text of writer and critic. "
        "That should take about 181 ms off the least. - The chain is bound by decoding."
    )
    assert all(len(line) <= 80 for line in lines)
    [asked] = daemon.requests
    assert isinstance(asked, Explain)
    assert (asked.options.mode, asked.inputs) == ("auto", {"topic": "storms"})
    assert daemon.results == {}


async def test_explain_json_is_what_the_daemon_said(link, daemon, chain_file):
    daemon.explained = EXPLAINED
    outcome = await link.command("submit", str(chain_file), "--explain", "--json")
    document = json.loads(outcome.out)
    assert document.keys() == {"predictions", "chosen", "placement", "why", "advice"}
    assert msgspec.convert({"type": "Explained", "request": 0} | document, Explained) == EXPLAINED


async def test_explain_says_that_engines_were_not_measured(link, chain_file):
    outcome = await link.command("submit", str(chain_file), "--explain")
    assert " ".join(outcome.out.split()) == (
        "No times are known: the engines were not measured, or the chain is too large. By rule of thumb, serial would "
        "be taken: one device group."
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["x.json", "--detach"], "--detach"),
        (["x.json", "--cancel-on-exit", "--deadline", "3"], "--cancel-on-exit and --deadline"),
        (["x.json", "--priority", "3"], "--priority"),
        (["--jsonl", "x.jsonl"], "--jsonl"),
        (["x.json", "--concurrency", "4"], "--concurrency"),
    ],
)
async def test_explain_goes_with_nothing_that_runs(link, words, named):
    outcome = await link.command("submit", "--explain", *words)
    assert isinstance(outcome.error, UsageError)
    assert str(outcome.error).startswith(f"--explain runs nothing, so it does not go with {named}.")
    assert link.transports == []


async def test_explain_passes_on_refusals(link, daemon, chain_file):
    daemon.refuse[Explain] = UsageError("ping-pong takes two device groups and one is ready.", field="mode")
    outcome = await link.command("submit", str(chain_file), "--explain", "--mode", "ping-pong")
    assert (outcome.code, str(outcome.error)) == (2, "mode: ping-pong takes two device groups and one is ready.")


def test_the_blocking_client_explains_and_checks_first(link, daemon, chain):
    daemon.explained = EXPLAINED
    with Client("/fake", transport=link.transport) as client:
        assert client.explain(chain).chosen == READ_AHEAD
        with pytest.raises(ChainError):
            client.explain(chain, {"nope": "1"})
    assert len(daemon.requests) == 1


def test_of_many_placements_the_least_are_shown_and_the_one_that_is_taken():
    many = [msgspec.structs.replace(SERIAL, groups=(f"gpu{at}",) * 3, e2e_ms=1000.0 + at) for at in range(512)]
    named = msgspec.structs.replace(EXPLAINED, predictions=many, chosen=many[300], placement="serial", why="asked for")
    lines = explained_lines(named)
    rows = [line for line in lines if "serial   " in line]
    assert len(rows) == MOST_ROWS + 1
    assert [row for row in rows if row.startswith("*")] == [rows[-1]]
    assert "gpu300" in rows[-1]
    assert f"and {512 - MOST_ROWS - 1} more, which take longer; --json has them all" in lines


def test_a_placement_that_is_none_of_those_predicted_has_a_row_and_nothing_is_left_out():
    told = msgspec.structs.replace(SERIAL, groups=("gpu9",), e2e_ms=9500.0)
    lines = explained_lines(msgspec.structs.replace(EXPLAINED, chosen=told, placement="serial"))
    assert [line.split()[-6] for line in lines[1:4]] == ["9,120", "9,500", "10,100"]
    assert lines[2].startswith("*")
    assert not any(line.startswith("and ") for line in lines)


@pytest.mark.parametrize(
    "name", ["prod-cluster-west-node-{}-h200", "node-{}-of-the-west-cluster-h200", "{}-gpu", "g{}"]
)
def test_rows_of_groups_with_long_names_can_be_told_apart(name):
    names = [name.format(at) for at in range(12)]
    rows = [
        *(msgspec.structs.replace(SERIAL, groups=(each,) * 3) for each in names[:8]),
        *(msgspec.structs.replace(READ_AHEAD, groups=(each, names[11])) for each in names[:8]),
    ]
    lines = explained_lines(msgspec.structs.replace(EXPLAINED, predictions=rows, chosen=rows[0]))
    assert len({line[3:] for line in lines[1:17]}) == 16
    assert all(len(line) <= 80 for line in lines)


async def test_results_show_predicted_against_actual(link, daemon, chain_file):
    daemon.edit = lambda submit, result: msgspec.structs.replace(
        result, predictions=[READ_AHEAD, SERIAL], predicted_ms=2400.0
    )
    expected = "predicted 2,400 ms with outputs of full length, took 2,500 (+4.2%)"
    for words in (["submit", str(chain_file)], ["result", "c0"]):
        assert (await link.command(*words)).out.splitlines()[-2] == expected
    full = [msgspec.structs.replace(agent, finish_reason="length") for agent in daemon.results["c0"].agents]
    daemon.results["c0"] = msgspec.structs.replace(daemon.results["c0"], agents=full)
    assert (await link.command("result", "c0")).out.splitlines()[-2] == "predicted 2,400 ms, took 2,500 (+4.2%)"
    late = [msgspec.structs.replace(agent, opened_ms=100.0 * at) for at, agent in enumerate(full, start=1)]
    daemon.results["c0"] = msgspec.structs.replace(daemon.results["c0"], agents=late)
    expected = "predicted 2,400 ms, took 2,400 (+0.0%) after 100 ms in the queue"
    assert (await link.command("result", "c0")).out.splitlines()[-2] == expected
    again = [msgspec.structs.replace(agent, attempt=2) for agent in full]
    for held_up in ({"resumed": True}, {"agents": again}):
        daemon.results["c0"] = msgspec.structs.replace(daemon.results["c0"], **held_up)
        assert "predicted" not in (await link.command("result", "c0")).out
        daemon.results["c0"] = msgspec.structs.replace(daemon.results["c0"], resumed=False, agents=full)


async def test_status_shows_what_engines_were_measured_to_take(link, daemon, monkeypatch):
    figures = EngineFigures(
        measured_at="2026-05-04T09:30:00Z", prefill=[(512, 40.0), (4096, 200.0)], finalize=[(4096, 1, 14.5)],
        decode=[(512, 8.5), (4096, 8.6)], batch=[(2, 9.0)], step_p50_ms=8.5, step_p99_ms=9.35,
    )  # fmt: skip

    def edit(status):
        first, second = status.workers
        return msgspec.structs.replace(status, workers=[msgspec.structs.replace(first, figures=figures), second])

    daemon.edit_status = edit
    monkeypatch.setenv("COLUMNS", "80")
    lines = (await link.command("status", terminal=True)).out.splitlines()
    assert lines[-2:] == [
        "w0: decode 8.5 ms a token, prefill 20,480 tokens/s, jitter 1.10 (p99/p50)",
        "not measured: w1",
    ]
    assert all(len(line) <= 80 for line in lines)
    document = json.loads((await link.command("status", "--json")).out)
    assert msgspec.convert(document["workers"][0]["figures"], EngineFigures) == figures
