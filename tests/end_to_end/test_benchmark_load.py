"""The load generator: its command line, what comes when, what its numbers say, and one run on simulated engines."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon_process import HANG_SECONDS, simulated_config
from load import chosen_loads, chosen_sides, parse_arguments
from load_report import comparable, limit_ms, render, summaries
from load_rows import ChainRow, Gaps, How, Load, Round, Shape
from load_sides import SideSpec, stock_config
from pingpong_bus.errors import UsageError

ROOT = Path(__file__).parents[2]


def one_round(
    side: str, e2e_ms: list[float | None], *, how: How = "auto", index: int = 0, makespan: float = 1e3
) -> Round:
    chains = [
        ChainRow(
            due_ms=0.0,
            submitted_ms=0.0,
            e2e_ms=ms,
            placement="serial",
            ttft_ms=[100.0, 10.0],
            output_tokens=8,
            error="" if ms else "it was lost",
        )
        for ms in e2e_ms
    ]
    gaps = Gaps()
    gaps.add([10.0] * 98 + [20.0, 30.0])
    return Round(
        side=side,
        how=how,
        decode_first=how != "round-robin",
        groups=["a", "b"],
        index=index,
        load=Load(at_once=len(e2e_ms)),
        shape=Shape(prefix=10, output=4, last_output=1, agents=2),
        cache="cold",
        exactness="fast",
        seed=0,
        unloaded_ms=400.0,
        makespan_ms=makespan,
        chains=chains,
        gaps={"a": gaps},
    )


def test_arrivals_are_the_same_for_a_seed_and_as_many_as_the_rate_says() -> None:
    load = Load(rate=5.0, seconds=200.0)
    arrivals = load.arrivals_ms("1")
    assert arrivals == load.arrivals_ms("1") != load.arrivals_ms("2")
    assert arrivals == sorted(arrivals)
    assert 0 < arrivals[0] < arrivals[-1] < 200_000
    assert len(arrivals) == pytest.approx(1000, abs=150)
    assert Load(at_once=3).arrivals_ms("1") == [0.0, 0.0, 0.0]


@given(st.lists(st.floats(0.01, 1e5), min_size=1), st.sampled_from([1, 50, 90, 99, 100]))
def test_percentiles_of_counted_gaps_are_within_half_a_bucket(gaps: list[float], percent: int) -> None:
    counted, rest = Gaps(), Gaps()
    counted.add(gaps[::2])
    rest.add(gaps[1::2])
    counted.merge(rest)
    exact = sorted(gaps)[math.ceil(len(gaps) * percent / 100) - 1]
    assert counted.percentile_ms(percent) == pytest.approx(exact, rel=0.0051)
    assert counted.max_ms == max(gaps)


def test_no_gaps_have_no_percentile() -> None:
    assert math.isnan(Gaps().percentile_ms(50))


def test_a_side_is_a_name_a_place_and_how() -> None:
    assert SideSpec.parse("ours=/run/x:ping-pong") == SideSpec("ours", Path("/run/x"), "ping-pong")
    assert SideSpec.parse("ours=auto") == SideSpec("ours", None, "auto")
    for wrong in ("ours", "=auto", "ours=/run/x", "ours=/run/x:faster"):
        with pytest.raises(UsageError):
            SideSpec.parse(wrong)
    with pytest.raises(UsageError, match="same name"):
        chosen_sides(["a=auto", "a=serial"], None)
    with pytest.raises(UsageError, match="no side 'b'"):
        chosen_sides(["a=auto"], "b")


@pytest.mark.parametrize("wrong", [[], ["--rate", "1"], ["--at-once", "0"], ["--at-once", "x"], ["--seconds", "3"]])
def test_half_a_load_is_refused(wrong: list[str]) -> None:
    with pytest.raises(UsageError):
        chosen_loads(parse_arguments(wrong))


def test_several_loads_are_taken() -> None:
    options = parse_arguments(["--at-once", "4,8", "--rate", "0.5", "--seconds", "60"])
    assert list(map(str, chosen_loads(options))) == ["4 at once", "8 at once", "0.5 a second for 60 s"]


@pytest.mark.parametrize("name", ["examples/cpu.toml", "examples/gpu.toml", "benchmarks/h200.toml"])
def test_a_stock_configuration_differs_in_the_scheduler_alone(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    ours, stock = tomllib.loads(text), tomllib.loads(stock_config(text))
    assert stock.pop("decode_first") == {"enabled": False}
    assert stock.pop("exactness") == "fast"
    assert stock == {key: value for key, value in ours.items() if key not in ("decode_first", "exactness")}


def test_sides_are_held_against_round_robin_round_by_round() -> None:
    rounds = [
        one_round("ours", [300.0, 500.0]),
        one_round("stock", [800.0, 800.0], how="round-robin"),
        one_round("ours", [900.0, None], index=1, makespan=3e3),
        one_round("stock", [600.0, 600.0], how="round-robin", index=1),
        one_round("ours", [1.0, 1.0], index=2),  # the budget ended before stock's turn
    ]
    (together,) = comparable(rounds)
    stock, ours = summaries(together, None, limit_ms(together, None, 2.0))
    assert (stock.side, stock.saved, stock.goodput_share) == ("stock", [], 1.0)
    assert ours.saved == [pytest.approx(50.0)], "in the other round a chain did not finish"
    assert (ours.finished, ours.chains, ours.e2e_max_ms) == (3, 4, 900.0)
    assert (ours.chains_per_s, ours.tokens_per_s) == (0.75, 6.0)
    assert (ours.goodput_share, ours.goodput_per_s) == (0.5, 0.5), "900 ms are too long, one did not finish"
    assert (ours.ttft_mean_ms, ours.itl_max_ms) == (10.0, 30.0)
    assert (ours.itl_p50_ms, ours.itl_p99_ms) == (pytest.approx(10.0, rel=0.01), pytest.approx(20.0, rel=0.01))
    text = render(rounds, goodput_ms=500.0)
    assert "1 times: it was lost" in text
    assert "ended within 500 ms" in text


def test_loads_are_reported_apart() -> None:
    rounds = [one_round(side, [1.0] * count) for count in (1, 2) for side in ("ours", "stock")]
    assert [len(some) for some in comparable(rounds)] == [2, 2]
    assert "## 2 at once" in render(rounds, baseline="ours")


def test_rounds_of_another_suite_or_commit_are_no_rounds_of_this_one() -> None:
    engines = {"stock": [{"device": "H200"}] * 2, "wide": [{"device": "2 x H200"}]}
    rounds = [
        msgspec.structs.replace(
            one_round(side, [1.0]), provenance={"suite": suite, "commit": commit, "engines": engines[side]}
        )
        for suite, commit in (("s", "c"), ("t", "c"), ("s", "d"))
        for side in engines
    ]
    assert comparable(rounds) == [rounds[:2], rounds[2:4], rounds[4:]]


def test_all_sides_get_the_same_load_on_simulated_engines(folder: Path) -> None:
    config, out = folder / "config.toml", folder / "load.jsonl"
    config.write_text(simulated_config())
    sides = ("--side", f"ours={config}:auto", "--side", f"stock={config}:round-robin")
    options = [
        "--at-once",
        "3",
        "--rate",
        "20",
        "--seconds",
        "0.3",
        "--profile",
        "smoke",
        "--rounds",
        "1",
        "--cache",
        "warm",
    ]
    script = [sys.executable, str(ROOT / "benchmarks/load.py")]
    done = subprocess.run(
        [*script, *sides, *options, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert [(row["side"], row["decode_first"]) for row in rows] == [("ours", True), ("stock", False)] * 2
    for ours, stock in (rows[:2], rows[2:]):
        assert [chain["due_ms"] for chain in ours["chains"]] == [chain["due_ms"] for chain in stock["chains"]]
        assert [set(chain["workers"]) for chain in stock["chains"]] == [
            {"ab"[k % 2]} for k in range(len(stock["chains"]))
        ]
        for row in (ours, stock):
            heard = sum(sum(gaps["counts"].values()) for gaps in row["gaps"].values())
            assert row["missed_tokens"] == 0
            assert heard == sum(chain["output_tokens"] - 5 for chain in row["chains"])
            assert min(chain["cached_tokens"] for chain in row["chains"]) >= 5 * 160
    assert str(folder) not in out.read_text("utf-8")
    again = subprocess.run([*script, "--report", str(out)], capture_output=True, text=True, check=False)
    assert again.stdout == done.stdout
