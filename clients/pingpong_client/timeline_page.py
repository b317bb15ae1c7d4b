"""Timelines of chains as one self-contained HTML page: the picture, the accounts, every hop, and the trace within."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from pingpong_bus.messages import ChainResult, HopEntry
from pingpong_client.plotting import inline_svg
from pingpong_client.table import milliseconds, number
from pingpong_client.timeline_account import Account, account
from pingpong_client.timeline_picture import figure
from pingpong_client.timeline_spans import hops_of
from pingpong_client.timeline_text import account_sentences, headline, ran_on
from pingpong_client.timeline_trace import trace_json

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } h3 { font-size: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .5rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { border-bottom-color: #888; font-weight: 600; }
th.text, td.text { text-align: left; }
td.why { white-space: normal; min-width: 10rem; }
dl { display: grid; grid-template-columns: max-content auto; gap: .2rem 1rem; } dt { font-weight: 600; }
dd { margin: 0; } footer { color: #666; margin-top: 2rem; }
"""
_PERFETTO = '<a href="https://ui.perfetto.dev">ui.perfetto.dev</a>'


def timeline_page(results: Sequence[ChainResult]) -> str:
    """The page; no text of prompts or outputs is in it.

    Raises:
        UsageError: matplotlib is not installed.
    """
    title = escape("Timeline of " + ", ".join(dict.fromkeys(result.name for result in results)))
    shown = [result for result in results if any(hops_of(agent) for agent in result.agents)]
    picture = (
        inline_svg(figure(shown), "timeline", "A lane for each device group, a bar for each work") if shown else ""
    )
    trace = base64.b64encode(trace_json(results)).decode()
    name = escape(f"timeline-{results[0].id}.json", quote=True)
    link = f'<a download="{name}" href="data:application/json;base64,{trace}">{name}</a>'
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f'<div class="wide">{picture}</div>',
        *(section for result in results for section in _sections(result)),
        f"<footer>The same for {_PERFETTO}: {link}</footer>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _sections(result: ChainResult) -> Iterable[str]:
    made = account(result)
    yield f"<h2>{escape(headline(result))}</h2>"
    when = f"submitted {result.submitted_at}" if result.submitted_at else ""
    why = f"{result.placement or result.state}: {result.why}" if result.why else ""
    if text := "; ".join(part for part in (when, why) if part):
        yield f"<p>{escape(text)}</p>"
    if result.error:
        yield f"<p><strong>{escape(result.error)}</strong></p>"
    yield "<h3>Account</h3><dl>"
    for label, text in account_sentences(made):
        yield f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>"
    yield "</dl>"
    yield _agents(made)
    if made.comparisons:
        yield "<h3>Predicted and taken</h3>"
        rows = [
            [
                each.name,
                milliseconds(each.predicted_ms),
                milliseconds(each.took_ms),
                each.off_words,
            ]
            for each in made.comparisons
        ]
        yield _table(["", "predicted ms", "took ms", "off"], rows, text=(0,))
    yield "<h3>Hops</h3>"
    yield _hops(result)


def _agents(made: Account) -> str:
    headers = ["agent", "on", "hidden ms", "read ahead", "prompt", "cached", "prefill ms", "decode ms", "output"]
    rows = [
        [
            agent.name,
            ran_on(agent),
            milliseconds(agent.hidden_ms),
            number(agent.hidden_tokens),
            number(agent.prompt_tokens),
            number(agent.cached_tokens),
            milliseconds(agent.prefill_ms),
            milliseconds(agent.decode_ms),
            number(agent.output_tokens),
        ]
        for agent in made.agents
    ]
    return _table(headers, rows, text=(0, 1))


def _hops(result: ChainResult) -> str:
    headers = [
        "agent",
        "group",
        "devices",
        "sent ms",
        "opened",
        "prompt whole",
        "first token",
        "ended",
        "tokens",
        "end",
    ]
    rows = [
        [agent.name, hop.worker or agent.kind, ", ".join(result.devices.get(hop.worker, [])), *_moments(hop), _end(hop)]
        for agent in result.agents
        for hop in hops_of(agent)
    ]
    return _table(headers, rows, text=(0, 1, 2, 9))


def _moments(hop: HopEntry) -> list[str]:
    times = (hop.started_ms, hop.opened_ms, hop.finalized_ms, hop.first_token_ms, hop.ended_ms)
    before = f" (+ {number(hop.tokens_before)})" if hop.tokens_before else ""
    return [*("-" if at is None else f"{at:,.1f}" for at in times), f"{number(hop.tokens)}{before}"]


def _end(hop: HopEntry) -> str:
    return f"{hop.state}: {hop.why}" if hop.why else hop.state


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int]) -> str:
    def cell(tag: str, at: int, content: str) -> str:
        kind = "text why" if at in text and len(content) > 40 else "text" if at in text else ""
        return f'<{tag} class="{kind}">{escape(content)}</{tag}>' if kind else f"<{tag}>{escape(content)}</{tag}>"

    head = "".join(cell("th", at, content) for at, content in enumerate(headers))
    body = "".join(
        "<tr>" + "".join(cell("td", at, content) for at, content in enumerate(row)) + "</tr>\n" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
