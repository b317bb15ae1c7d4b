"""The benchmark of many groups: what it makes of a run, and a run of a few forked workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from group_load import ChainMaker, ChainSize
from groups_config import GroupsSettings, decode_ms, groups_toml, prefill_ms, worker_config
from groups_report import GroupsRow, Spread, dispatch_times
from pingpong_bus.messages import AgentResult, BesideFigure, ChainResult, EngineFigures
from pingpongd.config import load_config
from pingpongd.engine_cost import slowed
from runs import read_lines

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_stretched_token_takes_the_time_of_those_that_it_stands_for_and_prefill_takes_what_it_took() -> None:
    plain, stretched = GroupsSettings(groups=1), GroupsSettings(groups=1, time_scale=3.0, token_stretch=8)
    assert decode_ms(stretched, 4096) == pytest.approx(3 * 8 * decode_ms(plain, 4096))
    assert prefill_ms(stretched, 4352) == pytest.approx(3 * prefill_ms(plain, 4352), rel=0.01)


def test_its_configuration_has_every_group_and_the_timing_model(tmp_path: Path) -> None:
    settings = GroupsSettings(groups=3, time_scale=2.0, token_stretch=8)
    path = tmp_path / "groups.toml"
    path.write_text(groups_toml(settings, calibrate=False))
    config = load_config(path)
    assert [group.name for group in config.groups] == ["g0", "g1", "g2"]
    assert config.simulated == settings.timing


def test_figures_are_found_by_a_worker_of_these_groups_in_its_own_time() -> None:
    settings = GroupsSettings(groups=3, time_scale=8.0)
    assert worker_config(settings).simulated == settings.timing
    one = BesideFigure(context=4096, tokens=64, append_ms=20.0, decode_ms=10.0)
    measured = EngineFigures("now", [(64, 9.0)], [(256, 8, 15.0)], [(256, 8.5)], [(2, 8.6)], [one], 8.5, 9.0)
    scaled = slowed(measured, 8.0)
    assert (scaled.prefill, scaled.finalize, scaled.decode) == ([(64, 72.0)], [(256, 8, 120.0)], [(256, 68.0)])
    assert (scaled.batch, scaled.step_p99_ms, scaled.beside[0].decode_ms) == ([(2, 68.8)], 72.0, 80.0)


def test_chains_share_no_prefixes() -> None:
    maker = ChainMaker(ChainSize(prefix=64, output=16), vocabulary=100_000)
    prompts = [agent.prompt_ids or [] for number in range(3) for agent in maker.chain(number).agents]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 15


def test_what_the_supervisor_took_from_a_first_token_to_the_next_hop() -> None:
    agents = [AgentResult("a", first_token_ms=10.0), AgentResult("b", opened_ms=12.5), AgentResult("c")]
    result = ChainResult("1", "chain", "finished", agents=agents, placement="ping-pong")
    assert dispatch_times(result) == [2.5]


def test_a_spread_is_of_the_values_themselves() -> None:
    assert Spread.of([float(value) for value in range(1, 201)]) == Spread(100.5, 198.0, 200.0)
    assert Spread.of([]) == Spread()


def test_a_run_of_forked_workers(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ["--groups", "3", "--seconds", "1", "--chain-times", "0", "--idle-seconds", "0.2", "--prefix", "200"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "many_groups.py"), *flags, "--output", "32", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = read_lines(out, GroupsRow)
    assert row.simulated
    assert row.chains > 0
    assert not row.failed
    assert set(row.placements) <= {"serial", "ping-pong"}
    assert row.supervisor_cpu_s["loop"] > 0
    assert row.itl_ratio.p50 >= 0.99
    assert "| groups | 3 |" in done.stdout
