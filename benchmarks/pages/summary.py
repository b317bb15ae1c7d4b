"""What was to be reached, as single numbers from the results, each with the lines that it comes from. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from load_report import comparable, limit_ms, summaries
from load_rows import Round
from overhead import MODES, OverheadRun
from pages.auto import Choice, choices
from pages.chains import Measured, Placed, cells, latest
from pages.compared import Compared, compared
from pages.engine_sections import overhead_percent
from pages.machines import is_simulated, machine
from pages.rows import Found, Origin, Results, by_key, origins, rows

OUTPUT = 256
P_4K, P_12K = 4096, 12288
_NO_GPU_RUN = "No file holds such runs on GPUs."


class Figure(msgspec.Struct, frozen=True, kw_only=True, rename={"origins": "from"}):
    """One number of the summary."""

    value: float | None
    origins: list[Origin] = []
    """All rows that went into it."""
    how: str
    """How it was computed, in a sentence."""
    missing: str = ""
    """Why there is none."""


class Aim(msgspec.Struct, frozen=True):
    """What a number should reach."""

    limit: float
    at_least: bool
    """Otherwise: at most."""

    def reached(self, value: float) -> bool:
        """Whether a value does."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self.limit:g}"


AIMS = {
    "ping_pong_hidden_4k": Aim(0.97, at_least=True),
    "ping_pong_hidden_12k": Aim(0.97, at_least=True),
    "one_gpu_saved_percent_12k": Aim(10, at_least=True),
    "one_gpu_over_stock_points_12k": Aim(3, at_least=True),
    "tp2_overlap_saved_percent_12k": Aim(7, at_least=True),
    "eight_chains_saved_percent_4k": Aim(12, at_least=True),
    "eight_chains_saved_percent_12k": Aim(15, at_least=True),
    "warm_worst_percent": Aim(1, at_least=False),
    "auto_within_3_percent": Aim(95, at_least=True),
    "daemon_overhead_percent": Aim(1, at_least=False),
}


def summarize(results: Results) -> dict[str, Figure]:
    """All numbers, in the order of `AIMS`."""
    measured = latest([one for one in cells(results.runs) if not one.cell.simulated])
    chosen = [one for one in choices(measured) if one.predicted]
    chosen = [one for one in chosen if one.measured.cell.machine.gpus] or chosen
    figures = {
        "ping_pong_hidden_4k": ping_pong_hidden(measured, P_4K),
        "ping_pong_hidden_12k": ping_pong_hidden(measured, P_12K),
        "one_gpu_saved_percent_12k": one_gpu_saved(measured, P_12K),
        "one_gpu_over_stock_points_12k": one_gpu_over_stock(measured, P_12K),
        "tp2_overlap_saved_percent_12k": tp2_saved(measured, P_12K),
        "eight_chains_saved_percent_4k": eight_chains_saved(results.rounds, P_4K),
        "eight_chains_saved_percent_12k": eight_chains_saved(results.rounds, P_12K),
        "warm_worst_percent": warm_worst(chosen),
        "auto_within_3_percent": auto_within(chosen),
        "daemon_overhead_percent": daemon_overhead(results.overhead),
    }
    return {name: figures[name] for name in AIMS}


def main_cell(measured: Iterable[Measured], prefix: int) -> list[Measured]:
    """Cells on GPUs of plain chains of this prefix and an output of 256, cold, sampled greedily; the latest last."""
    found = [
        one
        for one in measured
        if one.cell.machine.gpus
        and (one.cell.prefix, one.cell.output, one.cell.cache) == (prefix, OUTPUT, "cold")
        and not one.cell.kind
        and len(one.cell.outputs) > 1
        and one.cell.sampling == "greedy"
    ]
    return sorted(found, key=lambda one: one.date)


def _latest(measured: Iterable[Measured], prefix: int, fits: Callable[[Placed], bool]) -> list[Compared]:
    """Of the latest main cell in which a placement fits and is held against series, those placements."""
    for one in reversed(main_cell(measured, prefix)):
        fitting = [found for found in _against_series(one) if fits(found.placed)]
        if fitting:
            return fitting
    return []


