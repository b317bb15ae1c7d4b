"""The suite: its file, the order of its cells; and one small suite on three daemons side by side."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from daemon_process import HANG_SECONDS
from pingpong_bus.chain import upstreams, validate_chain
from pingpong_bus.errors import ConfigError, UsageError
from pingpongd.config import parse_config
from presend import presend_ids
from profiles import Profile, filling_chain, ids_chain
from runs import read_runs
from suite_daemons import daemon_config
from suite_plan import (
    Cell,
    Pace,
    as_toml,
    chosen_cells,
    estimated_s,
    load_suite,
    merged,
    next_cell,
    rows_of,
    sides_of,
    wanted_daemons,
)
from ways import Way, baseline_of, parse_way

ROOT = Path(__file__).parents[2]
SUITES = [ROOT / "benchmarks" / f"suite-{name}.toml" for name in ("cpu", "h200", "simulated")]


# ------------------------------------------------------------------------------------------------------ shapes and ways


@pytest.mark.parametrize(
    ("shape", "agents", "reads"),
    [
        ("line", 4, [[], [0], [1], [2]]),
        ("fan-in", 5, [[], [], [], [], [0, 1, 2, 3]]),
        ("diamond", 6, [[], [0], [0], [0], [0], [1, 2, 3, 4]]),
        ("diamond", 2, [[], [0]]),
    ],
)
def test_a_shape_says_who_reads_whom(shape: str, agents: int, reads: list[list[int]]) -> None:
    chain = ids_chain(Profile(name="p", prefix=30, output=4, last_output=2, agents=agents, shape=shape), vocabulary=500)
    validate_chain(chain)
    assert [list(upstreams(chain, at)) for at in range(agents)] == reads


@pytest.mark.parametrize("document", ["before", "after"])
def test_all_agents_share_a_document_and_have_a_role_of_their_own(document: str) -> None:
    profile = Profile(name="p", prefix=100, output=4, last_output=2, agents=3, document=document, role=20)
    prompts = [agent.prompt_ids or [] for agent in ids_chain(profile, vocabulary=5000).agents]
    documents, roles = (slice(0, 100), slice(100, 120)) if document == "before" else (slice(20, 120), slice(0, 20))
    assert len({tuple(prompt[documents]) for prompt in prompts}) == 1
    assert len({tuple(prompt[roles]) for prompt in prompts}) == 3


def test_filling_the_caches_asks_every_agent_that_reads_no_other_otherwise() -> None:
    chain = ids_chain(Profile(name="p", prefix=30, output=4, last_output=2, agents=3, shape="fan-in"), vocabulary=500)
    for asked, filling, reads in zip(chain.agents, filling_chain(chain).agents, (False, False, True), strict=True):
        assert (asked.prompt_ids == filling.prompt_ids) == reads
        assert (asked.prompt_ids or [])[:30] == (filling.prompt_ids or [])[:30]


def test_a_way_is_a_mode_and_may_be_held_to_a_group() -> None:
    assert parse_way("overlap@gpu0") == Way("overlap", "gpu0")
    assert parse_way("auto").name == "auto"
    with pytest.raises(UsageError, match="ping-pong cannot be held to a group"):
        parse_way("ping-pong@gpu0")


@pytest.mark.parametrize(
    ("way", "ways", "baseline"),
    [
        ("overlap@b", "serial,serial@a,serial@b,overlap@b", "serial@b"),
        ("ping-pong", "serial@a,serial,ping-pong", "serial"),
        ("ping-pong", "serial@b,serial@a,ping-pong", "serial@b"),
        ("serial@a", "serial,serial@a", "serial@a"),
        ("presend", "ping-pong,presend", "presend"),
    ],
)
def test_the_baseline_is_series_on_the_same_group_or_the_first_there_is(way: str, ways: str, baseline: str) -> None:
    assert baseline_of(parse_way(way), [parse_way(name) for name in ways.split(",")]).name == baseline


def test_a_chain_of_ids_is_taken_apart_without_running_it() -> None:
    chain = ids_chain(Profile(name="p", prefix=30, output=4, last_output=2, agents=2, suffix=5), vocabulary=500)
    parts = presend_ids(chain)
    assert [(len(part.prefix), len(part.suffix)) for part in parts] == [(35, 0), (30, 5)]


# ----------------------------------------------------------------------------------------------------------------- plan


def cell(name: str, priority: float, *rows: str, **fields: object) -> Cell:
    return Cell(name=name, priority=priority, rows=list(rows) or ["pair serial"], **fields)


def test_cells_take_turns_by_priority_and_by_the_rounds_they_had() -> None:
    cells = [cell("later", 3), cell("urgent", 1.5, again=1, runs=3), cell("other", 2.9)]
    rounds: dict[str, int] = {}
    order = []
    while found := next_cell(cells, rounds, dict.fromkeys(("later", "urgent", "other"), 1.0), 10.0):
        rounds[found.name] = rounds.get(found.name, 0) + 1
        order.append(found.name)
    assert order == ["urgent", "urgent", "other", "later", "urgent", "other", "later", "other", "later"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.floats(0.5, 50)), min_size=1), st.floats(1, 200))
def test_no_round_starts_that_does_not_fit_and_none_that_fits_is_left(
    shapes: list[tuple[int, int, float]], seconds: float
) -> None:
    cells = [cell(f"c{at}", priority, runs=runs) for at, (priority, runs, _) in enumerate(shapes)]
    costs = {f"c{at}": cost for at, (_, _, cost) in enumerate(shapes)}
    rounds: dict[str, int] = {}
    while found := next_cell(cells, rounds, costs, seconds):
        assert costs[found.name] <= seconds
        seconds -= costs[found.name]
        rounds[found.name] = rounds.get(found.name, 0) + 1
    assert all(rounds.get(one.name, 0) == one.runs or costs[one.name] > seconds for one in cells)


def test_rows_name_their_baselines() -> None:
    shared = cell("c", 1, "pair serial@a", "pair ping-pong", "stock presend@a", "tp serial", "tp overlap against x")
    assert [(row.name, row.baseline) for row in rows_of(shared)] == [
        ("pair serial@a", "pair serial@a"),
        ("pair ping-pong", "pair serial@a"),
        ("stock presend@a", "pair serial@a"),
        ("tp serial", "tp serial"),
        ("tp overlap", "x"),
    ]
    assert [row.daemon for row in rows_of(shared, ["tp"])] == ["tp", "tp"]


def test_sides_of_many_chains_are_checked() -> None:
    assert sides_of(cell("c", 1, "stock round-robin", "pair auto", at_once=2), ["pair"]) == [("pair", "auto")]
    with pytest.raises(UsageError, match="is no side"):
        sides_of(cell("c", 1, "pair presend", at_once=2))


def test_a_round_is_expected_to_take_what_its_rows_take() -> None:
    pace = Pace(decode_ms=10, prefill_ms=0.1, overhead_s=1)
    one = cell("c", 1, "pair serial", "pair auto", prefix=1000, output=100, agents=2)
    assert estimated_s(one, pace) == pytest.approx(2 * (0.2 + 1.25 + 1))
    assert estimated_s(replace(one, cache="warm"), pace) == pytest.approx(2 * (0.2 + 1.25 + 1 + 0.2))


@pytest.mark.parametrize("file", SUITES, ids=lambda path: path.stem)
def test_suites_are_whole_and_their_daemons_have_valid_configurations(file: Path) -> None:
    suite = load_suite(file)
    base = tomllib.loads((file.parent / suite.config).read_text())
    for name in wanted_daemons(suite, suite.cells):
        document = daemon_config(suite, base, name)
        assert tomllib.loads(as_toml(document)) == document
        assert parse_config(document).instance == f"suite-{name}"
    names = {name for cell in suite.cells for name in ([] if cell.at_once else [row.name for row in rows_of(cell)])}
    groups = {group["name"] for name in suite.daemons for group in daemon_config(suite, base, name)["groups"]}
    assert {name.partition("@")[2] for name in names} <= {*groups, ""}
    baselines = {row.baseline for cell in suite.cells if not cell.at_once for row in rows_of(cell)}
    assert baselines <= names


def test_tables_of_a_configuration_are_merged_and_lists_replaced() -> None:
    assert merged({"a": {"b": 1, "c": [1, 2]}, "d": 1}, {"a": {"c": [3]}, "e": {"f": 2}}) == {
        "a": {"b": 1, "c": [3]},
        "d": 1,
        "e": {"f": 2},
    }


def test_what_a_suite_does_not_know_is_refused(tmp_path: Path) -> None:
    def suite(text: str) -> Path:
        (tmp_path / "suite.toml").write_text(f'config = "c"\n[daemons.a]\n[[cells]]\nname = "c"\npriority = 1\n{text}')
        return tmp_path / "suite.toml"

    with pytest.raises(ConfigError, match="wants a daemon b"):
        load_suite(suite('rows = ["b serial"]'))
    with pytest.raises(UsageError, match="no mode 'fast'"):
        load_suite(suite('rows = ["a fast"]'))
    with pytest.raises(ConfigError, match="unknown field `cach`"):
        load_suite(suite('rows = ["a serial"]\ncach = "warm"'))
    with pytest.raises(ConfigError, match="can only be lines"):
        load_suite(suite('rows = ["a auto"]\nat_once = 2\nshape = "fan-in"'))
    known = load_suite(suite('rows = ["a serial"]'))
    assert [found.name for found in chosen_cells(known, "c*")] == ["c"]
    with pytest.raises(UsageError, match="no cell 'd'"):
        chosen_cells(known, "d")


# ------------------------------------------------------------------------------------------------- on three daemons

BASE = """
engine = "simulated"
calibrate = false
[simulated]
step_ms = 0.5
row_us = 2.0
[[groups]]
name = "a"
devices = ["cpu:0"]
[[groups]]
name = "b"
devices = ["cpu:0"]
"""
SMALL = """
config = "base.toml"
[pace]
decode_ms = 1.0
prefill_ms = 0.005
[daemons.pair]
after = ["stock"]
[daemons.stock]
changes.decode_first.enabled = false
[daemons.one]
changes.groups = [{ name = "wide", devices = ["cpu:0", "cpu:1"] }]
[daemons.broken]
changes.simulated.step_ms = -1.0
[[cells]]
name = "line"
priority = 1
runs = 1
prefix = 200
output = 12
rows = ["pair serial@a", "pair auto", "pair presend@b", "stock presend against pair serial@a", "one overlap",
        "broken serial"]
