"""The jitter report as text, and one line for each thing that happens while a log is followed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pingpong_bus.log_records import (
    DecodeJitter,
    DecodeJitterCause,
    DecodeJitterEnded,
    GroupHealthChanged,
    HopMoved,
    Record,
)
from pingpong_client.jitter_report import Episode, Group, JitterReport, is_dated
from pingpong_client.jitter_strips import strips
from pingpong_client.log_times import date_and_time, long, time_of_day
from pingpong_client.table import clean, clip, clip_middle, format_table, milliseconds, number

_DEVICE_CELLS = 20
_WIDTH = 100
"""Where nobody says how wide it may be."""
_SHOWN = 20
"""Episodes in the table; JSON and HTML have more."""
_WIDE = 150
"""Cells from which on the reason of an episode fits into its row."""
_NARROW = 96
"""Cells below which some columns are left out, so that names of devices and causes stay whole."""
_LEFT_OUT = frozenset({"tokens", "avoided", "chains"})


def report_lines(report: JitterReport, width: int | None = None) -> list[str]:
    """The report.

    Args:
        width: cells that a line may take; None: tables are as wide as they need.
    """
    lines = [_heading(report), ""]
    if not report.groups:
        return [*lines, "no group has decoded in this time, or its daemon does not watch ([jitter] enabled)"]
    lines += _table(GROUP_HEADERS, [group_row(one) for one in report.groups], 2, width)
    lines += ["", *strips(report, width or _WIDTH)]
    if not report.episodes:
        return [*lines, "", "no episode of late tokens"]
    lines += ["", *_episode_lines(report, width), "", *_cause_lines(report, width)]
    if report.moved:
        hops = "hop" if report.moved == 1 else "hops"
        saved = seconds_of(report.moves_saved_ms)
        lines += ["", f"{number(report.moved)} {hops} moved, which by prediction saved {saved}"]
    return lines


def event_line(at: float, record: Record) -> str | None:
    """What a record says, in one line; None for one that says nothing new."""
    match record:
        case DecodeJitter():
            text = f"tokens come late, {record.slowdown:.2f} times the usual {milliseconds(record.usual_ms)} ms"
            text += f" (p99 {milliseconds(record.p99_ms)}, worst {milliseconds(record.worst_ms)})"
            text += f": {words(record.cause)}: {record.why}"
        case DecodeJitterCause():
            text = f"the likely cause is {words(record.cause)} now, not {words(record.was)}: {record.why}"
        case DecodeJitterEnded():
            text = f"quiet again: {words(record.cause)}, {long(record.seconds)}, {number(record.late)} late tokens"
            text += f", {seconds_of(record.lost_ms)} lost, {_chains(len(record.chains))}"
        case GroupHealthChanged():
            text = f"{record.state}, was {record.was}" + (f": {record.why}" if record.why else "")
        case HopMoved():
            text = f"{record.agent} of chain {record.chain} moved to {record.to} with {number(record.tokens)} tokens: "
            text += f"{milliseconds(record.left_ms)} ms left here, {milliseconds(record.there_ms)} there"
        case _:
            return None
    return clean(f"{time_of_day(at)} {record.worker}: {text}", lines=False)


def words(cause: str) -> str:
    """A cause's name for people."""
    return cause.replace("_", " ")


def seconds_of(ms: float | None) -> str:
    """A cost: 0.35 s, 12.4 s, 1,234 s, or a dash."""
    if ms is None:
        return "-"
    return f"{ms / 1e3:,.0f} s" if ms >= 99_950 else f"{ms / 1e3:.1f} s" if ms >= 9_995 else f"{ms / 1e3:.2f} s"


def devices_text(devices: Sequence[str]) -> str:
    """Devices, each short enough for a table."""
    return ",".join(clip_middle(one, _DEVICE_CELLS) for one in devices)


GROUP_HEADERS = (
    *("worker", "devices", "tokens", "usual", "p50", "p99", "worst ms", "late"),
    *("episodes", "avoided", "lost"),
)


