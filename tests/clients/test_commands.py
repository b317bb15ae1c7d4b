"""Every command, run in this process against a fake daemon."""

import asyncio
import json

import msgspec
import pytest

from pingpong_bus.chain import json_schema
from pingpong_bus.errors import (
    ChainError,
    ChainFailed,
    ChainNotFound,
    DaemonUnavailable,
    NotEqual,
    Overloaded,
    UsageError,
)
from pingpong_bus.messages import (
    Attach,
    Cancel,
    ChainResult,
    DraftCounts,
    Drain,
    GetResult,
    ResumeEntry,
    SchedulerState,
    Score,
    StoreStatus,
    Submit,
)


def submits(daemon):
    return [request for request in daemon.requests if isinstance(request, Submit)]


# ------------------------------------------------------------------------------------------------------------- submit


async def test_submit_prints_texts_and_figures(link, chain_file):
    outcome = await link.command("submit", str(chain_file))
    assert outcome.code == 0
    assert outcome.out.startswith("== writer ==\ntext of writer\n\n== critic ==\ntext of critic\n\n")
    assert outcome.out.count("text of writer") == 1
    table = outcome.out.splitlines()[6:]
    assert table[0].split("  ")[0] == "agent"
    assert table[1].split() == ["writer", "w0", "3", "0", "2", "12.5", "1,250", "stop"]
    assert table[-1] == "c0: finished, E2E 2,500 ms, ping-pong"
    assert "\x1b" not in outcome.out


