"""The page of benchmark results: that the committed one is up to date, and its figures on rows that are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from load_rows import ChainRow, Load, Round, Shape
from overhead import OverheadRun
from page import differences, write
from pages.auto import choices, median_error_percent, predictions
from pages.chains import cells, latest
from pages.compared import compared
from pages.document import PAGE, SUMMARY, document
from pages.markdown import number, percent, table
from pages.rows import Origin, Results, read_results, rows
from pages.style import save
from pages.summary import AIMS, Figure, summarize
from pingpong_bus.errors import DataError
from pingpong_bus.messages import AgentResult, ChainResult
from runs import Run, append_line

ROOT = Path(__file__).parents[2]
STEP_MS = 10.0
H200 = "NVIDIA H200, 143771 MiB, 580"
GPUS = {"cpu": "x", "usable_cores": 32, "gpus": [H200, H200]}
CPUS = {"cpu": "x", "usable_cores": 2, "gpus": []}
ENGINES = {
    "pair": [("gpu0", ["cuda:0"], True), ("gpu1", ["cuda:1"], True)],
    "capped": [("gpu0", ["cuda:0"], False)],
    "tp2": [("tp2", ["cuda:0", "cuda:1"], True)],
}


def made_with(daemon: str = "pair", date: str = "2030-01-01", machine: dict[str, Any] = GPUS) -> dict[str, Any]:
    engines = [
        {"group": group, "devices": devices, "decode_first": ours, "engine": "vllm 1", "model": "/m/q", "dtype": "bf"}
        for group, devices, ours in ENGINES[daemon]
    ]
    return {"machine": machine, "commit": "c" * 40, "date": date, "engines": engines}


def run(row: str, index: int, e2e_ms: float, ttft_ms: float, **changes: Any) -> Run:
    """A run of "DAEMON MODE" or "DAEMON MODE@GROUP", of two agents that write 256 tokens each."""
    daemon, _, way = row.partition(" ")
    mode, _, group = way.partition("@")
    groups = [group] if group else [name for name, _, _ in ENGINES[daemon]]
    agents = [
        AgentResult(
            name=f"a{at}",
            state="finished",
            output_ids=[7],
            output_tokens=256,
            ttft_ms=1000.0 if at == 0 else ttft_ms,
            total_ms=ttft_ms + 255 * STEP_MS if at else 1000.0 + 255 * STEP_MS,
            worker=groups[0 if mode == "serial" else at % len(groups)],
        )
        for at in range(2)
    ]
    placement = changes.pop("placement", None if mode == "presend" else mode)
    predicted_ms = changes.pop("predicted_ms", None)
    result = ChainResult(
        id="c", name="c", state="finished", agents=agents, placement=placement, predicted_ms=predicted_ms
    )
    usual = {
        "profile": "gpu-12k",
        "baseline": row if mode == "serial" else "tp2 serial" if daemon == "tp2" else "pair serial@gpu0",
        "suite": "s",
        "cache": "cold",
        "provenance": made_with(daemon),
    }
    fields = usual | changes
    return Run(
        mode=mode,  # type: ignore[arg-type]
        group=group,
        daemon=daemon,
        index=index,
        e2e_ms=e2e_ms,
        wall_ms=e2e_ms,
        result=result,
        max_tokens=[256, 256],
        **fields,
    )


COLD = [
    *(run("pair serial@gpu0", index, 10_000, 1000) for index in range(2)),
    *(run("pair serial@gpu1", index, 10_400, 1000) for index in range(2)),
    *(run("pair ping-pong", index, 8_000, 40) for index in range(2)),
    *(run("pair overlap@gpu0", index, 8_900, 30) for index in range(2)),
    *(run("capped overlap@gpu0", index, 9_400, 30) for index in range(2)),
    run("tp2 serial", 0, 7_000, 1000),
    run("tp2 overlap", 0, 6_300, 30),
    run("pair auto", 0, 8_100, 40, placement="ping-pong", predicted_ms=8_262),
]
WARM = [
    run("pair serial@gpu0", 0, 7_000, 20, cache="warm"),
    run("pair ping-pong", 0, 6_700, 20, cache="warm"),
    run("pair auto", 0, 7_140, 20, cache="warm", placement="serial", predicted_ms=7_000),
]


def round_of(side: str, how: str, index: int, mean_ms: float, *, ours: bool) -> Round:
    chains = [ChainRow(due_ms=0, submitted_ms=0, e2e_ms=mean_ms + at, output_tokens=512) for at in (-100, 100)]
    return Round(
        side=side,
        how=how,  # type: ignore[arg-type]
        decode_first=ours,
        groups=["gpu0", "gpu1"],
        index=index,
        load=Load(at_once=8),
        shape=Shape(prefix=4096, output=256, last_output=64, agents=5),
        cache="cold",
        exactness="fast",
        seed=0,
        unloaded_ms=10_000,
        makespan_ms=mean_ms + 100,
        chains=chains,
        gaps={},
        provenance=made_with(),
    )


ROUNDS = [
    round_of("stock", "round-robin", 0, 20_000, ours=False),
    round_of("ours", "auto", 0, 17_000, ours=True),
    round_of("stock", "round-robin", 1, 20_000, ours=False),
    round_of("ours", "auto", 1, 16_000, ours=True),
]


def overhead(system: str, index: int, e2e_ms: float, machine: dict[str, Any]) -> OverheadRun:
    return OverheadRun(
        system=system,  # type: ignore[arg-type]
        mode="serial",
        profile="cpu",
        index=index,
        e2e_ms=e2e_ms,
        ttft_ms=[1.0, 1.0],
        outputs=[[1]],
        idle_share=0.0,
        provenance=made_with(machine=machine),
    )


OVERHEAD = [
    overhead("bare", 0, 1000, CPUS),
    overhead("daemon", 0, 1050, CPUS),
    overhead("bare", 0, 1000, GPUS),
    overhead("daemon", 0, 1008, GPUS),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    return tmp_path


def results_of(root: Path, **files: Sequence[msgspec.Struct]) -> Results:
    """Keep rows in files of these names, and read them again."""
    for name, some in files.items():
        for row in some:
            append_line(root / "benchmarks" / "results" / f"{name}.jsonl", row)
    return read_results(root / "benchmarks" / "results", root)


def lines(figure: Figure) -> list[tuple[str, int]]:
    return [(Path(origin.file).stem, origin.line) for origin in figure.origins]


def test_the_page_is_what_the_results_say() -> None:
    made = document(read_results(ROOT / "benchmarks" / "results", ROOT))
    assert differences(made, ROOT) == [], "run `python benchmarks/page.py`"


def test_every_figure_comes_from_its_rows(root: Path) -> None:
    found = summarize(results_of(root, chains=[*COLD, *WARM], load=ROUNDS, cost=OVERHEAD))
    assert list(found) == list(AIMS)
    # Of 1000 ms all but a step of 10 could be hidden; of 1000, 960 are.
    assert found["ping_pong_hidden_12k"].value == pytest.approx(960 / 990, abs=1e-4)
    assert lines(found["ping_pong_hidden_12k"]) == [("chains", line) for line in (1, 2, 5, 6)]
    assert found["one_gpu_saved_percent_12k"].value == pytest.approx(11.0)
    assert lines(found["one_gpu_saved_percent_12k"]) == [("chains", line) for line in (1, 2, 7, 8)]
    assert found["one_gpu_over_stock_points_12k"].value == pytest.approx(11.0 - 6.0)
    assert found["tp2_overlap_saved_percent_12k"].value == pytest.approx(10.0)
    assert lines(found["tp2_overlap_saved_percent_12k"]) == [("chains", 11), ("chains", 12)]
    assert found["eight_chains_saved_percent_4k"].value == pytest.approx((15 + 20) / 2)
    assert lines(found["eight_chains_saved_percent_4k"]) == [("load", line) for line in (1, 2, 3, 4)]
    assert found["eight_chains_saved_percent_12k"].value is None
    # Warm, auto took 2 % longer than series, and ping-pong would have been 4 % faster.
    assert found["warm_worst_percent"].value == pytest.approx(2.0)
    assert found["auto_within_3_percent"].value == 50.0
    assert found["daemon_overhead_percent"].value == pytest.approx(0.8)
    assert lines(found["daemon_overhead_percent"]) == [("cost", 3), ("cost", 4)]


def test_what_no_row_says_is_null_with_the_reason(root: Path) -> None:
    found = summarize(
        results_of(root, chains=[run("pair serial@gpu0", 0, 1, 1), run("pair serial@gpu0", -1, 1, 1, warmup=True)])
    )
    assert all(figure.value is None and figure.missing and figure.how for figure in found.values())
    made = document(results_of(root))
    parsed = json.loads(made.texts[SUMMARY])
    assert parsed["ping_pong_hidden_4k"]["from"] == []
    assert parsed["ping_pong_hidden_4k"]["missing"]


def test_a_placement_is_held_to_its_own_baseline_and_to_as_many_devices(root: Path) -> None:
    (measured,) = cells(results_of(root, chains=COLD).runs)
    found = {one.placed.row: one for one in compared(measured)}
    ping_pong = found["pair ping-pong"]
    assert ping_pong.baseline is not None
    assert ping_pong.iso is not None
    assert (ping_pong.baseline.row, ping_pong.iso.row) == ("pair serial@gpu0", "tp2 serial")
    assert ping_pong.saved_percent == pytest.approx(20.0)
    assert ping_pong.iso_saved_percent == pytest.approx(100 * (1 - 8 / 7))
    assert found["tp2 overlap"].iso is None
    assert found["pair serial@gpu1"].baseline is None
    assert ping_pong.steps_by_group == {"gpu0": STEP_MS, "gpu1": STEP_MS}


def test_a_cell_that_was_measured_again_with_all_its_placements_is_shown_once(root: Path) -> None:
    later = [msgspec.structs.replace(one, suite="t", provenance=made_with(one.daemon, "2031-01-01")) for one in COLD]
    measured = cells(results_of(root, first=COLD, second=later).runs)
    assert [one.cell.suite for one in latest(measured)] == ["t"]
    measured = cells(results_of(root, first=[run("pair presend", 0, 8_200, 50)]).runs)
    assert sorted(one.cell.suite for one in latest(measured)) == ["s", "t"], "the later one lacks presend"


def test_a_later_overlap_is_another_where_its_scheduler_or_its_devices_are(root: Path) -> None:
    later = [
        msgspec.structs.replace(one, suite="t", provenance=made_with(one.daemon, "2031-01-01"))
        for one in COLD
        if one.daemon == "pair"
    ]
    measured = cells(results_of(root, first=COLD, second=later).runs)
    assert [one.cell.suite for one in latest(measured)] == ["s", "t"]


def test_auto_is_judged_by_placements_of_its_own_daemon(root: Path) -> None:
    runs = results_of(root, chains=[*COLD, *WARM]).runs
    cold, warm = choices(cells(runs))
    assert (cold.chosen, cold.over_best_percent) == ("ping-pong", 0.0)
    assert cold.over_series_percent == pytest.approx(-19.0)
    assert warm.best is not None
    assert (warm.chosen, warm.best.row) == ("serial", "pair ping-pong")
    predicted = predictions(rows(runs))
    assert [one.placement for one in predicted] == ["ping-pong", "serial"]
    assert median_error_percent(predicted) == pytest.approx((2.0 + 100 * (1 - 7000 / 7140)) / 2)


def on_group(one: Run, group: str) -> Run:
    agents = [msgspec.structs.replace(agent, worker=group) for agent in one.result.agents]
    return msgspec.structs.replace(one, result=msgspec.structs.replace(one.result, agents=agents))


def test_auto_is_judged_by_the_group_that_it_took_and_only_where_it_had_a_choice(root: Path) -> None:
    slow = on_group(run("pair auto", 0, 10_000, 1000, placement="serial", predicted_ms=1), "gpu1")
    series = [run("pair serial@gpu0", 0, 10_000, 1000), run("pair serial@gpu1", 0, 10_500, 1000)]
    (chosen,) = choices(cells(results_of(root, chains=[*series, run("pair ping-pong", 0, 11_000, 40), slow]).runs))
    assert chosen.over_best_percent == pytest.approx(5.0)
    (alone,) = choices(cells(results_of(root, other=[*series, slow]).runs)[1:])
    assert alone.over_best_percent is None


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"profile": "p", "mode": "serial", "cache": "cold", "result": {}}'])
def test_a_line_that_cannot_be_read_is_named(root: Path, line: bytes) -> None:
    (root / "benchmarks" / "results" / "odd.jsonl").write_bytes(b'{"benchmark": "another"}\n\n' + line)
    with pytest.raises(DataError, match=r"results/odd\.jsonl, line 3"):
        results_of(root)


def test_everything_is_written_once_and_found_unchanged(root: Path) -> None:
    made = document(results_of(root, chains=[*COLD, *WARM], load=ROUNDS))
    assert [Path(name).stem for name in made.pictures] == ["saved-h200-x2", "many-chains-h200-x2", "predicted-h200-x2"]
    assert differences(made, root)
    write(made, root)
    assert differences(made, root) == []
    text = made.texts[PAGE]
    assert "| pair overlap@gpu0 | pair series@gpu0 | 1 | 2 | 8,900 | 8,900 | 8,900 | 8,900 | 11.0 %" in text
    name, draw = next(iter(made.pictures.items()))
    save(draw(), root / "again.svg")
    assert (root / "again.svg").read_bytes() == (root / name).read_bytes()
    (root / PAGE).write_text(text + "by hand\n")
    (root / name).unlink()
    assert differences(made, root) == [f"{PAGE} is not what the results say", f"{name} is missing"]


def step_rows() -> list[dict[str, Any]]:
    """Mixed steps, their kernels alone and a profile, as JSON documents."""
    made = {"provenance": made_with()}
    alone = [{"what": "matrices", "rows": 32, "ms": 7.0}]
    alone += [
        {"what": "attention", "rows": 32, "context": 2048, "splits": splits, "ms": 1.0 + splits} for splits in (0, 4)
    ]
    sizes = [(0, [8.0, 8.0, 9.0]), (31, [8.8, 8.8, 8.8])]
    steps = [
        {"wall": wall, "busy": wall - 1, "kernels": {"matrices": 6.0}, "launches": 9} for wall in (8.0, 10.0, 10.4)
    ]
    return [
        *({"alone": one} | made for one in alone),
        *({"setup": "s", "context": 2048, "tokens": n, "gaps_ms": gaps, "append_ms": 1.0} | made for n, gaps in sizes),
        {"setup": "s", "context": 2048, "tokens": 31, "steps": steps, "top": []} | made,
    ]


def finalize_rows() -> list[dict[str, Any]]:
    usual = {
        "session": None,
        "prefix": 4096,
        "gave_up": False,
        "ttft_ms": 12.0,
        "step_ms": 8.0,
        "provenance": made_with(),
    }
    stages = [{"bell": 1.0, "hash": 2.0, "compute": 9.0}, {"bell": 1.0, "queue": 1.0, "compute": 10.0}]
    return [{"mode": "ping-pong", "index": index, "stages": some} | usual for index, some in enumerate(stages)]


def test_steps_and_stages_are_shown_with_what_they_are_held_against(root: Path) -> None:
    lines = [json.dumps(row) for row in (*step_rows(), *finalize_rows())]
    (root / "benchmarks" / "results" / "engine.jsonl").write_text("\n".join(lines))
    made = document(results_of(root))
    text = made.texts[PAGE]
    assert "| 2,048 | 8.00 | 8.80 (1.10) |" in text
    assert "| 2,048 | \N{EN DASH} | 1.100 |" in text, "8.8 over matrices and attention at its best split"
    assert "| s, 2,048, 31 | 2 | 10.20 | 9.20 | 6.00 | 9 |" in text, "the step without appends is left out"
    assert "| ping-pong, default, P 4,096 | 2 | 0 | 12.00 | 12.00 | 8.00 | 1.50 |" in text
    stages = [line.split(" | ")[0] for line in text.partition("| stages, ms")[2].splitlines()[2:6]]
    assert stages == ["| bell", "| queue", "| hash", "| compute"]
    assert [Path(name).stem for name in made.pictures] == ["mixed-step-h200-x2", "finalize-h200-x2"]
    write(made, root)
    assert differences(made, root) == []


def test_numbers_are_written_plainly() -> None:
    assert (number(-1234.56, 1), number(-0.04, 1), number(None)) == ("\N{MINUS SIGN}1,234.6", "0.0", "\N{EN DASH}")
    assert percent(12.34) == "12.3 %"
    assert table(["a", "b"], [["x", "1"]]) == ["| a | b |", "| --- | --: |", "| x | 1 |", ""]
    assert Origin("a", 2) < Origin("b", 1)
