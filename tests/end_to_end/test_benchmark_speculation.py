"""The benchmark of guesses: what its report says, and that a round is a fair one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pingpong_bus.chain import parse_chain
from pingpong_bus.errors import DataError
from speculation import EXAMPLES, SIDES, SpeculationRun, in_turn, renamed, render
from speculation_texts import INPUTS


def run(side: str, index: int, e2e_ms: float, steps: int, digest: str = "d") -> SpeculationRun:
    return SpeculationRun(
        chain="copying",
        side=side,  # type: ignore[arg-type]
        index=index,
        e2e_ms=e2e_ms,
        output_tokens=[100],
        decode_ms=[e2e_ms / 2],
        steps=[steps],
        drafted=[120 - steps],
        accepted=[100 - steps],
        digest=digest,
        provenance={},
    )


def test_the_report_compares_within_rounds_and_leaves_the_warm_up_out() -> None:
    runs = [
        run("plain", 0, 9000, 100),
        run("first", 0, 1, 100),
        *(run("plain", index, 1000 * index, 100) for index in (1, 2, 3)),
        *(run("first", index, 500 * index, 25, "d" if index < 3 else "other") for index in (1, 2, 3)),
    ]
    lines = render(runs).splitlines()
    assert len(lines) == 4
    first = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert first[:5] == ["copying", "first", "3", "1,000", "+50.0%"]
    assert first[6:] == ["4.00", "79% of 285", "2 of 3"]


def test_no_round_is_no_report() -> None:
    with pytest.raises(DataError, match="no whole round"):
        render([run("plain", 0, 1, 1), run("first", 1, 1, 1)])


def test_what_is_repeated_was_run_before_in_any_order() -> None:
    for index in range(4):
        order = in_turn(index)
        assert sorted(order) == sorted(SIDES)
        assert order.index("first") < order.index("same")
    assert in_turn(1)[-1] == "plain"


@pytest.mark.parametrize("name", ["copying", "not_copying"])
def test_the_examples_are_chains_with_inputs(name: str) -> None:
    path = EXAMPLES / f"{name}.json"
    chain = parse_chain(Path(path).read_bytes(), source=str(path))
    assert len(set(INPUTS[chain.name])) == len(INPUTS[chain.name]) > 5
    names = {renamed(chain, side, index).name for side in SIDES for index in (1, 2)}
    assert len(names) == 4, "plain and known keep theirs, first and same share one in each round"
