"""What runs are compared with, and what is made of them: hidden, slowdown, gaps between tokens."""

from __future__ import annotations

import pytest

from figures import comparable, decode_slowdown, devices_used, hidden_shares, inter_token, measured
from pingpong_bus.messages import AgentResult, ChainResult
from runs import DeviceGaps, Run, RunMode
from suite_table import render


def run(mode: RunMode, index: int, ttfts: list[float], *, step_ms: float = 10.0, **fields: object) -> Run:
    """A run of agents that write 11 tokens each, on groups a and b in turn."""
    agents = [
        AgentResult(
            name=f"a{at}",
            worker=("a", "b")[at % 2] if mode == "ping-pong" else "a",
            output_tokens=11,
            output_ids=[1] * 11,
            ttft_ms=ttft,
            total_ms=ttft + 10 * (step_ms + at % 2),
        )
        for at, ttft in enumerate(ttfts)
    ]
    values = {
        "profile": "p",
        "mode": mode,
        "cache": "cold",
        "index": index,
        "e2e_ms": sum(ttfts),
        "wall_ms": 1.0,
        "result": ChainResult(id="c", name="p", state="finished", agents=agents),
        "max_tokens": [11] * len(ttfts),
    }
    return Run(**(values | fields))


def test_hidden_is_told_of_each_run_against_the_series_of_its_index() -> None:
    serial = [run("serial", 0, [110, 110, 110]), run("serial", 1, [210, 210, 210])]
    ahead = [run("ping-pong", 1, [210, 10, 10]), run("ping-pong", 0, [110, 60, 60]), run("ping-pong", 7, [1, 1, 1])]
    step = 10.0  # of agents 0 and 2; it is 11 of the other, and a median counts
    assert hidden_shares(serial, ahead) == pytest.approx([400 / (420 - 2 * step), 100 / (220 - 2 * step)])


def test_only_agents_that_read_others_have_something_to_hide() -> None:
    reads: list[list[int]] = [[], [], [0, 1]]
    serial = [run("serial", 0, [100, 900, 110], reads=reads)]
    ahead = [run("ping-pong", 0, [100, 100, 10], reads=reads)]
    assert hidden_shares(serial, ahead) == pytest.approx([1.0])


def test_a_decode_is_slowed_down_against_the_same_agents_in_series() -> None:
    serial, ahead = [run("serial", 0, [1, 1, 1])], [run("ping-pong", 0, [1, 1, 1], step_ms=11.0)]
    assert decode_slowdown(serial, ahead) == pytest.approx({"a": 1.1, "b": 12 / 11})


def test_gaps_between_tokens_are_told_by_group_over_all_runs() -> None:
    gaps = [DeviceGaps(group="a", devices=["cuda:0"], gaps_us=[1000] * 60)]
    late = [DeviceGaps(group="a", devices=["cuda:0"], gaps_us=[*[1000] * 38, 5000, 9000])]
    found = inter_token([run("serial", 0, [1], gaps=gaps), run("serial", 1, [1], gaps=late)])["a"]
    assert (found.p50, found.p99, found.greatest, found.count) == (1.0, 5.0, 9.0, 100)


def test_rows_of_one_suite_are_compared_across_its_daemons() -> None:
    rows = [
        run("serial", 0, [100, 100], daemon="pair", group="a", suite="s", baseline="pair serial@a"),
        run("overlap", 0, [100, 10], daemon="stock", group="a", suite="s", baseline="pair serial@a"),
        run("serial", 0, [100, 100], daemon="pair", group="a", suite="another"),
    ]
    sets = comparable(rows)
    assert [list(measured(some)) for some in sets] == [["pair serial@a", "stock overlap@a"], ["pair serial@a"]]
    assert "| stock overlap@a | 1 | 1 | 110 | 110 | 110 | 45.0 % | pair serial@a |" in render(rows[:2], [])


def test_devices_that_a_chain_used_are_counted_by_engine() -> None:
    engines = [{"group": "a", "devices": ["cuda:0", "cuda:1"]}, {"group": "b", "devices": ["cuda:2"]}]
    made = {"engines": engines}
    assert devices_used([run("serial", 0, [1, 1], provenance=made)]) == 2
    assert devices_used([run("ping-pong", 0, [1, 1], provenance=made)]) == 3
