"""The configuration's calls: what is refused, and what of them is secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pingpong_bus.chain import parse_chain
from pingpong_bus.errors import ChainError, ConfigError
from pingpongd.calls import call_secrets, check_calls, quoted, resolve_calls
from pingpongd.check_calls import call_findings
from pingpongd.config import DaemonConfig, load_config, parse_config
from pingpongd.redaction import Redactor, redactor_of
from pingpongd.reload import merge

GROUPS = [{"name": "a", "devices": ["cpu:0"]}]


def config(**calls: dict[str, Any]) -> DaemonConfig:
    return parse_config({"engine": "simulated", "groups": GROUPS, "calls": calls})


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({}, "calls.x"),
        ({"command": ["a"], "url": "http://h/"}, "calls.x"),
        ({"command": []}, "calls.x.command"),
        ({"command": [""]}, "calls.x.command"),
        ({"command": ["a"], "headers": {"A": "b"}}, "calls.x.headers"),
        ({"url": "http://h/", "environment": {"A": "b"}}, "calls.x.environment"),
        ({"url": "ftp://h/"}, "calls.x.url"),
        ({"url": "http:///path"}, "calls.x.url"),
        ({"url": "http://h:x/"}, "calls.x.url"),
        ({"url": "http://h/a b"}, "calls.x.url"),
        ({"url": "http://me:secret@h/"}, "calls.x.url"),
        ({"command": ["a\0"]}, "calls.x.command"),
        ({"command": ["a"], "environment": {"A=B": "c"}}, "calls.x.environment.A=B"),
        ({"command": ["a"], "environment": {"A": "\0"}}, "calls.x.environment.A"),
        ({"url": "http://h/", "headers": {"Content-Length": "5"}}, "calls.x.headers.Content-Length"),
        ({"url": "http://h/", "headers": {"transfer-encoding": "chunked"}}, "calls.x.headers.transfer-encoding"),
        ({"url": "http://h/", "headers": {"A b": "c"}}, "calls.x.headers.A b"),
        ({"url": "http://h/", "headers": {"A": "b\nC: d"}}, "calls.x.headers.A"),
        ({"command": ["a"], "timeout_s": 0}, "calls.x.timeout_s"),
        ({"command": ["a"], "shell": True}, "calls.x.shell"),
    ],
)
def test_what_could_never_be_called_is_refused(call: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(x=call)
    assert caught.value.field == field


def test_a_name_that_no_chain_can_write_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chain can name it"):
        config(**{"a b": {"command": ["x"]}})


def test_variables_of_the_daemon_are_filled_in() -> None:
    calls = config(
        web={"url": "http://h/", "headers": {"Authorization": "Bearer $KEY", "X-Cost": "5 $$"}},
        run={"command": ["x"], "environment": {"TOKEN": "$KEY", "PLAIN": "p"}},
    ).calls
    found = resolve_calls(calls, {"KEY": "k3y"})
    assert found["web"].headers == {"Authorization": "Bearer k3y", "X-Cost": "5 $"}
    assert found["run"].environment == {"TOKEN": "k3y", "PLAIN": "p"}
    with pytest.raises(ConfigError, match="no variable KEY") as caught:
        resolve_calls(calls, {})
    assert caught.value.field == "calls.web.headers.Authorization"
    with pytest.raises(ConfigError, match="no header may"):
        resolve_calls(calls, {"KEY": "k\r\nX: y"})


def test_secrets_stand_in_no_log() -> None:
    found = config(
        web={"url": "http://h/", "headers": {"Authorization": "Bearer $KEY", "X-Api-Key": "literal-secret"}},
        run={"command": ["x"], "environment": {"MY_TOKEN": "in-the-file", "LEVEL": "verbose"}},
    )
    environment = {"KEY": "from-the-environment", "OTHER": "harmless"}
    assert call_secrets(found.calls, environment) == {"from-the-environment", "literal-secret", "in-the-file"}
    line = redactor_of(found, environment).text(
        "x from-the-environment y literal-secret z in-the-file verbose harmless"
    )
    assert line == "x *** y *** z *** verbose harmless"


def test_unknown_calls_are_refused_with_those_that_there_are() -> None:
    chain = parse_chain(
        b'{"name": "c", "agents": [{"name": "a", "prompt": "p"}, {"name": "s", "input": "{{a}}", "call": "other"}]}'
    )
    with pytest.raises(ChainError, match=r"no call \"other\".*allows: one, two") as caught:
        check_calls(chain, config(two={"command": ["x"]}, one={"command": ["x"]}).calls)
    assert caught.value.field == "agents[1].call"
    check_calls(chain, config(other={"command": ["x"]}).calls)


def test_calls_can_be_changed_while_the_daemon_runs() -> None:
    reload = merge(config(), config(x={"command": ["x"]}))
    assert reload.changed == ["calls"]
    assert list(reload.config.calls) == ["x"]


@pytest.mark.parametrize(
    ("call", "level", "says"),
    [
        ({"command": ["sh", "-c", "true"]}, "ok", "x"),
        ({"command": ["/nowhere/program"]}, "warning", "/nowhere/program"),
        ({"url": "http://h/", "headers": {"A": "$NO_SUCH"}}, "error", "NO_SUCH"),
    ],
)
def test_check_looks_for_programs_and_variables(call: dict[str, Any], level: str, says: str) -> None:
    (finding,) = call_findings(config(x=call), {"PATH": "/usr/bin:/bin"})
    assert finding.level == level
    assert says in finding.text
    assert not list(call_findings(config(), {}))


def test_the_example_is_valid_and_may_call_what_it_calls() -> None:
    examples = Path(__file__).parents[2] / "examples"
    found = load_config(examples / "steps.toml")
    chain = parse_chain((examples / "steps.json").read_bytes())
    check_calls(chain, found.calls)
    assert [agent.is_step for agent in chain.agents] == [False, True, True, False]


@pytest.mark.parametrize("said", ["strangers' words", 'some "quotes" and \\', "of\nlines"])
def test_clients_see_what_the_other_side_said_and_the_log_does_not(said: str) -> None:
    told = f"it ended with exit code 1{quoted('the end of its error output', said)}."
    assert said.split()[-1].strip('"') in told
    logged = Redactor().text(f'call "x": {told}')
    assert logged.startswith('call "x": it ended with exit code 1; the end of its error output: <')
    assert not any(word in logged for word in said.split() if len(word) > 3)
    assert not quoted("its answer", " \n")
