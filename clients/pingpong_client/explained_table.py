"""What placements of a chain should take, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from pingpong_bus.messages import Advice, Explained, Prediction
from pingpong_client.table import clean, clip_middle, format_table, milliseconds

LINE_CELLS = 80
"""Of output that is piped."""
MOST_ROWS = 20
"""A daemon of many groups has as many placements; the least are shown, and the one that is taken."""
_GROUPS_CELLS = 17
"""What is left of 80 for names of groups; two of them tell a row apart."""
_SHORTEST_NAME = 5

_STEPS_LEGEND = "E2E: prefill that nothing hides, decode, steps and wait; hidden: prefill beside decodes"
_UNKNOWN_LEGEND = "steps: a guess, for one that has not run since the daemon's start"
_LEGEND = (
    "E2E: prefill that nothing hides, decode and wait; hidden: prefill beside decodes",
    "factor: actual over predicted of chains like this; times are multiplied by it",
)


def explained_lines(explained: Explained, width: int | None = None) -> list[str]:
    """Predictions, the choice and why, then the advice.

    Args:
        width: cells that a line may take; None: 80.
    """
    cells = width or LINE_CELLS
    lines = list(_prediction_lines(explained, cells)) if explained.predictions else []
    lines += ["", *_wrapped(_choice(explained), cells)]
    if explained.advice:
        lines += ["", "Advice:"]
        lines += [line for advice in explained.advice for line in _wrapped(_words(advice), cells, bullet="- ")]
    return lines if explained.predictions else lines[1:]


def _prediction_lines(explained: Explained, width: int) -> Iterable[str]:
    chosen = explained.chosen
    shown = [
        prediction for rank, prediction in enumerate(explained.predictions) if rank < MOST_ROWS or prediction == chosen
    ]
    if chosen is not None and chosen not in shown:
        shown.append(chosen)
    shown.sort(key=lambda prediction: prediction.e2e_ms)
    names, keys = _short_names([prediction.groups for prediction in shown], width - LINE_CELLS + _GROUPS_CELLS)
    steps = any(prediction.steps_ms for prediction in shown)  # else the column is not worth its cells
    times = ["E2E ms", "prefill", "decode", *(["steps"] if steps else []), "wait", "hidden", "factor"]
    headers = ["", "placement", "groups", *times]
    rows = [_row(prediction, names, taken=prediction == chosen, steps=steps) for prediction in shown]
    yield from format_table(headers, rows, right=range(3, len(headers)), width=width)
    yield from keys
    if left := sum(prediction not in shown for prediction in explained.predictions):
        yield f"and {left:,} more, which take longer; --json has them all"
    yield _STEPS_LEGEND if steps else _LEGEND[0]
    if any(prediction.unknown_steps for prediction in shown):
        yield _UNKNOWN_LEGEND
    yield _LEGEND[1]


def _row(prediction: Prediction, names: Mapping[str, str], *, taken: bool, steps: bool) -> list[str]:
    times = (
        prediction.e2e_ms,
        prediction.prefill_ms,
        prediction.decode_ms,
        *((prediction.steps_ms,) if steps else ()),
        prediction.wait_ms,
        prediction.hidden_ms,
    )
    return [
        "*" if taken else "",
        prediction.placement,
        _group_names([names[group] for group in prediction.groups if group]),
        *(milliseconds(time) if time else "-" for time in times),
        f"{prediction.factor:.2f}",
    ]


def _group_names(groups: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(group for group in groups if group))


def _short_names(rows: Sequence[Sequence[str]], room: int) -> tuple[dict[str, str], list[str]]:
    """What groups are called in a column of so many cells, so that two of a row fit; and lines that explain it.

    Names are cut in the middle, or numbered where the cut ones could not be told apart.
    """
    names = list(dict.fromkeys(name for groups in rows for name in groups if name))
    for cells in range(max([_SHORTEST_NAME, *map(len, names)]), _SHORTEST_NAME - 1, -1):
        short = {name: clip_middle(name, cells) for name in names}
        told_apart = len(set(short.values())) == len(names)
        if told_apart and all(
            len(_group_names([short[name] for name in groups if name][:2])) <= room for groups in rows
        ):
            return short, []
    numbers = {name: f"#{at}" for at, name in enumerate(names, start=1)}
    return numbers, [f"{number}: {name}" for name, number in numbers.items()]


def _choice(explained: Explained) -> str:
    if explained.chosen is not None:
        chosen = explained.chosen
        return f"* {chosen.placement} on {_group_names(chosen.groups)} would be taken: {explained.why}."
    if explained.predictions:
        return f"{explained.placement} would be taken: {explained.why}."
    return (
        "No times are known: the engines were not measured, or the chain is too large. By rule of thumb, "
        f"{explained.placement} would be taken: {explained.why}."
    )


def _words(advice: Advice) -> str:
    if advice.saves_ms is None:
        return advice.text
    return f"{advice.text} That should take about {milliseconds(advice.saves_ms)} ms off the least."


def _wrapped(text: str, width: int, *, bullet: str = "") -> list[str]:
    return textwrap.wrap(
        clean(text, lines=False),
        width,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