def group_row(group: Group) -> list[str]:
    """A group's figures, under `GROUP_HEADERS`."""
    return [
        group.worker,
        devices_text(group.devices),
        number(group.tokens),
        milliseconds(group.usual_ms or None),
        milliseconds(group.p50_ms or None),
        milliseconds(group.p99_ms or None),
        milliseconds(group.worst_ms or None),
        percent(group.late, group.tokens),
        number(group.episodes),
        long(group.avoided_seconds) if group.avoided_seconds else "-",
        seconds_of(group.lost_ms) if group.late_seconds else "-",
    ]


def percent(part: int, whole: int) -> str:
    """0.04 %, 3.1 %, 12 %, or a dash."""
    if not whole:
        return "-"
    value = 100 * part / whole
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.1f} %" if value >= 0.95 or not part else f"{value:.2g} %"


EPISODE_HEADERS = ("began", "worker", "cause", "took", "slower", "worst ms", "late", "lost", "chains", "why")


def episode_row(episode: Episode, *, dated: bool) -> list[str]:
    """An episode's figures, under `EPISODE_HEADERS`."""
    return [
        date_and_time(episode.began) if dated else time_of_day(episode.began),
        episode.worker,
        words(episode.cause),
        long(episode.seconds) if episode.seconds is not None else episode.state,
        f"{episode.slowdown:.2f} x" if episode.slowdown else "-",
        milliseconds(episode.worst_ms or None),
        percent(episode.late or 0, episode.tokens or 0),
        seconds_of(episode.lost_ms),
        number(len(episode.chains)) if episode.state == "over" else "-",
        episode.why or "-",
    ]


def _heading(report: JitterReport) -> str:
    lines = f"{number(report.lines)} lines"
    if report.foreign:
        lines += f", {number(report.foreign)} of them not the daemon's or cut"
    if report.began is None or report.ended is None:
        return f"nothing of a daemon in this time; {lines}"
    first, last = date_and_time(report.began), date_and_time(report.ended)
    until = last if is_dated(report) else last[11:]
    return f"{first} to {until} UTC, {long(report.ended - report.began)}; {lines}"


def _episode_lines(report: JitterReport, width: int | None) -> list[str]:
    dated = is_dated(report)
    shown = sorted(report.episodes, key=lambda one: (one.state == "going on", one.lost_ms or 0.0))[-_SHOWN:]
    rows = [episode_row(one, dated=dated) for one in sorted(shown, key=lambda one: one.began)]
    all_of_them = len(report.episodes) + report.left_out
    heading = f"{number(all_of_them)} episode{'s' if all_of_them != 1 else ''} of late tokens"
    if all_of_them > len(shown):
        heading += f", the {len(shown)} that cost most"
    if width is None or width >= _WIDE:
        return [heading, *format_table(EPISODE_HEADERS, rows, right=range(3, 9), width=width)]
    # The reason is a sentence, which no narrow column holds: it gets a line of its own.
    table = _table(EPISODE_HEADERS[:-1], [row[:-1] for row in rows], 3, width)
    lines = [heading, table[0]]
    for line, row in zip(table[1:], rows, strict=True):
        lines += [line, clip(f"  {clean(row[-1], lines=False)}", width)]
    return lines


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], texts: int, width: int | None) -> list[str]:
    """A table whose first columns, so many, are texts, and the others numbers."""
    narrow = width is not None and width < _NARROW
    kept = [at for at, name in enumerate(headers) if not (narrow and name in _LEFT_OUT)]
    shown = [[row[at] for at in kept] for row in rows]
    return format_table([headers[at] for at in kept], shown, right=range(texts, len(kept)), width=width)


def _cause_lines(report: JitterReport, width: int | None) -> list[str]:
    rows = [
        [
            words(one.cause),
            number(one.episodes),
            long(one.seconds),
            seconds_of(one.lost_ms),
            number(one.chains),
        ]
        for one in report.causes
    ]
    if not rows:
        return ["no episode is over yet"]
    return format_table(("cause", "episodes", "took", "lost", "chains"), rows, right=range(1, 5), width=width)


def _chains(count: int) -> str:
    return f"{count} chain{'s' if count != 1 else ''}"