async def test_submit_on_a_terminal_shows_the_texts_once_and_fits_80_columns(link, chain_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    outcome = await link.command("submit", str(chain_file), terminal=True)
    shown = outcome.out.rsplit("\x1b[2K", 1)[1]
    assert shown.count("text of writer") == shown.count("text of critic") == 1
    assert all(len(line) <= 80 for line in shown.splitlines())


async def test_submit_json_prints_one_document_and_nothing_else(link, chain_file):
    outcome = await link.command("submit", str(chain_file), "--json", "--mode", "serial")
    assert outcome.out.count("\n") == 1
    result = msgspec.json.decode(outcome.out, type=ChainResult)
    assert (result.id, result.state, result.placement) == ("c0", "finished", "serial")
    document = json.loads(outcome.out)
    assert {"id", "state", "placement", "e2e_ms", "agents"} <= document.keys()
    wanted = {
        "name", "text", "output_ids", "prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "ttft_ms",
        "total_ms", "worker", "appends",
    }  # fmt: skip
    assert wanted <= document["agents"][0].keys()
    assert outcome.err == ""


async def test_submit_passes_mode_session_and_inputs(link, daemon, chain_file, tmp_path):
    text = tmp_path / "topic.txt"
    text.write_text("from a file é\n")
    await link.command(
        "submit", str(chain_file), "--mode", "ping-pong", "--session", "streaming-input", "--input", f"topic=@{text}"
    )
    await link.command("submit", str(chain_file), "--input", "topic=a=b")
    await link.command("submit", str(chain_file), "--input", "topic=@@home")
    first, second, third = submits(daemon)
    assert (first.options.mode, first.options.session) == ("ping-pong", "streaming-input")
    assert first.inputs == {"topic": "from a file é\n"}
    assert second.inputs == {"topic": "a=b"}
    assert third.inputs == {"topic": "@home"}


async def test_submit_passes_the_level_of_exactness(link, daemon, chain, chain_file):
    outcome = await link.command("submit", str(chain_file), "--exactness", "grid", "--mode", "overlap")
    assert outcome.out.splitlines()[-1] == "c0: finished, E2E 2,500 ms, overlap, exactness grid, cells of 256 tokens"
    await link.command("submit", str(chain_file))
    given = jsonl(chain, {"exactness": "invariant"}, {})
    await link.command("submit", "--jsonl", "-", "--exactness", "fast", "--concurrency", "1", stdin=given)
    assert [submit.options.exactness for submit in submits(daemon)] == ["grid", None, "invariant", "fast"]


async def test_a_level_that_cannot_be_kept_is_told_with_the_reason(link, daemon, chain_file):
    daemon.refuse[Submit] = UsageError('exactness "grid" cannot be kept: it is awq.', field="exactness", hint="Take x.")
    for words in (["submit", str(chain_file), "--exactness", "grid"], ["verify", str(chain_file)]):
        outcome = await link.command(*words)
        assert outcome.code == 2
        assert str(outcome.error) == 'exactness: exactness "grid" cannot be kept: it is awq. Take x.'


async def test_submit_names_a_group(link, daemon, chain_file):
    await link.command("submit", str(chain_file), "--group", "gpu1")
    await link.command("submit", str(chain_file))
    assert [submit.options.group for submit in submits(daemon)] == ["gpu1", None]


async def test_submit_passes_priority_and_deadline(link, daemon, chain, chain_file):
    await link.command("submit", str(chain_file), "--priority", "-7", "--deadline", "90.5")
    await link.command("submit", str(chain_file))
    given = jsonl(chain, {"priority": 9, "deadline_s": 5}, {}, {"priority": 0})
    await link.command("submit", "--jsonl", "-", "--priority", "2", "--concurrency", "1", stdin=given)
    options = [(submit.options.priority, submit.options.deadline_s) for submit in submits(daemon)]
    assert options == [(-7, 90.5), (0, None), (9, 5.0), (2, None), (0, None)]


async def test_every_submission_has_a_key_of_its_own(link, daemon, chain_file):
    for _ in range(2):
        await link.command("submit", str(chain_file))
    first, second = (submit.key for submit in submits(daemon))
    assert first != second
    assert len(first) == len(second) == 32


async def test_submit_reads_standard_input(link, chain_file):
    outcome = await link.command("submit", "-", stdin=chain_file.read_bytes())
    assert outcome.code == 0


async def test_submit_detach_prints_the_id_and_returns(link, daemon, chain_file):
    daemon.hold = True
    outcome = await link.command("submit", str(chain_file), "--detach")
    assert outcome.out == "c0\n"
    assert not submits(daemon)[0].follow


@pytest.mark.parametrize("json_option", [[], ["--json"]])
async def test_submit_of_a_chain_that_fails(link, daemon, chain_file, json_option):
    daemon.edit = lambda submit, result: msgspec.structs.replace(result, state="failed", error="the engine died.")
    outcome = await link.command("submit", str(chain_file), *json_option)
    assert outcome.code == 1
    assert isinstance(outcome.error, ChainFailed)
    assert "the engine died." in str(outcome.error)
    if json_option:
        assert json.loads(outcome.out)["state"] == "failed"


async def test_submit_refused(link, daemon, chain_file):
    daemon.refuse[Submit] = Overloaded("the daemon drains.")
    assert (await link.command("submit", str(chain_file))).code == 69


@pytest.mark.parametrize(
    "words",
    [
        ["submit"],
        ["submit", "x.json", "--jsonl", "y"],
        ["submit", "x.json", "--detach", "--json"],
        ["submit", "x.json", "--group", "gpu1", "--mode", "ping-pong"],
        ["submit", "x.json", "--detach", "--cancel-on-exit"],
        ["submit", "x.json", "--input", "topic"],
        ["submit", "x.json", "--input", "a=1", "--input", "a=2"],
    ],
)
async def test_submit_usage(link, words):
    outcome = await link.command(*words)
    assert isinstance(outcome.error, UsageError)
    assert outcome.code == 2
    assert link.transports == []


async def test_a_bad_input_is_found_before_the_daemon_is_looked_for(link, chain_file, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for given in ("other=1", "topic=@/not/there", f"topic=@{tmp_path}", f"topic=@{tmp_path / 'latin'}"):
        outcome = await link.command("submit", str(chain_file), "--input", given)
        assert isinstance(outcome.error, ChainError)
        assert outcome.code == 65
    assert link.transports == []


@pytest.mark.parametrize("cancel", [False, True])
async def test_an_interrupted_submit_says_how_to_go_on(link, daemon, chain_file, until, cancel):
    daemon.hold = True
    words = ["submit", str(chain_file), *(["--cancel-on-exit"] if cancel else [])]
    task = asyncio.ensure_future(link.command(*words))
    await until(lambda: daemon.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cancelled = [request.chain for request in daemon.requests if isinstance(request, Cancel)]
    assert cancelled == (["c0"] if cancel else [])
    assert ("cancelled c0" if cancel else "`pingpong-client result c0`") in link.stderr.getvalue()


# -------------------------------------------------------------------------------------------------------- many chains


def jsonl(chain, *lines):
    inline = msgspec.to_builtins(chain)
    return "\n".join(json.dumps({"chain": inline} | line if "path" not in line else line) for line in lines).encode()


async def test_jsonl_runs_every_line(link, daemon, chain, chain_file, tmp_path):
    path = tmp_path / "many.jsonl"
    given = jsonl(chain, {"inputs": {"topic": "one"}}, {"mode": "serial"}, {"path": chain_file.name})
    path.write_bytes(given.replace(b"\n", b"\n\n") + b"\n")
    outcome = await link.command("submit", "--jsonl", str(path), "--input", "topic=all")
    assert outcome.code == 0
    results = [json.loads(line) for line in outcome.out.splitlines()]
    assert sorted(result["line"] for result in results) == [1, 3, 5]
    assert all(result["state"] == "finished" for result in results)
    by_topic = sorted((submit.inputs["topic"], submit.options.mode) for submit in submits(daemon))
    assert by_topic == [("all", "auto"), ("all", "serial"), ("one", "auto")]


async def test_jsonl_keeps_to_its_concurrency_and_prints_in_completion_order(link, daemon, chain, until):
    daemon.hold = True
    given = jsonl(chain, *({"inputs": {"topic": str(at)}} for at in range(5)))
    task = asyncio.ensure_future(link.command("submit", "--jsonl", "-", "--concurrency", "2", stdin=given))
    await until(lambda: len(submits(daemon)) == 2)
    for _ in range(20):  # nothing more may start by itself
        await asyncio.sleep(0)
    assert len(submits(daemon)) == 2
    ended = ["c1", "c0", "c2", "c4", "c3"]
    for count, chain_id in enumerate(ended, 1):
        await until(lambda: chain_id in daemon.results)  # noqa: B023
        daemon.finish(chain_id)
        await until(lambda: link.stdout.getvalue().count("\n") == count)  # noqa: B023
    outcome = await task
    assert [json.loads(line)["id"] for line in outcome.out.splitlines()] == ended


async def test_jsonl_goes_on_after_a_refusal_and_exits_1(link, daemon, chain):
    answer = daemon._answer

    def refuse_one(request):
        if isinstance(request, Submit) and request.inputs["topic"] == "bad":
            raise ChainError("too long.", field="agents[0]")
        answer(request)

    daemon._answer = refuse_one
    given = jsonl(chain, {"inputs": {"topic": "bad"}}, {"inputs": {"topic": "good"}})
    outcome = await link.command("submit", "--jsonl", "-", stdin=given)
    assert outcome.code == 1
    by_line = {result["line"]: result for result in map(json.loads, outcome.out.splitlines())}
    assert by_line[1] == {"line": 1, "state": "failed", "code": "ChainError", "error": "agents[0]: too long."}
    assert by_line[2]["state"] == "finished"


async def test_jsonl_ends_when_the_daemon_goes(link, daemon, chain, until):
    daemon.hold = True
    link.settings["reconnect_s"] = 0
    task = asyncio.ensure_future(link.command("submit", "--jsonl", "-", stdin=jsonl(chain, {}, {})))
    await until(lambda: len(submits(daemon)) == 2)
    link.transports[0].lose()
    outcome = await task
    assert isinstance(outcome.error, DaemonUnavailable)
    assert outcome.code == 69


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "line 2: it is not JSON"),
        (b'{"path": "a", "extra": 1}', "line 2: Object contains unknown field `extra`"),
        (b"{}", "line 2: give either chain or path"),
        (b'{"chain": {}, "path": "x"}', "line 2: give either chain or path"),
        (b'{"chain": {"name": "x", "agents": []}}', "line 2: agents: the list is empty"),
        (b'{"path": "not-there.json"}', "line 2: the chain file"),
        (b'{"path": "a", "priority": 101}', "line 2: Expected `int` <= 100"),
        (b'{"path": "a", "deadline_s": 0}', "line 2: Expected `float` > 0"),
        (b'{"path": "a", "mode": "fast"}', "line 2: Invalid enum value"),
        (b'"\xff"', "line 2: it is not UTF-8"),
        (b'{"chain": {"name": "x", "agents": [{"name": "a", "prompt": "x"}]}, "inputs": {"z": "1"}}', "line 2: inputs"),
    ],
)
async def test_jsonl_is_checked_whole_before_anything_runs(link, chain, line, says):
    outcome = await link.command("submit", "--jsonl", "-", stdin=jsonl(chain, {}) + b"\n" + line)
    assert outcome.code == 65
    assert str(outcome.error).startswith(says)
    assert link.transports == []


