"""What the rows of `mixed_step.py` say, as Markdown. Pure: rows in, text out; the numbers are of `mixed_figures.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lone_kernels import LoneKernel
from mixed_figures import DeviceTime, StepTime, by_context, device_times, kernels_alone, setups
from mixed_rows import LoneRow, MixedStep, Row, StepProfile
from pages.markdown import NOTHING, number, table


def render(rows: Iterable[Row]) -> str:
    """Steps by setup, kernels alone, profiles; each where there are some."""
    rows = list(rows)
    lone = [row.alone for row in rows if isinstance(row, LoneRow)]
    lines: list[str] = []
    for setup, times in setups(row for row in rows if isinstance(row, MixedStep)).items():
        lines += [f"## {setup}: median ms of a step, by context (down) and appended tokens (across)", ""]
        lines += _steps(times)
    if lone:
        lines += ["## Matrices + attention, each alone, ms by context (down) and rows (across)", "", *_alone(lone)]
    if known := device_times(row for row in rows if isinstance(row, StepProfile)):
        lines += ["## On the device, ms a step: medians of the steps with appends", "", *_device(known)]
    return "\n".join(lines)


def _steps(times: Sequence[StepTime]) -> list[str]:
    counts = sorted({time.tokens for time in times})
    body = []
    for context, some in by_context(times).items():
        known = {time.tokens: time.median_ms for time in some}
        body.append([str(context), *(number(known.get(count), 2) for count in counts)])
    return table(["context", *(f"+ {count}" for count in counts)], body)


def _alone(lone: Sequence[LoneKernel]) -> list[str]:
    contexts = sorted({kernel.context for kernel in lone if kernel.what == "attention"})
    found = {context: kernels_alone(lone, context) for context in contexts}
    counts = sorted({rows for some in found.values() for rows in some})
    body = [[str(context), *(number(some.get(rows), 2) for rows in counts)] for context, some in found.items()]
    return table(["context", *map(str, counts)], body)


def _device(times: Sequence[DeviceTime]) -> list[str]:
    kinds = sorted({kind for one in times for kind in one.kernels_ms})
    body = [
        [
            f"{one.setup}, {one.context}, {one.tokens}",
            *(number(value, 2) for value in (one.wall_ms, one.busy_ms)),
            *(number(one.kernels_ms[kind], 2) if kind in one.kernels_ms else NOTHING for kind in kinds),
            number(one.launches),
        ]
        for one in times
    ]
    return table(["setup, context, appended", "from step to step", "busy", *kinds, "launches"], body)
