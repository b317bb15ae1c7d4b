"""The exactness benchmark and the choice of a grid's cell: chains, figures, and both commands on simulated engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from connecting import with_keys
from daemon_process import HANG_SECONDS, simulated_config
from exactness import ChainPair, render
from grid_size import APPEND_TOKENS, SUFFIX_TOKENS, CellRun, losses, recommended, remainders
from pingpong_bus.chain import parse_chain, upstreams
from pingpong_bus.errors import UsageError
from pingpong_client.certificate import AgentCertificate, Difference, RunCertificate
from random_chains import SUFFIX_TOKENS as SUFFIX_RANGE
from random_chains import ChainShape, Range, random_chain, random_pool

ROOT = Path(__file__).parents[2]
POOL = random_pool(4096)


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


@pytest.fixture
def config(folder: Path) -> Path:
    path = folder / "config.toml"
    path.write_text(simulated_config())
    return path


@given(st.integers(0, 10_000), st.integers(0, 3))
def test_random_chains_keep_to_their_shape(index: int, seed: int) -> None:
    shape = ChainShape()
    chain = random_chain(shape, index, seed=seed, pool=POOL)
    assert chain == random_chain(shape, index, seed=seed, pool=POOL)
    assert 2 <= len(chain.agents) <= 4
    for at, agent in enumerate(chain.agents):
        assert agent.prompt_ids is not None
        reads = [item for item in agent.prompt_ids if isinstance(item, str)]
        assert len(reads) <= min(at, 2)
        assert set(upstreams(chain, at)) >= ({at - 1} if at else set())
        own = len(agent.prompt_ids) - len(reads)
        assert 50 + SUFFIX_RANGE[0] <= own <= 3000 + SUFFIX_RANGE[1]
        assert 16 <= agent.max_tokens <= 200
        assert agent.ignore_eos


def test_random_chains_differ_and_some_fan_in() -> None:
    chains = [random_chain(ChainShape(), index, pool=POOL) for index in range(50)]
    assert len({str(chain.agents) for chain in chains}) == 50
    fans = [sum(isinstance(item, str) for item in chain.agents[-1].prompt_ids or []) == 2 for chain in chains]
    assert any(fans)
    assert not all(fans)


def test_fixed_lengths_make_the_chain_asked_for() -> None:
    shape = ChainShape(agents=Range(5, 5), prefix=Range(4096, 4096), output=Range(256, 256), last_output=Range(64, 64))
    chain = random_chain(replace(shape, fan_in=0.0), 3, pool=POOL)
    assert [agent.max_tokens for agent in chain.agents] == [256] * 4 + [64]
    prompts = [agent.prompt_ids or [] for agent in chain.agents]
    assert [prompt[4096] for prompt in prompts[1:]] == [f"{{{{agent{at}}}}}" for at in range(4)]
    assert parse_chain(json.dumps({"name": "c", "agents": [{"name": "a", "prompt_ids": prompts[0]}]}).encode())


@pytest.mark.parametrize("text", ["", "3:2", "a:b", "0:4", "1:2:3"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="range"):
        Range.parse(text)


def pair(index: int, level: str, serial_ms: float, ahead_ms: float, *, differs: bool = False) -> ChainPair:
    found = Difference(where="output", index=7, serial=11, read_ahead=12) if differs else None
    agents = [
        AgentCertificate(
            agent=name,
            prompt_tokens=9,
            output_tokens=9,
            prompt_digest="p",
            output_digest="o",
            equal=difference is None,
            difference=difference,
        )
        for name, difference in (("a", None), ("b", found))
    ]
    return ChainPair(
        chain=f"random-0-{index}",
        index=index,
        exactness="grid" if level == "grid" else "fast",
        mode="ping-pong",
        grid=256 if level == "grid" else None,
        prefixes=[9, 9],
        reads=[[], ["a"]],
        certificate=RunCertificate(
            serial_id="s",
            read_ahead_id="r",
            serial_ms=serial_ms,
            read_ahead_ms=ahead_ms,
            equal=not differs,
            agents=agents,
        ),
        provenance={},
    )


def test_report_counts_equal_chains_and_what_the_level_costs() -> None:
    text = render(
        [
            pair(0, "grid", 1020, 550),
            pair(1, "grid", 2040, 1100),
            pair(0, "fast", 1000, 500),
            pair(1, "fast", 2000, 1000, differs=True),
        ]
    )
    assert "| grid of 256, ping-pong | 2 of 2 | 4 of 4 | 3.1 | 1.6 | 46.1 % |" in text
    assert "| fast, ping-pong | 1 of 2 | 3 of 4 | 3.0 | 1.5 | 50.0 % |" in text
    assert "grid over fast, in series: +2.0 % median, +2.0 % in all" in text
    assert "grid over fast, read ahead: +10.0 % median, +10.0 % in all" in text
    assert "fast, random-0-1, b: output token 7 is 11 in series and 12 read ahead" in text


def test_a_pair_that_was_cut_off_counts_as_no_proof() -> None:
    resumed = pair(0, "grid", 1, 1)
    resumed = replace(resumed, certificate=replace(resumed.certificate, resumed=True))
    assert "| 0 of 1 |" in render([resumed])


def cell(size: int | None, serial_ms: float, left_ms: float, length: int = 1000) -> CellRun:
    return CellRun(
        cell=size,
        length=length,
        index=0,
        serial_ms=serial_ms,
        left_ms=[left_ms],
        step_ms=10.0,
        agents=5,
        output=11,
        provenance={},
    )


def test_the_cell_with_the_least_greatest_loss_is_recommended() -> None:
    free = cell(None, 100, 20)  # 1000 ms in series, 680 read ahead
    runs = [free, cell(64, 130, 22), cell(128, 110, 25), cell(512, 100, 90)]
    found = losses(runs)
    assert found[64][1000].serial == pytest.approx(150 / 1000)
    assert found[512][1000].ahead == pytest.approx(280 / 680)
    assert recommended(runs) == 128
    # A second length, where the middle cell is bad, counts as well.
    assert recommended([*runs, cell(None, 100, 20, 2000), cell(64, 101, 20, 2000), cell(128, 300, 20, 2000)]) == 64
    assert recommended(runs[1:]) is None


def test_what_is_left_of_a_cell_is_spread_over_it() -> None:
    assert remainders(256) == [SUFFIX_TOKENS + left for left in (32, 96, 160, 224)]
    assert max(remainders(None)) < APPEND_TOKENS + SUFFIX_TOKENS


def test_keys_are_set_above_the_first_table_alone() -> None:
    text = 'a = 1\ndtype = "float32"  # so\n[vllm]\ndtype = "x"\n'
    assert with_keys(text, {"dtype": "bfloat16", "grid_tokens": 256}) == (
        'dtype = "bfloat16"\ngrid_tokens = 256\na = 1\n[vllm]\ndtype = "x"\n'
    )


def test_grid_size_measures_recommends_and_reports(config: Path, folder: Path) -> None:
    file = folder / "cells.jsonl"
    options = ("--lengths", "300", "--cells", "32,128", "--rounds", "1")
    done = run("grid_size.py", "--config", config, "--out", file, *options)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["cell"] for line in file.read_bytes().splitlines()] == [None, 32, 128]
    assert "Recommended: " in done.stdout
    again = run("grid_size.py", "--report", file)
    assert again.stdout == done.stdout


def test_exactness_compares_random_chains_and_reports(config: Path, folder: Path) -> None:
    file = folder / "pairs.jsonl"
    options = ("--chains", "2", "--prefix", "50:300", "--output", "4:12", "--grid-tokens", "64", "--prompts", "ids")
    done = run("exactness.py", "--config", config, "--out", file, *options)
    assert done.returncode == 0, done.stderr
    assert "| grid of 64, ping-pong | 2 of 2 |" in done.stdout
    assert "grid over fast, in series" in done.stdout
    assert len(file.read_bytes().splitlines()) == 4
    again = run("exactness.py", "--report", file)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    refused = run("exactness.py", "--config", config, "--prefix", "9:1")
    assert refused.returncode == UsageError.exit_code
    assert refused.stderr.count("\n") == 1