@pytest.mark.parametrize("standard_input", [False, True])
async def test_a_jsonl_over_the_limit_is_refused_whole(link, chain, tmp_path, monkeypatch, standard_input):
    given = jsonl(chain, {}, {})
    path = tmp_path / "many.jsonl"
    path.write_bytes(given)
    name = "-" if standard_input else str(path)
    monkeypatch.setattr("pingpong_client.commands.submit._MAX_JSONL_BYTES", given.index(b"\n") + 1)
    outcome = await link.command("submit", "--jsonl", name, stdin=given)
    assert outcome.code == 65
    assert "is larger than" in str(outcome.error)
    assert link.transports == []
    monkeypatch.setattr("pingpong_client.commands.submit._MAX_JSONL_BYTES", len(given))
    assert (await link.command("submit", "--jsonl", name, stdin=given)).code == 0


async def test_an_empty_jsonl(link):
    assert (await link.command("submit", "--jsonl", "-", stdin=b"\n\n")).code == 65


# -------------------------------------------------------------------------------------------------------------- verify


async def test_verify_runs_both_modes_isolated_and_certifies(link, daemon, chain_file):
    outcome = await link.command("verify", str(chain_file), "--runs", "2", "--session", "prefix-cache")
    assert outcome.code == 0
    assert [submit.options.mode for submit in submits(daemon)] == ["serial", "ping-pong"] * 2
    assert all(submit.options.isolate for submit in submits(daemon))
    assert all(submit.options.session == "prefix-cache" for submit in submits(daemon))
    assert sum(isinstance(request, GetResult) and request.prompt_ids for request in daemon.requests) == 4
    assert "verdict    equal: 2 of 2 runs equal" in outcome.out
    for word in ("simulated 1", "float32", "isolated", "series 2,500 ms, read ahead 2,500 ms"):
        assert word in outcome.out


async def test_verify_json(link, chain_file):
    outcome = await link.command("verify", str(chain_file), "--json")
    certificate = json.loads(outcome.out)
    assert certificate["verdict"] == "equal"
    assert certificate["engines"] == ["simulated 1"]
    assert certificate["sessions"] == ["prefix-cache"]
    assert [agent["agent"] for agent in certificate["runs"][0]["agents"]] == ["writer", "critic"]


async def test_verify_finds_a_difference(link, daemon, chain_file):
    def other_token(submit, result):
        if submit.options.mode == "serial":
            return result
        changed = msgspec.structs.replace(result.agents[1], output_ids=[1, 8])
        return msgspec.structs.replace(result, agents=[result.agents[0], changed])

    daemon.edit = other_token
    outcome = await link.command("verify", str(chain_file), "--json")
    assert outcome.code == 3
    assert isinstance(outcome.error, NotEqual)
    assert "agent critic: output token 1 is 7 in series and 8 read ahead" in str(outcome.error)
    document = json.loads(outcome.out)
    assert (document["proof"], document["no_proof"]) == (False, ["1 of 1 runs differ"])
    agent = document["runs"][0]["agents"][1]
    rescored = {"logit_gap": 0.25, "no_gap": ""}
    assert agent["difference"] == {"where": "output", "index": 1, "serial": 7, "read_ahead": 8} | rescored
    assert not agent["equal"]
    [score] = [request for request in daemon.requests if isinstance(request, Score)]
    assert (score.ids, score.tokens, score.grid) == ([1, 2, 1, 1], [7, 8], 256)


async def test_verify_passes_on_what_the_daemon_refuses(link, daemon, chain_file):
    daemon.refuse[Submit] = UsageError("ping-pong needs two groups.")
    outcome = await link.command("verify", str(chain_file))
    assert outcome.code == 2
    assert str(outcome.error) == "ping-pong needs two groups."


async def test_verify_of_a_chain_that_fails(link, daemon, chain_file):
    daemon.edit = lambda submit, result: msgspec.structs.replace(result, state="failed", error="died")
    assert (await link.command("verify", str(chain_file))).code == 1