[[cells]]
name = "many"
priority = 2
runs = 1
prefix = 100
output = 12
agents = 2
at_once = 3
rows = ["pair ping-pong", "stock round-robin"]
[[cells]]
name = "long"
priority = 0
prefix = 4000
output = 100000
rows = ["pair serial"]
"""


def test_a_suite_runs_on_daemons_side_by_side(folder: Path) -> None:
    (folder / "base.toml").write_text(BASE)
    (folder / "suite.toml").write_text(SMALL)
    out = folder / "out"
    script = str(ROOT / "benchmarks" / "suite.py")
    done = subprocess.run(
        [sys.executable, script, str(folder / "suite.toml"), "--seconds", "80", "--out", str(out)],
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "broken did not come up" in done.stdout
    assert "long: 0 of 3 rounds fitted the time" in done.stdout
    runs = read_runs([out / "chains.jsonl"])
    assert [(run.row, run.baseline) for run in runs] == [
        ("pair serial@a", "pair serial@a"),
        ("pair auto", "pair serial@a"),
        ("pair presend@b", "pair serial@a"),
        ("stock presend", "pair serial@a"),
        ("one overlap", "pair serial@a"),
    ]
    assert {agent.worker for agent in runs[2].result.agents} == {"b"}
    assert {agent.worker for agent in runs[3].result.agents} == {"a", "b"}
    for run in runs:
        gaps = sum(len(device.gaps_us) for device in run.gaps)
        assert 0 < gaps <= sum(run.max_tokens) - len(run.max_tokens)  # a doorbell may tell of several tokens
    sides = [json.loads(line)["side"] for line in (out / "load.jsonl").read_text().splitlines()]
    assert sides == ["pair ping-pong", "stock round-robin"]
    assert str(folder) not in (out / "chains.jsonl").read_text() + (out / "engines.jsonl").read_text()
    again = subprocess.run(
        [sys.executable, script, "--report", str(out)], capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    assert again.stdout.strip()
    assert again.stdout in done.stdout
