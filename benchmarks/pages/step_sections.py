"""What mixed steps take, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from mixed_figures import DeviceTime, StepTime, by_context, device_times, kernels_alone, over_decode, setups
from pages.engine_sections import source
from pages.markdown import NOTHING, number, opened, ratio, table
from pages.rows import Results, rows


def mixed_steps(results: Results) -> list[str]:
    """Steps by context and appended tokens; the same over a step without appends and over the kernels alone."""
    if not results.steps:
        return []
    lone = [one.alone for one in rows(results.lone)]
    lines = opened(
        "The mixed step: a decode beside appended tokens",
        "One answer decodes behind a context; beside it so many tokens are appended behind the same context in each "
        "step. Median ms of a step; in brackets, ÷ the step without appends at that context. *Alone* is the model's "
        "matrix products and its attention for as many rows, each timed by itself at the split of keys that takes "
        f"least. {source([*results.steps, *results.lone])}",
    )
    for setup, times in setups(rows(results.steps)).items():
        contexts = by_context(times)
        counts = sorted({time.tokens for time in times})
        lines += [f"Setup: {setup}.", ""]
        lines += table(
            ["context", *(f"+ {count}" for count in counts)],
            [[f"{context:,}", *_cells(some, counts)] for context, some in contexts.items()],
        )
        over = {at: _over_alone(some, counts, kernels_alone(lone, at)) for at, some in contexts.items()}
        body = [[f"{context:,}", *cells] for context, cells in over.items() if set(cells) != {NOTHING}]
        if body:
            lines += ["The same steps ÷ (matrices + attention alone):", ""]
            lines += table(["context", *(f"+ {count}" for count in counts)], body)
    if known := device_times(rows(results.profiles)):
        kinds = sorted({kind for one in known for kind in one.kernels_ms})
        lines += ["Where the device's time goes, by the profiler; ms a step, medians of the steps with appends:", ""]
        header = ["setup, context, appended", "steps", "from step to step", "busy", *kinds, "launches"]
        lines += table(header, [_device(one, kinds) for one in known])
    return lines


def _cells(times: Sequence[StepTime], counts: Sequence[int]) -> list[str]:
    known, over = {time.tokens: time for time in times}, over_decode(times)
    texts = []
    for count in counts:
        text = number(known[count].median_ms, 2) if count in known else NOTHING
        texts.append(f"{text} ({number(over[count], 2)})" if count in over else text)
    return texts


def _over_alone(times: Sequence[StepTime], counts: Sequence[int], alone: dict[int, float]) -> list[str]:
    known = {time.tokens: time.median_ms for time in times}
    return [
        ratio(known[count] / alone[count + 1]) if count in known and count + 1 in alone else NOTHING for count in counts
    ]


def _device(one: DeviceTime, kinds: Sequence[str]) -> list[str]:
    return [
        f"{one.setup}, {one.context:,}, {one.tokens}",
        str(one.steps),
        number(one.wall_ms, 2),
        number(one.busy_ms, 2),
        *(number(one.kernels_ms.get(kind), 2) for kind in kinds),
        number(one.launches),
    ]