async def test_verify_repeats_the_seeds_that_the_daemon_gave(link, daemon):
    def seed(submit, result):
        agents = [
            msgspec.structs.replace(agent, seed=asked.seed if asked.seed is not None else 100 + len(daemon.results))
            for asked, agent in zip(submit.chain.agents, result.agents, strict=True)
        ]
        return msgspec.structs.replace(result, agents=agents)

    daemon.edit = seed
    agents = [{"name": "a", "prompt": "x", "temperature": 1}, {"name": "b", "prompt": "y"}]
    agents.append({"name": "c", "prompt": "z", "temperature": 1, "seed": 5})
    given = json.dumps({"name": "x", "agents": agents}).encode()
    outcome = await link.command("verify", "-", "--runs", "2", stdin=given)
    assert outcome.code == 0
    seeds = [[agent.seed for agent in submit.chain.agents] for submit in submits(daemon)]
    assert seeds == [[None, None, 5], [100, None, 5], [None, None, 5], [102, None, 5]]


async def test_verify_without_the_seed_of_the_first_run(link, daemon):
    chain = b'{"name": "x", "agents": [{"name": "a", "prompt": "x", "temperature": 1}]}'
    outcome = await link.command("verify", "-", stdin=chain)
    assert outcome.code == 70
    assert 'which seed it gave to the agent "a"' in str(outcome.error)


async def test_verify_with_one_group_runs_nothing(link, daemon, chain_file):
    daemon.edit_status = one_group(overlap=False)
    for words in ([], ["--mode", "ping-pong"]):
        outcome = await link.command("verify", str(chain_file), *words)
        assert outcome.code == 2
        assert "the daemon has w0 alone" in str(outcome.error)
    outcome = await link.command("verify", str(chain_file), "--mode", "overlap")
    assert str(outcome.error).startswith("mode: no engine of the daemon holds appends to a budget")
    assert submits(daemon) == []


def one_group(**limits):
    """A status of one group with an engine of these limits."""

    def edit(status):
        worker = status.workers[0]
        worker = msgspec.structs.replace(worker, limits=msgspec.structs.replace(worker.limits, **limits))
        return msgspec.structs.replace(status, workers=[worker])

    return edit


async def test_verify_with_one_group_overlaps_where_something_can_be_proved(link, daemon, chain_file):
    daemon.edit_status = one_group()
    outcome = await link.command("verify", str(chain_file))
    assert outcome.code == 2
    assert str(outcome.error).startswith("exactness: agents that overlap share a device")
    assert submits(daemon) == []
    assert (await link.command("verify", str(chain_file), "--exactness", "fast")).code == 0
    daemon.edit_status = one_group(batch_invariant=True)
    assert (await link.command("verify", str(chain_file))).code == 0
    asked = [(submit.options.mode, submit.options.exactness) for submit in submits(daemon)]
    assert asked == [("serial", "fast"), ("overlap", "fast"), ("serial", "invariant"), ("overlap", "invariant")]


async def test_verify_overlaps_where_neighbours_are_of_a_model_that_one_group_serves(link, daemon, chain):
    daemon.edit_status = lambda status: msgspec.structs.replace(
        status, workers=[status.workers[0], msgspec.structs.replace(status.workers[1], model="large")]
    )
    names = ["", "large"]
    apart = [msgspec.structs.replace(agent, model=names[at % 2] or None) for at, agent in enumerate(chain.agents)]
    for agents in (chain.agents, apart):
        data = msgspec.json.encode(msgspec.structs.replace(chain, agents=agents))
        assert (await link.command("verify", "-", "--exactness", "fast", stdin=data)).code == 0
    assert [submit.options.mode for submit in submits(daemon)] == ["serial", "overlap", "serial", "ping-pong"]


async def test_verify_takes_the_level_that_is_named(link, daemon, chain):
    named = msgspec.json.encode(msgspec.structs.replace(chain, exactness="invariant"))
    await link.command("verify", "-", stdin=msgspec.json.encode(chain))
    await link.command("verify", "-", stdin=named)
    outcome = await link.command("verify", "-", "--exactness", "fast", stdin=named)
    levels = [submit.options.exactness for submit in submits(daemon)]
    assert levels == ["grid"] * 2 + ["invariant"] * 2 + ["fast"] * 2
    assert outcome.out.splitlines()[-1] == 'proof      no: exactness "fast" promises nothing'


async def test_verify_holds_guessed_tokens_against_series_without_them(link, daemon, chain):
    counts = DraftCounts(steps=10, drafted=12, accepted=5)

    def guess(submit, result):
        if submit.options.mode == "serial":
            return result
        agents = [msgspec.structs.replace(agent, drafts=counts) for agent in result.agents]
        return msgspec.structs.replace(result, agents=agents)

    daemon.edit = guess
    first, second = chain.agents
    asking = msgspec.structs.replace(chain, agents=[first, msgspec.structs.replace(second, speculate=True)])
    outcome = await link.command("verify", "-", "--speculate", "--json", stdin=msgspec.json.encode(asking))
    document = json.loads(outcome.out)
    assert document["guessed"] == {"steps": 20, "drafted": 24, "accepted": 10}
    assert (document["verdict"], document["exactness"], document["proof"]) == ("equal", "fast", False)
    serial, ahead = submits(daemon)
    assert (serial.chain.speculate, [agent.speculate for agent in serial.chain.agents]) == (False, [None, None])
    assert serial.options.speculate is None
    assert (ahead.chain.speculate, [agent.speculate for agent in ahead.chain.agents]) == (None, [None, True])
    assert (ahead.options.speculate, ahead.options.exactness) == (True, "fast")


