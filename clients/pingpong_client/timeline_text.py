"""A chain's timeline and its account for a terminal: bars of one character a cell, then tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from pingpong_bus.messages import ChainResult
from pingpong_client.guesses import guessed_words
from pingpong_client.table import clean, clip, clip_middle, format_table, milliseconds, number
from pingpong_client.timeline_account import Account, AgentAccount, account
from pingpong_client.timeline_spans import HopSpans, Lane, Span, chain_end_ms, lanes

_PREFILL, _APPEND, _DECODE, _STEP, _AGAIN, _WAIT, _LOST, _MOVED = "█", "░", "─", "═", "▓", "·", "✗", "»"
_LEGEND = (
    (_PREFILL, "prefill"),
    (_APPEND, "append (read ahead)"),
    (_DECODE, "decode"),
    (_STEP, "step between agents"),
    (_WAIT, "waits for tokens"),
    (_AGAIN, "again"),
    (_LOST, "lost"),
    (_MOVED, "moved"),
)
_FEWEST_CELLS, _WIDEST_NAME = 24, 24
_WIDE, _LEFT_OUT = 76, ("read ahead", "cached")
"""Cells from which on all columns of the account fit, and those that are left out on fewer."""


def timeline_lines(result: ChainResult, width: int, *, end_ms: float = 0.0) -> list[str]:
    """A chain's lanes and its account.

    Args:
        result: the chain.
        width: cells that a line may take.
        end_ms: to which the axis goes, where several chains are shown on one; 0: the chain's own end.
    """
    made = account(result)
    shown = lanes(result)
    lines = [headline(result)]
    if not shown:
        return [*lines, f"It has not run yet{f': {result.why}' if result.why else ''}."]
    end = max(end_ms, chain_end_ms(result)) or 1.0
    names = [_name(lane) for lane in shown]
    margin = min(max(map(cell_len, names)), _WIDEST_NAME, max(4, width // 3))
    cells = max(_FEWEST_CELLS, width - margin - 2)
    lines += ["", " " * (margin + 2) + _axis(end, cells)]
    for lane, name in zip(shown, names, strict=True):
        for at, row in enumerate(lane.rows):
            title = clip_middle(name, margin).ljust(margin) if at == 0 else " " * margin
            lines.append(f"{title}  {_bar(result, row, end, cells)}".rstrip())
    used = "".join(lines[3:])
    lines += _wrapped([f"{mark} {what}" for mark, what in _LEGEND if mark in used], width, " " * (margin + 2))
    return [*lines, "", *account_lines(made, width)]


def headline(result: ChainResult) -> str:
    """The chain in a line."""
    parts = [clean(result.name, lines=False), result.id, result.placement or "", result.state]
    if result.e2e_ms is not None:
        parts.append(f"{milliseconds(result.e2e_ms)} ms")
    return " · ".join(part for part in parts if part)


def account_lines(made: Account, width: int) -> list[str]:
    """The account as tables."""
    headers = ("agent", "on", "hidden ms", "read ahead", "prefill ms", "decode ms", "cached", "tokens")
    kept = [at for at, name in enumerate(headers) if width >= _WIDE or name not in _LEFT_OUT]
    rows = [[_agent_row(agent)[at] for at in kept] for agent in made.agents]
    lines = format_table([headers[at] for at in kept], rows, right=range(2, len(kept)), width=width)
    lines.append("")
    for label, text in account_sentences(made):
        lines += _hanging(label, text, width)
    if made.comparisons:
        compared = [
            (
                each.name,
                milliseconds(each.predicted_ms),
                milliseconds(each.took_ms),
                each.off_words,
            )
            for each in made.comparisons
        ]
        lines += ["", *format_table(("", "predicted ms", "took ms", "off"), compared, right=(1, 2, 3), width=width)]
    return lines


def account_sentences(made: Account) -> list[tuple[str, str]]:
    """What an account says in words: pairs of a label and a text."""
    found: list[tuple[str, str]] = []
    if made.path:
        shares = [
            (made.spent_ms("queue"), "in the queue"),
            (made.spent_ms("wait"), "waiting to start"),
            (made.spent_ms("prefill"), "exposed prefill"),
            (made.spent_ms("decode"), "decode"),
            (made.spent_ms("step"), "steps between agents"),
            (made.spent_ms("recovery"), "getting over losses and moves"),
        ]
        parts = [f"{milliseconds(ms)} {what}" for ms, what in shares if ms >= 0.05]
        found.append(("took", f"{milliseconds(made.e2e_ms)} ms = {' + '.join(parts)}"))
    tokens = f"{number(made.hidden_tokens)} prompt tokens read ahead"
    hidden = f"{milliseconds(made.hidden_ms)} ms of appends, {tokens}"
    if made.predicted is not None and made.predicted.hidden_ms and not made.recovered:
        hidden += f", which at full speed take {milliseconds(made.predicted.hidden_ms)} ms by prediction"
    found.append(("hidden", hidden if made.hidden_ms else "nothing"))
    found.append(("wasted", "; ".join(wasted_parts(made)) or "nothing"))
    if made.drafts is not None:
        found.append(("guessed", guessed_words(made.drafts)))
    if made.recovered and made.predicted is not None:
        found.append(("predicted", "not compared: the daemon was restarted, and predicted anew for what was left"))
    return found


def wasted_parts(made: Account) -> list[str]:
    """What was done in vain or twice, a clause each."""
    wasted = made.wasted
    appends = _counted(wasted.overtaken, "append")
    counts = ((wasted.prompt_tokens, "prompt"), (wasted.resumed_tokens, "output"))
    tokens = " and ".join(f"{number(count)} {what}" for count, what in counts if count) or "no"
    clauses = (
        (wasted.tail_tokens, f"{number(wasted.tail_tokens)} tokens read ahead and computed again at the end"),
        (wasted.overtaken, f"{appends} of {number(wasted.overtaken_tokens)} tokens not through in time"),
        (
            wasted.again_ms,
            f"{tokens} tokens computed again after a loss or a move ({milliseconds(wasted.again_ms)} ms)",
        ),
        (
            wasted.output_tokens,
            f"{number(wasted.output_tokens)} output tokens void ({milliseconds(wasted.output_ms)} ms)",
        ),
        (wasted.replayed_tokens, f"{number(wasted.replayed_tokens)} output tokens replayed"),
        (
            wasted.rollbacks,
            f"{number(wasted.rollback_tokens)} tokens of joined texts taken back, {_counted(wasted.rollbacks, 'time')}",
        ),
    )
    return [text for there, text in clauses if there]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def ran_on(agent: AgentAccount) -> str:
    """Where an agent ran; of a step, what it is and how long it took."""
    if agent.kind == "agent":
        return " → ".join(dict.fromkeys(agent.workers)) or "-"
    return agent.kind if agent.step_ms is None else f"{agent.kind}, {milliseconds(agent.step_ms)} ms"


def _agent_row(agent: AgentAccount) -> tuple[str, ...]:
    if agent.kind != "agent":
        written = f"{number(agent.output_tokens)} chars"
        return (clean(agent.name, lines=False), ran_on(agent), "-", "-", "-", "-", "-", written)
    read = f"{number(agent.hidden_tokens)} of {number(agent.prompt_tokens)}" if agent.prompt_tokens else "-"
    return (
        clean(agent.name, lines=False),
        ran_on(agent),
        milliseconds(agent.hidden_ms),
        read,
        milliseconds(agent.prefill_ms),
        milliseconds(agent.decode_ms),
        number(agent.cached_tokens),
        number(agent.output_tokens),
    )


def _name(lane: Lane) -> str:
    devices = ", ".join(lane.devices)
    return f"{lane.worker} {devices}" if devices and devices != lane.worker else lane.title


def _axis(end: float, cells: int) -> str:
    """Marks of the time, some ten cells apart or more."""
    unit, name = (1000.0, "s") if end >= 2000 else (1.0, "ms")
    steps = (1, 2, 2.5, 5)
    step = next(
        scale * factor
        for scale in (10.0**power for power in range(-3, 12))
        for factor in steps
        if scale * factor * cells / (end / unit) >= 10
    )
    line = ""
    for at in range(int(end / unit / step) + 1):
        mark = f"{at * step:g} {name}" if at == 0 else f"{at * step:g}"
        place = round(at * step * unit / end * cells)
        if place + len(mark) <= cells and place >= len(line):
            line = line.ljust(place) + mark
    return line


def _bar(result: ChainResult, row: Sequence[HopSpans], end: float, cells: int) -> str:
    """A row's hops: each cell shows what took most of its time."""
    marks = [" "] * cells
    names: list[tuple[int, int, str]] = []
    for hop in row:
        _fill(marks, hop.entry.started_ms, hop.end_ms, end, _WAIT)
        for span in hop.spans:
            _fill(marks, span.start_ms, span.end_ms, end, _mark(span))
        longest = max(hop.spans, key=lambda span: span.end_ms - span.start_ms, default=None)
        decode = next((span for span in hop.spans if span.kind == "decode"), longest)
        if decode is not None:
            first, last = _cells(decode.start_ms, decode.end_ms, end, cells)
            names.append((first, last, clean(result.agents[hop.agent].name, lines=False)))
        if hop.entry.state in ("lost", "moved"):
            at = min(cells - 1, int(hop.end_ms / end * cells))
            marks[at] = _LOST if hop.entry.state == "lost" else _MOVED
    for first, last, name in names:
        room = last - first - 2
        if room < 2:
            continue
        shown = clip(name, room)
        start = first + (last - first - cell_len(shown)) // 2
        marks[start : start + len(shown)] = shown  # names of agents are of one cell a character
    return "".join(marks)


