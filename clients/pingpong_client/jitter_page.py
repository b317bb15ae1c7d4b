"""The jitter report as one HTML file that needs no other: the picture as inline SVG, and the tables."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.metadata import version

from pingpong_client.jitter_picture import draw
from pingpong_client.jitter_report import Episode, Group, JitterReport
from pingpong_client.jitter_text import (
    EPISODE_HEADERS,
    GROUP_HEADERS,
    episode_row,
    group_row,
    report_lines,
    seconds_of,
    words,
)
from pingpong_client.log_times import date_and_time, iso, long
from pingpong_client.plotting import inline_svg
from pingpong_client.table import milliseconds, number

_STYLE = """
body { font: 15px/1.5 "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; color: #222; background: #fff;
       max-width: 1120px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0.2em } h2 { font-size: 1.15em; margin-top: 2em }
p.note { color: #555; font-size: 0.9em; max-width: 50em }
div.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9em; margin: 0.6em 0 }
th, td { text-align: left; padding: 0.25em 0.9em 0.25em 0; border-bottom: 1px solid #ddd; vertical-align: top }
th { font-weight: 600; border-bottom: 1px solid #888; white-space: nowrap }
td.number, th.number { text-align: right; white-space: nowrap }
td.short { white-space: nowrap } td.text { min-width: 16em }
details { margin: 0.1em 0 } summary { cursor: pointer } dl { margin: 0.3em 0 0.3em 1em }
"""

_NOTE = (
    '<p class="note">Times are ms between two tokens of an answer while nothing but decodes ran. <i>usual</i>: the '
    "group's own median, learned; <i>p50</i> and <i>p99</i>: medians of what the log's lines say, weighed by their "
    "tokens; <i>late</i>: more than 1.5 times the usual; <i>avoided</i>: how long it was routed around; "
    "<i>lost</i>: what tokens took beyond the usual in episodes that are over, all answers together.</p>"
)


def page(report: JitterReport) -> str:
    """The file's text.

    Raises:
        UsageError: matplotlib is not installed.
    """
    heading = report_lines(report)[0]
    picture = inline_svg(draw(report), "jitter", f"Times between tokens over time by device, with episodes. {heading}")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Jitter, {_escaped(iso(report.began) if report.began is not None else 'nothing')}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>How steadily devices decoded</h1><p>{_escaped(heading)}</p>",
        f"<div>{picture}</div>",
        "<h2>Devices</h2>",
        _table(GROUP_HEADERS, [_whole_row(group) for group in report.groups], right=range(2, 11)),
        _NOTE,
        *_episodes(report),
        *_moves(report),
        f'<p class="note">pingpong-client {_escaped(version("pingpongd"))}. Times of day are UTC.</p>',
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _whole_row(group: Group) -> list[str]:
    """With the devices' whole names."""
    worker, _, *figures = group_row(group)
    return [worker, ", ".join(group.devices), *figures]


def _episodes(report: JitterReport) -> list[str]:
    if not report.episodes:
        return ["<h2>Episodes</h2><p>None.</p>"]
    causes = [
        [words(one.cause), number(one.episodes), long(one.seconds), seconds_of(one.lost_ms), number(one.chains)]
        for one in report.causes
    ]
    parts = ["<h2>Causes</h2>"]
    parts.append(_table(("cause", "episodes", "took", "lost", "chains"), causes, right=range(1, 5)))
    parts.append("<h2>Episodes</h2>")
    if report.left_out:
        parts.append(f"<p>{number(report.left_out)} that cost less are left out; the causes count them.</p>")
    # The reason comes first behind the figures, with what stands behind it folded away.
    rows = [[*map(_escaped, episode_row(one, dated=True)[:-1]), _reason(one)] for one in report.episodes]
    parts.append(_table(EPISODE_HEADERS, rows, right=range(3, 9), escaped=True, text=9))
    return parts


def _reason(episode: Episode) -> str:
    """The sentence, and folded: the evidence, other causes that it was taken for, the chains."""
    details = [
        f"<dt>{_escaped(name)}</dt><dd>{_escaped(f'{value:,.6g}')}</dd>" for name, value in episode.evidence.items()
    ]
    if len(episode.causes) > 1:
        steps = [f"{date_and_time(one.at)[11:]} {words(one.cause)}: {one.why}" for one in episode.causes]
        details.append(f"<dt>taken for</dt><dd>{'<br>'.join(map(_escaped, steps))}</dd>")
    if episode.chains:
        details.append(f"<dt>chains</dt><dd>{_escaped(', '.join(episode.chains))}</dd>")
    details.append(f"<dt>episode</dt><dd>{_escaped(episode.id)}</dd>")
    why = _escaped(episode.why or "no reason is known")
    return f"<details><summary>{why}</summary><dl>{''.join(details)}</dl></details>"


def _moves(report: JitterReport) -> list[str]:
    if not report.moves:
        return []
    rows = [
        [
            date_and_time(one.at),
            one.agent,
            one.chain,
            f"{one.worker} to {one.to}",
            number(one.tokens),
            milliseconds(one.left_ms),
            milliseconds(one.there_ms),
            words(one.cause or "-"),
        ]
        for one in report.moves
    ]
    headers = ("when", "agent", "chain", "moved", "tokens kept", "left here, ms", "there, ms", "cause")
    note = f"<p>The latest {len(rows)} of {number(report.moved)}.</p>" if report.moved > len(rows) else ""
    return ["<h2>Hops moved</h2>", note, _table(headers, rows, right=range(4, 7))]


def _table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    escaped: bool = False,
    text: int | None = None,
) -> str:
    """A table.

    Args:
        right: columns of numbers.
        escaped: the cells are HTML already.
        text: the column of sentences.
    """

    def kind(at: int) -> str:
        return "number" if at in right else "text" if at == text else "short"

    lines = ["".join(f'<th class="{kind(at)}">{_escaped(one)}</th>' for at, one in enumerate(headers))]
    for row in rows:
        cells = row if escaped else map(_escaped, row)
        lines.append("".join(f'<td class="{kind(at)}">{one}</td>' for at, one in enumerate(cells)))
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)