async def test_submit_says_whether_tokens_are_guessed(link, daemon, chain_file):
    for words in ([], ["--speculate"], ["--no-speculate"]):
        assert (await link.command("submit", str(chain_file), *words)).code == 0
    assert [submit.options.speculate for submit in submits(daemon)] == [None, True, False]
    line = json.dumps({"path": str(chain_file), "speculate": False}).encode()
    assert (await link.command("submit", "--jsonl", "-", "--speculate", stdin=line)).code == 0
    assert submits(daemon)[-1].options.speculate is False


async def test_verify_writes_the_certificate_that_it_prints(link, chain_file, tmp_path):
    kept = tmp_path / "kept.json"
    outcome = await link.command("verify", str(chain_file), "-o", str(kept), "--json")
    document = json.loads(kept.read_text())
    assert document == json.loads(outcome.out)
    assert (document["certificate"], document["exactness"], document["grid"]) == (2, "grid", 256)
    assert (document["devices"], document["dtypes"], document["daemon"]) == (["timing model"], ["float32"], "0.1.0")
    assert document["python"] == "3.11.9"
    assert document["proof"]
    assert [path.name for path in tmp_path.iterdir() if "certificate" in path.name] == []


@pytest.mark.parametrize("name", ["nowhere/kept.json", "."])
async def test_verify_finds_out_first_whether_it_can_write(link, chain_file, tmp_path, name):
    outcome = await link.command("verify", str(chain_file), "-o", str(tmp_path / name))
    assert (outcome.code, outcome.error.field) == (2, "--output")
    assert link.transports == []


async def test_verify_against_an_equal_certificate(link, daemon, chain_file, tmp_path):
    kept = tmp_path / "kept.json"
    await link.command(
        "verify", str(chain_file), "--runs", "2", "--mode", "overlap", "--exactness", "fast", "-o", str(kept)
    )
    daemon.requests.clear()
    outcome = await link.command("verify", str(chain_file), "--against", str(kept), "-o", str(kept))
    assert outcome.code == 0
    asked = [(submit.options.mode, submit.options.exactness) for submit in submits(daemon)]
    assert asked == [("serial", "fast"), ("overlap", "fast")] * 2
    assert ": tokens equal, 0 changes in all" in outcome.out
    assert json.loads(kept.read_text())["against"]["equal"]


async def test_verify_against_asks_for_the_earlier_session(link, daemon, chain_file, tmp_path):
    def as_asked(submit, result):
        kinds = [submit.options.session or "prefix-cache", "prefix-cache"]  # the second one is sampled
        agents = [
            msgspec.structs.replace(agent, session=kind) for agent, kind in zip(result.agents, kinds, strict=True)
        ]
        return msgspec.structs.replace(result, agents=agents)

    daemon.edit = as_asked
    kept = tmp_path / "kept.json"
    given = ("verify", str(chain_file), "--exactness", "fast")
    await link.command(*given, "--session", "streaming-input", "-o", str(kept))
    outcome = await link.command("verify", str(chain_file), "--against", str(kept))
    assert outcome.code == 0, str(outcome.error)
    assert {submit.options.session for submit in submits(daemon)} == {"streaming-input"}
    outcome = await link.command("verify", str(chain_file), "--against", str(kept), "--session", "prefix-cache")
    assert "sessions: streaming-input, prefix-cache then, prefix-cache now" in str(outcome.error)


async def test_verify_against_names_every_change(link, daemon, chain_file, tmp_path):
    kept = tmp_path / "kept.json"
    await link.command("verify", str(chain_file), "-o", str(kept))

    def upgrade(status):
        workers = [
            msgspec.structs.replace(worker, limits=msgspec.structs.replace(worker.limits, engine="simulated 2"))
            for worker in status.workers
        ]
        return msgspec.structs.replace(status, workers=workers)

    daemon.edit_status = upgrade
    outcome = await link.command("verify", str(chain_file), "--against", str(kept))
    assert outcome.code == 3
    assert "engines: simulated 1 then, simulated 2 now. All tokens are equal." in str(outcome.error)

    def other_token(submit, result):
        changed = msgspec.structs.replace(result.agents[1], output_ids=[1, 8])
        return msgspec.structs.replace(result, agents=[result.agents[0], changed])

    daemon.edit = other_token
    outcome = await link.command("verify", str(chain_file), "--against", str(kept), "--json")
    assert outcome.code == 3
    assert str(outcome.error).endswith(", and 1 more. Tokens differ.")
    found = json.loads(outcome.out)["against"]
    assert (found["equal"], found["tokens_equal"]) == (False, False)
    assert [(change["what"], change["run"], change["agent"]) for change in found["changes"]] == [
        ("engines", None, None),
        ("output_digest", 1, "critic"),
    ]


async def test_verify_against_gives_sampled_agents_their_earlier_seeds(link, daemon, tmp_path):
    def seed(submit, result):
        agents = [
            msgspec.structs.replace(agent, seed=asked.seed if asked.seed is not None else 100 + len(daemon.results))
            for asked, agent in zip(submit.chain.agents, result.agents, strict=True)
        ]
        return msgspec.structs.replace(result, agents=agents)

    daemon.edit = seed
    kept = tmp_path / "kept.json"
    chain = b'{"name": "x", "agents": [{"name": "a", "prompt": "x", "temperature": 1}]}'
    await link.command("verify", "-", "--runs", "2", "-o", str(kept), stdin=chain)
    outcome = await link.command("verify", "-", "--against", str(kept), stdin=chain)
    assert outcome.code == 0
    seeds = [submit.chain.agents[0].seed for submit in submits(daemon)]
    assert seeds == [None, 100, None, 102, 100, 100, 102, 102]


