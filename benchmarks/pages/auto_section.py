"""What `auto` chose and what was predicted, as Markdown."""

from __future__ import annotations

import statistics

from pages.auto import choices, median_error_percent, predictions
from pages.chain_sections import brief
from pages.chains import cells, latest
from pages.markdown import NOTHING, counted, number, percent, series, table
from pages.rows import Results, by_key, rows


def auto(results: Results) -> list[str]:
    """Chosen against best by cell, and how good the predictions were."""
    lines: list[str] = []
    if chosen := choices(latest(cells(results.runs))):
        lines += [
            (
                "*Chosen* is what auto took most often, *best* the fastest placement that ran by name on the same "
                "daemon. *Over best* compares the two by name; *over series* compares what auto took with the fastest "
                "series there. Medians, end to end."
            ),
            "",
        ]
        body = [
            [
                brief(one.measured.cell),
                f"{series(one.chosen)} ({counted(one.times, len(one.auto.found))})",
                one.best.name if one.best else NOTHING,
                number(one.auto.median_ms),
                number(one.best.median_ms) if one.best else NOTHING,
                percent(one.over_best_percent),
                percent(one.over_series_percent),
            ]
            for one in chosen
        ]
        header = ["P / output", "chosen", "best", "auto, ms", "best, ms", "over best", "over series"]
        lines += table(header, body, left=3)
    if predicted := predictions(rows(results.runs)):
        lines += [
            (
                "Every run whose end-to-end time the cost model predicted, whoever chose its placement. *Off* is the "
                "median of the error either way, *bias* the median of predicted over actual."
            ),
            "",
        ]
        groups = {"all": predicted} | by_key(predicted, lambda one: one.placement)
        body = [
            [
                series(name),
                str(len(some)),
                percent(median_error_percent(some)),
                percent(statistics.median(one.error_percent for one in some)),
                percent(max(abs(one.error_percent) for one in some)),
            ]
            for name, some in groups.items()
        ]
        lines += table(["placement", "runs", "off", "bias", "worst"], body)
    return ["### What auto chooses", "", *lines] if lines else []
