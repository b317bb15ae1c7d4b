"""What the measurements of `decode_first.py` say, as Markdown and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from figures import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From Okabe and Ito's palette, which colour-blind people can tell apart.
_OURS, _OTHERS = "#0072B2", ("#D55E00", "#E69F00", "#009E73", "#CC79A7")
_WIDTH_INCHES, _HEIGHT_INCHES = 10.0, 4.2


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file."""

    engine: str
    appends: Literal["none", "beside", "alone"]
    """Whether there were any: none, beside the answer, or without it."""
    target: float | None
    """`itl_ratio` of the answer; None for schedulers that have none."""
    round: int
    gaps_ms: list[float]
    """Between the tokens of the answer."""
    answer_ms: float
    """Its first token to its last."""
    appends_ms: float
    """From the answer's first token to the end of the last append."""
    beside_tokens: int | None = None
    """Append tokens computed beside the answer; None where the scheduler does not say."""
    provenance: dict[str, Any] = {}


class Variant(msgspec.Struct, frozen=True):
    """All rounds of one engine at one target."""

    engine: str
    target: float | None
    p50_ms: float
    p99_ms: float
    max_ms: float
    alone_p50_ms: float
    alone_p99_ms: float
    """Of answers without appends, which are the same work under every scheduler: of all engines together."""
    answer_ms: float
    appends_ms: float
    appends_alone_ms: float | None
    beside_tokens: float | None

    @property
    def ratio(self) -> float:
        """p99 gap beside appends, in units of the one without."""
        return self.p99_ms / self.alone_p99_ms

    @property
    def name(self) -> str:
        """As tables and pictures call it."""
        return self.engine if self.target is None else f"{self.engine}, target {self.target:g}"


def variants(measured: Sequence[Measurement]) -> list[Variant]:
    """By engine and target, in the order in which they were measured; gaps of all rounds together."""
    keys = dict.fromkeys((one.engine, one.target) for one in measured if one.appends == "beside")
    alone = [gap for one in measured if one.appends == "none" for gap in one.gaps_ms]
    found = []
    for engine, target in sorted(keys, key=lambda key: (key[1] is not None, key[1] or 0.0)):
        same = [one for one in measured if one.engine == engine]
        beside = [one for one in same if one.appends == "beside" and one.target == target]
        gaps = [gap for one in beside for gap in one.gaps_ms]
        rode = [one.beside_tokens for one in beside if one.beside_tokens is not None]
        found.append(
            Variant(
                engine,
                target,
                percentile(gaps, 50),
                percentile(gaps, 99),
                max(gaps),
                percentile(alone, 50),
                percentile(alone, 99),
                statistics.median(one.answer_ms for one in beside),
                statistics.median(one.appends_ms for one in beside),
                statistics.median(done)
                if (done := [one.appends_ms for one in same if one.appends == "alone"])
                else None,
                statistics.median(rode) if rode else None,
            )
        )
    return found


def report(measured: Sequence[Measurement]) -> str:
    """Tables in Markdown."""
    lines = [
        "| gaps beside appends, ms | p50 | p99 | max | p99 without appends | ratio | answer | appends done | rode |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {one.name} | {one.p50_ms:.1f} | {one.p99_ms:.1f} | {one.max_ms:.1f} | {one.alone_p99_ms:.1f} "
        f"| {one.ratio:.2f} | {one.answer_ms:,.0f} | {one.appends_ms:,.0f} "
        f"| {'-' if one.beside_tokens is None else format(one.beside_tokens, '.0f')} |"
        for one in variants(measured)
    ]
    alone = {one.engine: one.appends_alone_ms for one in variants(measured) if one.appends_alone_ms is not None}
    lines += ["", "rode: append tokens computed beside the answer."]
    without = "; ".join(f"{engine} {ms:,.0f}" for engine, ms in alone.items())
    lines += ["", f"Appends without an answer beside them, ms: {without}."]
    known = measured[0].provenance
    machine = known.get("machine", {})
    rounds = len({one.round for one in measured})
    facts = [
        str(known.get("date")),
        f"{machine.get('usable_cores')} cores, {machine.get('cpu')}",
        f"{known.get('model')}, {known.get('dtype')}",
        f"{rounds} rounds",
        f"commit {str(known.get('commit'))[:12]}{' with changes' if known.get('dirty') else ''}",
    ]
    return "\n".join([*lines, "", f"{'; '.join(facts)}."])


def plot(measured: Sequence[Measurement], path: Path) -> None:
    """Write the picture as SVG or PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(measured).savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(measured: Sequence[Measurement]) -> Figure:
    """Finishing time and p99 gap over the target, with the other schedulers as lines across.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    found = variants(measured)
    ours = [one for one in found if one.target is not None]
    others = [one for one in found if one.target is None]
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    left, right = figure.subplots(1, 2)
    targets = [one.target for one in ours]
    for axes, title, values, across in (
        (
            left,
            "Last append computed, s after the answer's first token",
            [one.appends_ms / 1e3 for one in ours],
            [one.appends_ms / 1e3 for one in others],
        ),
        (
            right,
            "p99 gap between the answer's tokens, ms",
            [one.p99_ms for one in ours],
            [one.p99_ms for one in others],
        ),
    ):
        axes.plot(targets, values, marker="o", color=_OURS, label="decode first")
        for other, value, colour in zip(others, across, _OTHERS, strict=False):
            axes.axhline(value, color=colour, linestyle="--", linewidth=1.2, label=_short(other.engine))
        _dress(axes, title)
    left.set_ylim(bottom=0)
    if ours:
        alone = ours[0].alone_p99_ms
        right.plot(targets, [alone] * len(ours), color="#444444", linestyle=":", label="without appends")
        lowest, highest = min(alone, *(one.p99_ms for one in found)), max(one.p99_ms for one in found)
        right.set_yscale("log")
        right.set_ylim(lowest / 1.5, highest * 1.3)
        right.set_yticks(*_ticks(lowest / 1.5, highest * 1.3))
        right.minorticks_off()
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def _short(name: str) -> str:
    return name if "=" not in name else f"stock, {name}"


def _ticks(lowest: float, highest: float) -> tuple[list[float], list[str]]:
    chosen = [step * 10.0**power for power in range(5) for step in (1, 2, 3, 5)]
    chosen = [tick for tick in chosen if lowest <= tick <= highest]
    return chosen, [f"{tick:g}" for tick in chosen]


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("target: step ÷ step without appends (itl_ratio)")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
