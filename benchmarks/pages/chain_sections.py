"""Chains by cell and placement, as Markdown."""

from __future__ import annotations

from figures import inter_token
from pages.chains import Cell, Measured, cells, latest
from pages.compared import Compared, compared
from pages.markdown import NOTHING, counted, number, opened, percent, ratio, table
from pages.rows import Results


def chains(results: Results) -> list[str]:
    """One chain at a time: every cell with all of its placements."""
    found = latest(cells(results.runs))
    if not found:
        return []
    lines = opened(
        "One chain at a time",
        "*Saved* is the median against the median of the named baseline; *iso-GPU* is the same against the fastest "
        "series on as many devices. *Exact*: runs whose prompts and outputs equal the baseline's id by id; of a "
        "baseline, its own first run's. *Hidden* is hidden ÷ hideable TTFT and *TTFT* the mean of the agents that "
        "read others, medians of each beside it; *step* is what a token takes, by device group, *slowdown* the same ÷ "
        "that of the same agents in the baseline, and *ITL* the gaps between tokens as a reader of the stream sees "
        "them.",
    )
    for measured in found:
        lines += _cell(measured)
    return lines


def overlap_on_one_gpu(results: Results) -> list[str]:
    """Overlap in one engine on one device, under our scheduler and under vLLM's own with its flags."""
    body = [
        [
            brief(measured.cell),
            one.placed.name,
            "ours" if one.placed.decode_first else "vLLM's own",
            one.baseline.name if one.baseline else NOTHING,
            number(one.spread.median),
            percent(one.saved_percent),
            ratio(one.hidden),
            *_worst_gaps(one),
        ]
        for measured in latest(cells(results.runs))
        for one in compared(measured)
        if one.placed.mode == "overlap" and (one.placed.groups, one.placed.devices) == (1, 1)
    ]
    if not body:
        return []
    lines = opened(
        "Overlap in one engine on one device",
        "All agents in one engine; appends ride beside the decode, held to a budget by our scheduler, or by vLLM's own "
        "with `long_prefill_token_threshold`. *p99* and *max* are the gaps between tokens; *over series* is the p99 ÷ "
        "that of the baseline.",
    )
    header = ["P / output", "placement", "scheduler", "baseline", "median, ms", "saved", "hidden"]
    return lines + table([*header, "p99, ms", "max, ms", "over series"], body, left=4)


def _worst_gaps(one: Compared) -> list[str]:
    """p99 and max of the group with the worst p99, and that over the baseline's."""
    gap = max(one.gaps.values(), key=lambda gap: gap.p99, default=None)
    if gap is None:
        return [NOTHING] * 3
    before = max((gap.p99 for gap in inter_token(one.baseline.runs).values()), default=0.0) if one.baseline else 0.0
    return [number(gap.p99, 1), number(gap.greatest, 1), number(gap.p99 / before, 2) if before else NOTHING]


def tensor_parallel(results: Results) -> list[str]:
    """Engines over several devices: series and overlap in one, beside ping-pong on as many."""
    body = []
    for measured in latest(cells(results.runs)):
        if not any(one.placed.groups == 1 and one.placed.devices > 1 for one in compared(measured)):
            continue
        body += [
            [
                brief(measured.cell),
                one.placed.name,
                str(one.placed.devices),
                one.baseline.name if one.baseline else NOTHING,
                number(one.spread.median),
                percent(one.saved_percent),
                f"{percent(one.iso_saved_percent)} against {one.iso.name}" if one.iso else NOTHING,
            ]
            for one in compared(measured)
            if one.placed.devices > 1
        ]
    if not body:
        return []
    lines = opened(
        "The same devices as one tensor-parallel engine (iso-GPU)",
        "Every placement on more than one device. What ping-pong makes of two devices is to be held against what one "
        "tensor-parallel engine makes of the same two.",
    )
    header = ["P / output", "placement", "devices", "baseline", "median, ms", "saved", "iso-GPU"]
    return lines + table(header, body, left=4)


def title(cell: Cell) -> str:
    """A cell in words."""
    last = f", the last {cell.outputs[-1]:,}" if cell.outputs[-1] != cell.output else ""
    agents = f"{len(cell.outputs)} agents" if len(cell.outputs) > 1 else "1 agent"
    words = [f"P {cell.prefix:,}{_kind(cell)}, output {cell.output:,}{last}", agents, f"{cell.cache} cache"]
    words += [cell.dtype] if cell.dtype else []
    words += [cell.sampling] if cell.sampling != "greedy" else []
    return ", ".join(words)


def brief(cell: Cell) -> str:
    """The same for tables of many cells: P / output, and the state of the caches."""
    sampled = "" if cell.sampling == "greedy" else "sampled"
    words = [f"{cell.prefix:,}{_kind(cell)} / {cell.output:,}", cell.cache, cell.dtype, sampled]
    return ", ".join(filter(None, words))


def _kind(cell: Cell) -> str:
    return f" ({cell.kind})" if cell.kind else ""


def _cell(measured: Measured) -> list[str]:
    cell, found = measured.cell, compared(measured)
    where = f"{cell.model}, {cell.engine}; `{cell.file}`{f', suite {cell.suite}' if cell.suite else ''}"
    note = " **Simulated.**" if cell.simulated else ""
    lines = [f"#### {title(cell)}", "", f"{where}; commit {cell.commit}.{note}", ""]
    lines += table(
        ["end to end, ms", "baseline", "devices", "runs", "median", "mean", "min", "max", "saved", "iso-GPU", "exact"],
        [_times(one) for one in found],
        left=2,
    )
    lines += table(
        ["per agent, ms", "hidden", "TTFT", "by agent", "total by agent", "step", "slowdown", "ITL p50 / p99 / max"],
        [_inside(one) for one in found],
    )
    return lines


def _times(one: Compared) -> list[str]:
    spread = one.spread
    return [
        one.placed.name,
        one.baseline.name if one.baseline else NOTHING,
        str(one.placed.devices),
        str(len(one.placed.found)),
        *(number(value) for value in (spread.median, spread.mean, spread.least, spread.greatest)),
        percent(one.saved_percent),
        f"{percent(one.iso_saved_percent)} ({one.iso.name})" if one.iso else NOTHING,
        counted(one.exact.exact, one.exact.compared) if one.exact else NOTHING,
    ]


def _inside(one: Compared) -> list[str]:
    return [
        one.placed.name,
        ratio(one.hidden),
        number(one.downstream_ttft_ms, 1),
        " / ".join(number(ms) for ms in one.ttft_ms),
        " / ".join(number(ms) for ms in one.total_ms),
        _by_group({group: number(ms, 2) for group, ms in one.steps_by_group.items()}),
        _by_group({group: ratio(times) for group, times in one.slowdown.items()}),
        _by_group(
            {
                group: f"{number(gap.p50, 1)} / {number(gap.p99, 1)} / {number(gap.greatest, 1)}"
                for group, gap in one.gaps.items()
            }
        ),
    ]


def _by_group(cells: dict[str, str]) -> str:
    return ", ".join(f"{group} {text}" for group, text in cells.items()) or NOTHING
