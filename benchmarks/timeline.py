"""Draws two runs of a chain as a timeline: one lane per device, series above reading ahead, on one time axis.

    python benchmarks/timeline.py --serial serial.json --ahead ping_pong.json --out docs/images/timeline.png
    python benchmarks/timeline.py --runs cold.jsonl --out docs/images/timeline.png

The JSON documents are what `pingpong-client result --json` prints; of a results file, the runs nearest to the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from pingpong_bus.errors import DataError
from pingpong_bus.messages import AgentResult, ChainResult
from runs import read_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Work = Literal["prefill", "append", "decode"]

# From Okabe and Ito's palette, which colour-blind people can tell apart; also apart in grey.
COLOURS: dict[Work, str] = {"prefill": "#0072B2", "append": "#E69F00", "decode": "#B7E3D3"}
LABELS: dict[Work, str] = {
    "prefill": "prefill: the chain waits for it",
    "append": "append-prefill: hidden behind the decode above or below",
    "decode": "decode",
}
_WIDTH_INCHES, _DPI = 10.0, 110
_LANE_INCHES = 0.62
_BAR_HEIGHT = 0.74


class Bar(msgspec.Struct, frozen=True):
    """A stretch of work on one device, in seconds since the chain's submission."""

    lane: str
    agent: str
    work: Work
    start_s: float
    end_s: float


def bars(result: ChainResult) -> list[Bar]:
    """What each device did and when.

    An agent's prefill begins when its prompt was complete, which is when nothing else was left to wait for, and ends
    with its first token. An append of which the end is not known lasts until the prompt was complete.
    """
    return [bar for agent in result.agents for bar in _agent_bars(agent)]


def _agent_bars(agent: AgentResult) -> list[Bar]:
    if agent.finalized_ms is None or agent.first_token_ms is None or agent.last_token_ms is None:
        return []
    found: list[Bar] = []
    at = 0.0
    for entry in agent.appends:
        end = min(entry.done_ms if entry.done_ms is not None else agent.finalized_ms, agent.finalized_ms)
        start = max(entry.at_ms, at)
        if end > start:
            found.append(Bar(agent.worker, agent.name, "append", start / 1e3, end / 1e3))
            at = end
    moments: list[tuple[Work, float, float]] = [
        ("prefill", agent.finalized_ms, agent.first_token_ms),
        ("decode", agent.first_token_ms, agent.last_token_ms),
    ]
    found += [Bar(agent.worker, agent.name, work, start / 1e3, end / 1e3) for work, start, end in moments]
    return found


def draw(serial: ChainResult, ahead: ChainResult, path: Path, *, lanes: Sequence[str] | None = None) -> None:
    """Write the picture as PNG.

    Args:
        lanes: devices from top to bottom; None: as the run that read ahead came to them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = lanes or list(dict.fromkeys(agent.worker for result in (ahead, serial) for agent in result.agents))
    end_s = max(result.e2e_ms or 0.0 for result in (serial, ahead)) / 1e3
    height = 2 * (_LANE_INCHES * len(lanes) + 0.45) + 0.95
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    named_above = _draw_run(upper, serial, lanes, "In series")
    named_below = _draw_run(lower, ahead, lanes, f"Read ahead ({ahead.placement or 'ahead'})")
    saved = 100 * (1 - (ahead.e2e_ms or 0.0) / (serial.e2e_ms or 1.0))
    lower.text(
        ((ahead.e2e_ms or 0.0) + (serial.e2e_ms or 0.0)) / 2e3,
        0.5,
        f"{saved:.0f} % less time" if saved >= 0 else f"{-saved:.0f} % more time",
        transform=lower.get_xaxis_transform(),
        ha="center",
        va="center",
        fontsize=11,
        fontweight="bold",
    )
    lower.set_xlim(0, end_s * 1.09)  # room for the last name
    lower.set_xlabel("seconds since the chain was submitted")
    figure.legend(
        handles=[
            Patch(facecolor=COLOURS[work], edgecolor="#444444", linewidth=0.5, label=LABELS[work]) for work in LABELS
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    figure.draw_without_rendering()  # settles the layout, and so the scale
    _name_bars(upper, named_above, lanes)
    _name_bars(lower, named_below, lanes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_run(axes: Axes, result: ChainResult, lanes: Sequence[str], title: str) -> list[tuple[Bar, float]]:
    """Draw a run's bars; returns those to be named, each with the moment until which its lane is free after it."""
    axes.set_title(f"{title}: {(result.e2e_ms or 0.0) / 1e3:.1f} s", loc="left", fontsize=11, fontweight="bold")
    drawn = sorted(bars(result), key=lambda bar: bar.start_s)
    for bar in drawn:
        axes.barh(
            lanes.index(bar.lane),
            bar.end_s - bar.start_s,
            left=bar.start_s,
            height=_BAR_HEIGHT,
            color=COLOURS[bar.work],
            edgecolor="#444444" if bar.work != "append" else "white",
            linewidth=0.4,
        )
    for at, lane in enumerate(lanes):
        if all(bar.lane != lane for bar in drawn):
            axes.text(0.5, at, "idle", transform=axes.get_yaxis_transform(), ha="center", va="center", color="#777777")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return [
        (
            bar,
            min(
                (other.start_s for other in drawn if other.lane == bar.lane and other.start_s >= bar.end_s), default=inf
            ),
        )
        for bar in drawn
        if bar.work == "decode"
    ]


def _name_bars(axes: Axes, named: Sequence[tuple[Bar, float]], lanes: Sequence[str]) -> None:
    """Write agents' names into their bars, or beside them, or upright, as they fit; the axes must have their scale."""
    for bar, free_until in named:
        middle = (bar.start_s + bar.end_s) / 2
        text = axes.text(middle, lanes.index(bar.lane), bar.agent, ha="center", va="center", fontsize=9)
        pixels = text.get_window_extent()
        left, right = (axes.transData.inverted().transform((x, 0))[0] for x in (pixels.x0 - 4, pixels.x1 + 4))
        if right - left <= bar.end_s - bar.start_s:
            continue
        if bar.end_s + (right - left) <= min(free_until, axes.get_xlim()[1]):
            text.set(x=bar.end_s + (middle - left) / 8, ha="left")
        else:
            text.set(rotation=90, fontsize=7)


def _typical(path: Path, mode: str) -> ChainResult:
    """The run of a mode that is nearest to the median."""
    runs = [run for run in read_runs([path]) if run.mode == mode and not run.warmup]
    if not runs:
        raise SystemExit(f"timeline.py: {path} has no {mode} run.")
    middle = statistics.median(run.e2e_ms for run in runs)
    return min(runs, key=lambda run: abs(run.e2e_ms - middle)).result


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Draw a serial run and one that read ahead as a timeline.")
    parser.add_argument("--serial", type=Path, help="a ChainResult as JSON")
    parser.add_argument("--ahead", type=Path, help="a ChainResult as JSON")
    parser.add_argument("--runs", type=Path, help="a results file of chain.py, instead of the two")
    parser.add_argument("--out", type=Path, default=Path("timeline.png"))
    options = parser.parse_args()
    if options.runs:
        try:
            serial, ahead = (_typical(options.runs, mode) for mode in ("serial", "ping-pong"))
        except DataError as error:
            raise SystemExit(f"timeline.py: {error}") from None
    elif options.serial and options.ahead:
        decoder = msgspec.json.Decoder(ChainResult)
        serial, ahead = (decoder.decode(path.read_bytes()) for path in (options.serial, options.ahead))
    else:
        parser.error("give --serial and --ahead, or --runs")
    draw(serial, ahead, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