async def test_verify_against_another_chain_runs_nothing(link, daemon, chain_file, tmp_path):
    kept = tmp_path / "kept.json"
    await link.command("verify", str(chain_file), "-o", str(kept))
    daemon.requests.clear()
    outcome = await link.command("verify", str(chain_file), "--input", "topic=storms", "--against", str(kept))
    assert outcome.code == 65
    assert str(outcome.error).startswith('--against: the certificate is of another chain, "two", or of other values')
    assert daemon.requests == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is no certificate: "),
        (b"\xff", "is no certificate: "),
        (b"[1]", "is no certificate: "),
        (b'{"name": "two", "agents": []}', "is no certificate: "),
        (b'{"certificate": 3}', "is a certificate of form 3, and this client reads form 2"),
        (b'{"certificate": 2}', "is a broken certificate: "),
    ],
)
async def test_verify_against_what_is_no_certificate(link, chain_file, tmp_path, content, says):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_bytes(content)
    outcome = await link.command("verify", str(chain_file), "--against", str(path))
    assert outcome.code == 65
    assert says in str(outcome.error)
    assert link.transports == []


async def test_verify_says_which_runs_are_no_proof(link, daemon, chain_file):
    def resume(submit, result):
        return msgspec.structs.replace(result, resumed=submit.options.mode == "serial" and result.id == "c2")

    daemon.edit = resume
    outcome = await link.command("verify", str(chain_file), "--runs", "2")
    assert outcome.code == 0
    assert "verdict    equal: 2 of 2 runs equal" in outcome.out
    assert "proof      no: 1 of 2 runs were cut off and went on" in outcome.out
    outcome = await link.command("verify", str(chain_file), "--json")
    document = json.loads(outcome.out)
    assert (document["resumed_pairs"], document["runs"][0]["resumed"]) == (0, False)


# ------------------------------------------------------------------------------------------------------------ the rest


async def test_attach_shows_the_chain_to_its_end(link, daemon, chain_file, until):
    await link.command("submit", str(chain_file), "--detach")
    ended = await link.command("attach", "c0")
    daemon.requests.clear()
    assert ended.code == 0
    assert ended.out.startswith("== writer ==\ntext of writer\n")
    assert ended.out.count("text of writer") == 1
    daemon.hold = True
    running = asyncio.ensure_future(link.command("attach", "c0", "--json"))
    await until(lambda: any(isinstance(request, Attach) for request in daemon.requests))
    daemon.finish("c0")
    assert json.loads((await running).out)["state"] == "finished"


async def test_result(link, chain_file):
    await link.command("submit", str(chain_file), "--detach")
    outcome = await link.command("result", "c0")
    assert outcome.out.startswith("== writer ==\ntext of writer\n\n== critic ==")
    assert json.loads((await link.command("result", "c0", "--json")).out)["agents"][0]["output_ids"] == [0, 7]


@pytest.mark.parametrize(("state", "code"), [("queued", 0), ("running", 0), ("failed", 1), ("cancelled", 1)])
async def test_result_of_a_chain_that_has_not_finished(link, daemon, chain_file, state, code):
    daemon.edit = lambda submit, result: msgspec.structs.replace(result, state=state)
    await link.command("submit", str(chain_file), "--detach")
    outcome = await link.command("result", "c0", "--json")
    assert (outcome.code, json.loads(outcome.out)["state"]) == (code, state)


@pytest.mark.parametrize("error", ["its deadline of 3 s has passed", "its deadline of 3 s has passed."])
async def test_the_sentence_of_a_failed_chain_ends_before_its_hint(link, daemon, chain_file, error):
    daemon.edit = lambda submit, result: msgspec.structs.replace(result, state="failed", error=error)
    outcome = await link.command("submit", str(chain_file))
    assert outcome.code == 1
    assert str(outcome.error) == (
        "the chain c0 failed: its deadline of 3 s has passed. `pingpong-client result c0` shows what there is."
    )


@pytest.mark.parametrize("command", ["attach", "result", "cancel"])
async def test_a_chain_that_is_not_known(link, command):
    outcome = await link.command(command, "nope")
    assert outcome.code == 1
    assert isinstance(outcome.error, ChainNotFound)


async def test_cancel_waits_for_the_end_and_says_what_it_was(link, daemon, chain_file):
    daemon.hold = True
    await link.command("submit", str(chain_file), "--detach")
    outcome = await link.command("cancel", "c0")
    assert (outcome.code, outcome.out, outcome.err) == (0, "c0: cancelled\n", "")
    assert daemon.results["c0"].state == "cancelled"
    outcome = await link.command("cancel", "c0")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == "pingpong-client: c0 had ended before: cancelled.\n"


async def test_cancel_of_a_chain_that_finishes_first(link, daemon, chain_file):
    daemon.hold = True
    await link.command("submit", str(chain_file), "--detach")
    answer = daemon._answer

    def finish_first(request):
        if isinstance(request, Cancel):
            daemon.finish("c0")
        answer(request)

    daemon._answer = finish_first
    outcome = await link.command("cancel", "c0")
    assert (outcome.code, outcome.out) == (0, "c0: had finished before\n")


async def test_cancel_without_waiting(link, daemon, chain_file):
    daemon.hold = True
    await link.command("submit", str(chain_file), "--detach")
    outcome = await link.command("cancel", "c0", "--no-wait")
    assert (outcome.code, outcome.out) == (0, "")
    assert [type(request) for request in daemon.requests[-2:]] == [GetResult, Cancel]


