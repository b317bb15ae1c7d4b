"""The page's pictures of engines. Each function gives what draws one; None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from decode_first_report import draw
from lone_kernels import LoneKernel
from mixed_figures import StepTime, attention, by_context, kernels_alone, matrices, setups
from pages.finalizes import Account, accounts, largest
from pages.pictures import Drawing
from pages.rows import Results, by_key, rows
from pages.style import CYCLE, INK, MARKERS, dress, new_figure
from pages.views import GroupsRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def decode_first(results: Results) -> Drawing | None:
    """Finishing time and p99 gap over the target."""
    return partial(draw, rows(results.decode_first)) if results.decode_first else None


def mixed_steps(results: Results) -> Drawing | None:
    """Step times over appended tokens by context, one setup a panel, and the kernels alone beside them."""
    found = setups(rows(results.steps))
    return partial(_draw_mixed_steps, found, [one.alone for one in rows(results.lone)]) if found else None


Looks = dict[int, dict[str, Any]]
"""Of a line, by context."""


def _draw_mixed_steps(found: dict[str, list[StepTime]], lone: Sequence[LoneKernel]) -> Figure:
    from matplotlib.lines import Line2D

    columns = 2
    panels = len(found) + bool(lone)
    lines = -(-panels // columns)
    figure = new_figure(3.6 * lines + 0.4)
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid[panels:]:
        axes.set_visible(False)
    contexts = sorted({time.context for times in found.values() for time in times})
    looks: Looks = {
        context: {"color": CYCLE[at % len(CYCLE)], "marker": MARKERS[at % len(MARKERS)], "markersize": 4}
        for at, context in enumerate(contexts)
    }
    top = 1.08 * max(time.median_ms for times in found.values() for time in times)
    for axes, (setup, times) in zip(grid, found.items(), strict=False):
        _draw_setup(axes, times, lone, looks)
        axes.set_ylim(0, top)
        dress(axes, f"Step: {setup}", "appended tokens", "ms, median")
    handles, labels = grid[0].get_legend_handles_labels()
    if lone:
        _draw_alone(grid[len(found)], lone, looks)
        handles.append(Line2D([], [], color=INK, linestyle=":"))
        labels.append("matrices + attention, each alone")
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False, fontsize=9)
    return figure


def _draw_setup(axes: Axes, times: Sequence[StepTime], lone: Sequence[LoneKernel], looks: Looks) -> None:
    """Steps of one setup, and dotted their kernels alone."""
    for context, some in by_context(times).items():
        look: dict[str, Any] = {"linewidth": 1.3} | looks[context]
        tokens, medians = [time.tokens for time in some], [time.median_ms for time in some]
        axes.plot(tokens, medians, label=f"{context:,} of context", **look)
        alone = kernels_alone(lone, context)
        axes.plot([count - 1 for count in alone], list(alone.values()), linestyle=":", **look | {"marker": ""})


def _draw_alone(axes: Axes, lone: Sequence[LoneKernel], looks: Looks) -> None:
    products = matrices(lone)
    axes.plot(list(products), list(products.values()), color=INK, marker=".", label="matrices")
    for context, look in looks.items():
        heads = attention(lone, context)
        axes.plot(list(heads), list(heads.values()), linestyle="--", **look)
    axes.set_ylim(bottom=0)
    dress(axes, "Alone: matrices (black), attention by context (dashed)", "rows of the step", "ms, median")


def finalize(results: Results) -> Drawing | None:
    """Bars of the stages of a downstream agent's first token, and a decode step; without series, which prefills all."""
    found = [one for one in accounts(rows(results.finalizes)) if one.mode != "serial"]
    return partial(_draw_finalize, found) if found else None


def _draw_finalize(found: Sequence[Account]) -> Figure:
    names = largest(found, len(CYCLE) - 1)
    figure = new_figure(0.42 * len(found) + 1.5)
    axes = figure.subplots()
    for at, one in enumerate(found):
        shown = {name: one.stages_ms.get(name, 0.0) for name in names}
        shown["the rest"] = sum(one.stages_ms.values()) - sum(shown.values())
        left = 0.0
        for (name, ms), colour in zip(shown.items(), (*CYCLE[: len(names)], "#D9D9D9"), strict=True):
            label = name if at == 0 else None
            axes.barh(at, ms, left=left, height=0.62, color=colour, edgecolor="white", linewidth=0.6, label=label)
            left += ms
        axes.plot([one.step_ms] * 2, [at - 0.42, at + 0.42], color="black", linewidth=1.6)
        axes.annotate(
            f"{one.ratio:.2f} steps",
            (max(left, one.step_ms), at),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    dress(axes, "Stages, ms after the upstream's last token (black: one decode step)", "", "", grid="x")
    axes.set_yticks(range(len(found)), [one.name for one in found])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(found) - 0.45, -0.55)
    axes.margins(x=0.1)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def many_groups(results: Results) -> Drawing | None:
    """CPU per chain, cores and latency over the number of groups."""
    dated = sorted(rows(results.groups), key=lambda row: str(row.provenance.get("date") or ""))
    latest = {(row.mode, row.prefix, row.token_stretch, row.groups): row for row in dated}
    kinds = by_key(sorted(latest.values(), key=lambda row: row.groups), lambda row: (row.mode, row.prefix))
    drawn = {f"{mode}, P {prefix:,}": _one_each(some) for (mode, prefix), some in kinds.items()}
    several = {name: some for name, some in drawn.items() if len(some) > 1}
    return partial(_draw_many_groups, several) if several else None


def _one_each(found: Sequence[GroupsRow]) -> list[GroupsRow]:
    """Of each number of groups the row in which a token stands for most, which is how large numbers were measured."""
    return list({row.groups: row for row in sorted(found, key=lambda row: (row.groups, row.token_stretch))}.values())


def _draw_many_groups(found: dict[str, list[GroupsRow]]) -> Figure:
    figure = new_figure(3.8)
    cost, cores, late = figure.subplots(1, 3)
    for at, (name, some) in enumerate(found.items()):
        look = {"marker": MARKERS[at], "color": CYCLE[at], "markersize": 5, "linewidth": 1.3}
        groups = [row.groups for row in some]
        cost.plot(groups, [row.cpu_ms_per_chain for row in some], label=name, **look)
        cores.plot(groups, [row.real_time_cores for row in some], **look)
        cores.plot(groups, [row.real_time_loop_cores for row in some], linestyle="--", **look)
        late.plot(groups, [row.dispatch_ms.p50 for row in some], **look)
        late.plot(groups, [row.dispatch_ms.p99 for row in some], linestyle="--", **look)
    sizes = sorted({row.groups for some in found.values() for row in some})
    for axes in (cost, cores, late):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
    cores.set_yscale("log")
    cores.yaxis.set_major_formatter("{x:g}")
    cost.set_ylim(bottom=0)
    late.set_ylim(bottom=0)
    dress(cost, "Supervisor's CPU a chain, ms", "groups (simulated)", "")
    dress(cores, "Cores in real time\n(dashed: its event loop)", "groups (simulated)", "")
    dress(late, "First token to downstream's hop,\nms: p50 (dashed: p99)", "groups (simulated)", "")
    figure.legend(
        *cost.get_legend_handles_labels(), loc="outside lower center", ncols=len(found), frameon=False, fontsize=9
    )
    return figure