def _mark(span: Span) -> str:
    if span.again:
        return _AGAIN
    return {"prefill": _PREFILL, "append": _APPEND, "decode": _DECODE, "step": _STEP}[span.kind]


def _cells(start: float, stop: float, end: float, cells: int) -> tuple[int, int]:
    first = min(cells - 1, round(start / end * cells))
    return first, max(first + 1, round(stop / end * cells))


def _fill(marks: list[str], start: float, stop: float, end: float, mark: str) -> None:
    """Something short takes a cell, too, but none that holds something more telling."""
    first, last = _cells(start, stop, end, len(marks))
    short = (stop - start) / end * len(marks) < 0.5
    for at in range(first, min(last, len(marks))):
        if not short or marks[at] in (" ", _WAIT, _DECODE, _STEP):
            marks[at] = mark


def _wrapped(parts: Sequence[str], width: int, indent: str) -> list[str]:
    lines = [indent]
    for part in parts:
        if lines[-1] != indent and cell_len(lines[-1]) + cell_len(part) + 3 > width:
            lines.append(indent)
        lines[-1] += part if lines[-1] == indent else f"   {part}"
    return lines


def _hanging(label: str, text: str, width: int) -> list[str]:
    """A labelled text, wrapped."""
    indent = len("predicted  ")
    lines = [label.ljust(indent)]
    for word in text.split(" "):
        if cell_len(lines[-1]) + cell_len(word) + 1 > width and lines[-1].strip():
            lines.append(" " * indent)
        lines[-1] += word if len(lines[-1]) == indent else f" {word}"
    return lines