async def test_forget_erases_all_that_it_can(link, daemon, chain_file):
    for _ in range(3):
        await link.command("submit", str(chain_file), "--detach")
    outcome = await link.command("forget", "c0", "nope", "c2", "c0")
    assert outcome.code == 1
    assert 'there is no chain "nope"' in outcome.err
    assert list(daemon.results) == ["c1"]
    assert outcome.out == "forgot c0\nforgot c2\n"
    assert outcome.err.count("\n") == 1
    assert "nope was not forgotten: " in outcome.err
    outcome = await link.command("forget", "c1")
    assert (outcome.code, outcome.out, outcome.err) == (0, "forgot c1\n", "")


async def test_drain_of_a_group_waits_for_its_new_worker(link, daemon):
    outcome = await link.command("drain", "--group", "w1", "--timeout", "30")
    assert outcome.code == 0
    assert outcome.out.splitlines() == ["waiting until a fresh worker serves w1", "w1 is served by a fresh worker"]
    drain = daemon.requests[-1]
    assert (drain.group, drain.deadline_s) == ("w1", 30.0)


async def test_drain_tells_what_it_waits_for_until_the_daemon_is_gone(link, daemon, monkeypatch):
    monkeypatch.setattr("pingpong_client.commands.drain.POLL_S", 0.01)
    counts = iter([{"running": 2, "queued": 1}, {"running": 2, "queued": 1}, {"running": 1}, {}])

    def count(status):
        if (chains := next(counts, None)) is None:
            daemon.away = True
            link.lose()
            chains = {}
        return msgspec.structs.replace(status, chains=chains)

    daemon.edit_status = count
    outcome = await link.command("drain")
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        "the daemon (pid 99) waits for 2 running chains; 1 queued chain is kept for its next start",
        "the daemon (pid 99) waits for 1 running chain",
        "the daemon (pid 99) waits for nothing but its engines to stop",
        "the daemon has ended",
    ]


@pytest.mark.parametrize(
    ("chains", "waits_for", "ended"),
    [
        (
            {"running": 1, "queued": 2, "finished": 7},
            "1 running chain; 2 queued chains are kept for its next start",
            "; 3 chains had not finished when it last answered: what is left goes on at its next start",
        ),
        (
            {"queued": 1},
            "nothing but its engines to stop; 1 queued chain is kept for its next start",
            "; 1 chain had not finished, and goes on at its next start",
        ),
        ({"finished": 7}, "nothing but its engines to stop", ""),
    ],
)
async def test_drain_says_what_was_left_when_the_daemon_ended(link, daemon, monkeypatch, chains, waits_for, ended):
    monkeypatch.setattr("pingpong_client.commands.drain.POLL_S", 0.01)
    pids = iter([99, 99, 100])
    daemon.edit_status = lambda status: msgspec.structs.replace(status, pid=next(pids), chains=chains)
    outcome = await link.command("drain")
    assert outcome.out.splitlines() == [
        f"the daemon (pid 99) waits for {waits_for}",
        f"the daemon has ended{ended}",
    ]


async def test_drain_of_a_group_that_is_not_there(link, daemon):
    outcome = await link.command("drain", "--group", "nosuch")
    assert (outcome.code, outcome.out) == (2, "")
    assert str(outcome.error) == '--group: there is no device group "nosuch". There are: w0, w1.'
    assert not any(isinstance(request, Drain) for request in daemon.requests)


async def test_drain_ends_where_another_daemon_was_started(link, daemon, monkeypatch):
    monkeypatch.setattr("pingpong_client.commands.drain.POLL_S", 0.01)
    pids = iter([99, 99, 100])
    daemon.edit_status = lambda status: msgspec.structs.replace(status, pid=next(pids))
    outcome = await link.command("drain")
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "the daemon has ended")


async def test_list(link, chain_file):
    assert (await link.command("list")).out == "no chains\n"
    await link.command("submit", str(chain_file), "--detach")
    lines = (await link.command("list")).out.splitlines()
    assert lines[0].split() == ["id", "name", "state", "placement", "exactness", "agents", "age", "E2E", "ms"]
    assert lines[1].split() == ["c0", "two", "finished", "ping-pong", "fast", "2/2", "1", "h", "02", "min", "2,500"]
    assert json.loads((await link.command("list", "--json")).out)[0]["id"] == "c0"


async def test_list_of_the_latest(link, daemon, chain_file):
    for _ in range(3):
        await link.command("submit", str(chain_file), "--detach")
    lines = (await link.command("list", "--limit", "2")).out.splitlines()
    assert [line.split()[0] for line in lines] == ["id", "c1", "c2"]
    assert daemon.requests[-1].limit == 2


async def test_status_tells_of_troubles(link, daemon):
    def trouble(status):
        workers = [
            msgspec.structs.replace(status.workers[0], state="waiting", restarts=2, failure="it did not beat"),
            msgspec.structs.replace(
                status.workers[1],
                state="failed",
                stage="given up: crash loop: it ended 5 times within 300 s, at last because it had no memory",
                restarts=4,
                failure="it had no memory",
            ),
        ]
        store = StoreStatus(path="/var/chains.db", chains=12, bytes=3 * 2**20, pending=4, error="disk full")
        return msgspec.structs.replace(
            status, state="degraded", workers=workers, store=store, refused_frames={"control": 1234, "workers": 0}
        )

    daemon.edit_status = trouble
    out = (await link.command("status")).out
    assert "instance default: degraded" in out
    assert "store: /var/chains.db, 12 chains kept in all, 3.0 MiB, 4 changes not on disk yet; " in out
    assert "; it cannot be written: disk full\n" in out
    assert "refused frames: 1,234 on control\n" in out
    w0, w1, legend, *troubles = out.splitlines()[-5:]
    assert (w0.split()[2], w1.split()[2]) == ("waiting", "failed")
    assert len(w1) < 80
    assert legend.startswith("running: agents")
    assert troubles == [
        "w0: started 3 times; the last failure: it did not beat",
        "w1: started 5 times; given up: crash loop: it ended 5 times within 300 s, at last because it had no memory",
    ]