def _against_series(measured: Measured) -> list[Compared]:
    return [
        found
        for found in compared(measured)
        if found.baseline is not None and found.baseline.mode == "serial" and _plain(found.placed)
    ]


def _plain(placed: Placed) -> bool:
    return placed.level == "fast" and placed.session == "default" and placed.append_tokens is None


def _rows_of(*placed: Placed | None) -> list[Origin]:
    return origins(found for one in placed if one is not None for found in one.found)


def ping_pong_hidden(measured: Iterable[Measured], prefix: int) -> Figure:
    """Hidden ÷ hideable TTFT of ping-pong over two GPUs."""
    how = (
        f"Ping-pong at P {prefix}, output {OUTPUT}, cold, exactness fast: of the downstream agents' TTFT in series "
        "less a decode step each, the share that is gone; each run against the serial run of its index, the median."
    )
    found = _latest(
        measured, prefix, lambda placed: placed.mode == "ping-pong" and (placed.groups, placed.devices) == (2, 2)
    )
    known = [one for one in found if one.hidden is not None]
    if not known:
        return Figure(value=None, how=how, missing=_NO_GPU_RUN)
    first = known[0]
    return Figure(value=round(first.hidden or 0.0, 4), origins=_rows_of(first.placed, first.baseline), how=how)


def _overlap(placed: Placed, devices: int) -> bool:
    return placed.mode == "overlap" and placed.groups == 1 and placed.devices == devices


def _saved(found: Sequence[Compared], how: str) -> Figure:
    """The median over placements that are alike, such as overlap on one GPU and on the other."""
    value = statistics.median(one.saved_percent or 0.0 for one in found)
    return Figure(
        value=round(value, 2),
        origins=sorted({origin for one in found for origin in _rows_of(one.placed, one.baseline)}),
        how=how,
    )


def one_gpu_saved(measured: Iterable[Measured], prefix: int) -> Figure:
    """Overlap on one GPU under our scheduler against series on the same GPU."""
    how = (
        f"Overlap in one engine on one GPU at P {prefix}, output {OUTPUT}, cold: median end to end against the median "
        "of series on that GPU; the median over the GPUs where it ran on more than one."
    )
    found = _latest(measured, prefix, lambda placed: _overlap(placed, 1) and placed.decode_first is True)
    return _saved(found, how) if found else Figure(value=None, how=how, missing=_NO_GPU_RUN)


def one_gpu_over_stock(measured: Sequence[Measured], prefix: int) -> Figure:
    """What overlap saves under our scheduler less what it saves under vLLM's own with its flags."""
    how = (
        f"Percent saved by overlap on one GPU at P {prefix}, output {OUTPUT}, cold, under our scheduler, less the most "
        "that it saves under vLLM's own scheduler with its flags in the same suite; each against the series that its "
        "row names, on the same GPU."
    )
    for one in reversed(main_cell(measured, prefix)):
        found = [some for some in _against_series(one) if _overlap(some.placed, 1)]
        ours = [some for some in found if some.placed.decode_first is True]
        stock = [some for some in found if some.placed.decode_first is False]
        if ours and stock:
            best = max(stock, key=lambda some: some.saved_percent or 0.0)
            value = statistics.median(some.saved_percent or 0.0 for some in ours) - (best.saved_percent or 0.0)
            used = [some for pair in (*ours, best) for some in (pair.placed, pair.baseline)]
            return Figure(value=round(value, 2), origins=_rows_of(*used), how=how)
    return Figure(value=None, how=how, missing="No suite holds overlap under both schedulers on one GPU.")


def tp2_saved(measured: Iterable[Measured], prefix: int) -> Figure:
    """Overlap in one tensor-parallel engine over two GPUs against series in the same."""
    how = (
        f"Overlap in one tensor-parallel engine over two GPUs at P {prefix}, output {OUTPUT}, cold: median end to end "
        "against the median of series in that engine."
    )
    found = _latest(measured, prefix, lambda placed: _overlap(placed, 2) and placed.decode_first is True)
    return _saved(found, how) if found else Figure(value=None, how=how, missing=_NO_GPU_RUN)