async def test_status_tells_short_stages_in_the_table(link, daemon):
    def load(status):
        workers = [msgspec.structs.replace(status.workers[0], state="starting", stage="loading weights", limits=None)]
        return msgspec.structs.replace(status, workers=workers)

    daemon.edit_status = load
    lines = (await link.command("status")).out.splitlines()
    assert "starting (loading weights)" in lines[-2]
    assert not any(line.startswith("engine:") for line in lines)


async def test_what_a_queued_chain_waits_for_is_said_everywhere(link, daemon, chain_file):
    why = "it was accepted for the model m1,\nand the daemon serves m2"
    daemon.edit = lambda submit, result: msgspec.structs.replace(result, state="queued", placement=None, why=why)
    daemon.edit_status = lambda status: msgspec.structs.replace(status, chains={"queued": 1, "finished": 3})
    await link.command("submit", str(chain_file), "--detach")
    told = "c0 is queued: it was accepted for the model m1, and the daemon serves m2"
    assert (await link.command("list")).out.splitlines()[-1] == told
    lines = (await link.command("status")).out.splitlines()
    assert lines[lines.index("chains: 1 queued; 3 finished since the daemon's start") + 1] == told
    assert (await link.command("result", "c0")).out.splitlines()[-1].startswith("c0: queued, ")
    assert "it was accepted for the model m1, and" in (await link.command("result", "c0")).out


@pytest.mark.parametrize("options", [[], ["--json"]])
async def test_attach_says_at_once_what_a_queued_chain_waits_for(link, daemon, chain_file, until, options):
    daemon.hold = True
    daemon.edit = lambda submit, result: msgspec.structs.replace(result, why="the engines are loading")
    await link.command("submit", str(chain_file), "--detach")
    running = asyncio.ensure_future(link.command("attach", "c0", *options))
    await until(lambda: "c0 is queued: the engines are loading" in link.stderr.getvalue())
    daemon.finish("c0")
    outcome = await running
    assert (outcome.code, outcome.err.count("queued")) == (0, 1)


async def test_result_tells_of_what_was_survived(link, daemon, chain_file):
    def survive(submit, result):
        resumed = [ResumeEntry(at_ms=3400.0, tokens=120, worker="w0", why="it did not beat")]
        agents = [
            msgspec.structs.replace(result.agents[0], resumed=resumed),
            msgspec.structs.replace(result.agents[1], attempt=2),
            msgspec.structs.replace(result.agents[1], name="editor", attempt=2),
        ]
        return msgspec.structs.replace(result, resumed=True, agents=agents)

    daemon.edit = survive
    await link.command("submit", str(chain_file), "--detach")
    for command in ("result", "attach"):
        lines = (await link.command(command, "c0")).out.splitlines()
        assert lines[-3] == "writer: resumed at 3,400 ms, 120 tokens kept from w0: it did not beat"
        assert lines[-2] == "attempt 2: critic, editor (the daemon was restarted, or they gave way to others)"
        assert lines[-1] == "c0: finished, E2E 2,500 ms, ping-pong, resumed"


async def test_status(link):
    outcome = await link.command("status")
    lines = outcome.out.splitlines()
    assert lines[0] == "pingpongd 0.1.0, instance default: ready"
    assert "pid 99, up 1 min 15 s" in lines
    assert "slots: 60 of 64 free, 4,096 tokens each" in lines
    assert "chains: none" in lines
    assert "engine: simulated 1, timing" in lines
    assert [line.split("  ")[0] for line in lines[-4:-2]] == ["w0", "w1"]
    assert lines[-1] == "not measured: w0, w1"
    document = json.loads((await link.command("status", "--json")).out)
    assert document["workers"][0]["name"] == "w0"
    assert document["version"] == "0.1.0"
    assert "request" not in document


async def test_status_tells_levels_and_what_the_scheduler_did(link, daemon, monkeypatch):
    state = SchedulerState(
        steps=10, step_ms=11.25, decode_ms=8.5, target_ms=11.5, budget_tokens=64, reason="target", append_tokens=640,
        withheld_steps=1,
    )  # fmt: skip

    def edit(status):
        first, second = status.workers
        second = msgspec.structs.replace(
            second, limits=msgspec.structs.replace(second.limits, grid_tokens=0, grid_refusal="the dtype is int4")
        )
        return msgspec.structs.replace(status, workers=[msgspec.structs.replace(first, scheduler=state), second])

    assert (
        "exactness: fast; grid, cells of 256 tokens; fast by default" in (await link.command("status")).out.splitlines()
    )
    daemon.edit_status = edit
    monkeypatch.setenv("COLUMNS", "80")
    lines = (await link.command("status", terminal=True)).out.splitlines()
    assert "exactness: fast; fast by default" in lines
    assert "no grid on w1: the dtype is int4" in lines
    assert lines[-1] == "w0: step 11.2 ms, alone 8.5, target 11.5; 64 append tokens: target"
    assert all(len(line) <= 80 for line in lines)
    document = json.loads((await link.command("status", "--json")).out)
    assert document["workers"][0]["scheduler"] == msgspec.to_builtins(state)


async def test_schema_needs_no_daemon(link):
    outcome = await link.command("schema")
    assert json.loads(outcome.out) == json_schema()
    assert link.transports == []


@pytest.mark.parametrize("command", ["status", "list"])
async def test_tables_fit_80_columns(link, chain_file, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    await link.command("submit", str(chain_file), "--detach")
    outcome = await link.command(command, terminal=True)
    assert all(len(line) <= 80 for line in outcome.out.splitlines())