def eight_chains_saved(found: Sequence[Found[Round]], prefix: int) -> Figure:
    """Eight chains at once, placed by `auto`, against two stock engines that take chains in turn."""
    how = (
        f"Eight chains at once at P {prefix}, output {OUTPUT}, cold, on two GPUs: mean end to end under auto against "
        "that of two engines with vLLM's own scheduler behind round-robin, each chain in series; median of the rounds "
        "in which all chains finished."
    )
    fitting = [
        one
        for one in found
        if one.row.load.at_once == 8
        and (one.row.shape.prefix, one.row.shape.output, one.row.cache) == (prefix, OUTPUT, "cold")
        and machine(one.row.provenance).gpus
        and not is_simulated(one.row.provenance)
        and _devices(one.row) == 2
    ]
    for rounds in reversed(comparable(rows(fitting))):
        sides = summaries(rounds, None, limit_ms(rounds, None, 2.0))
        ours = next((side for side in sides if side.how == "auto" and side.saved), None)
        if sides[0].how != "round-robin" or sides[0].decode_first or ours is None:
            continue
        used = [one for one in fitting if one.row in rounds and one.row.side in (sides[0].side, ours.side)]
        return Figure(value=round(statistics.median(ours.saved), 2), origins=origins(used), how=how)
    return Figure(value=None, how=how, missing="No file holds such rounds, in which all chains finished.")


def _devices(one: Round) -> int:
    return len({device for engine in one.provenance.get("engines", ()) for device in engine.get("devices", ())})


def warm_worst(chosen: Sequence[Choice]) -> Figure:
    """How much slower than series what `auto` picked was, where caches were warm, at worst."""
    how = (
        "Cells with warm caches, real engines, on GPUs where that was measured: median end to end of auto over that of "
        "the fastest series on its daemon, in percent more; the worst of them, below 0 where auto was faster in all."
    )
    warm = [one for one in chosen if one.cache == "warm" and one.over_series_percent is not None]
    if not warm:
        return Figure(
            value=None, how=how, missing="No file holds auto, by the cost model, beside series with warm caches."
        )
    worst = max(warm, key=lambda one: one.over_series_percent or 0.0)
    return Figure(value=round(worst.over_series_percent or 0.0, 2), origins=worst.origins, how=how)


def auto_within(chosen: Sequence[Choice]) -> Figure:
    """In how many cells `auto` picked the fastest placement or one within 3 %."""
    how = (
        "Percent of the cells, real engines, on GPUs where that was measured, in which the placement that auto picked "
        "most often took, when asked for by name, at most 1.03 times the median of the daemon's fastest placement; of "
        "cells in which several modes ran by name."
    )
    judged = [one for one in chosen if one.over_best_percent is not None]
    if not judged:
        return Figure(
            value=None,
            how=how,
            missing="No file holds auto, by the cost model, beside the placements that it chose from.",
        )
    good = sum((one.over_best_percent or 0.0) <= 3 for one in judged)
    used = sorted({origin for one in judged for origin in one.origins})
    return Figure(value=round(100 * good / len(judged), 1), origins=used, how=f"{how} {good} of {len(judged)} cells.")


def daemon_overhead(found: Sequence[Found[OverheadRun]]) -> Figure:
    """What the daemon costs over bare vLLM."""
    how = (
        "The same chain through the daemon and on bare vLLM, taking turns: by how many percent the daemon takes "
        "longer, the median of pairs; of series and ping-pong the worse one, on GPUs where that was measured."
    )
    values: list[tuple[bool, str, float, list[Found[OverheadRun]]]] = []
    for (file, gpus, _, mode), some in by_key(
        found, lambda one: (one.origin.file, bool(machine(one.row.provenance).gpus), one.row.profile, one.row.mode)
    ).items():
        bare, daemon = ([run for run in rows(some) if run.system == system] for system in ("bare", "daemon"))
        if bare and daemon and mode in MODES:
            values.append((gpus, file, overhead_percent(bare, daemon), some))
    if not values:
        return Figure(value=None, how=how, missing="No file holds pairs of such runs.")
    kind = max(gpus for gpus, *_ in values)
    _, _, value, used = max((one for one in values if one[0] == kind), key=lambda one: one[2])
    return Figure(value=round(value, 2), origins=origins(used), how=how)
