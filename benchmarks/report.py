"""What a set of runs says, as Markdown. Pure: runs in, text out; the numbers are those of `figures.py`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from figures import (
    Rows,
    Spread,
    baseline,
    comparable,
    decode_slowdown,
    decode_step_ms,
    downstream,
    downstream_ttft_ratio,
    exactness,
    hidden_share,
    inter_token,
    measured,
    median_total_ms,
    median_ttft_ms,
    saved_percent,
)
from runs import Run, row_name


def render(runs: Sequence[Run]) -> str:
    """The whole report, one section for each set of `comparable` runs."""
    return "\n".join(_section(some) for some in comparable(runs))


def _section(runs: Sequence[Run]) -> str:
    rows = measured(runs)
    if not rows:
        return "No measured runs.\n"
    some = runs[0]
    sampling = f"temperature {some.temperature:g}, seed {some.seed}" if some.temperature else "greedy"
    title = [some.profile, f"{some.cache} cache", f"{some.session} session", sampling]
    if some.exactness != "fast":
        title.append(f"exactness {some.exactness}{f' of {some.result.grid} tokens' if some.result.grid else ''}")
    if some.append_tokens is not None:
        title.append(f"appends of {some.append_tokens} tokens")
    if some.forced_lengths:
        title.append("forced lengths")
    lines = [f"## {', '.join(title)}", ""]
    lines += _machine(some) + _end_to_end(rows) + _agents_table(rows) + _inter_token_table(rows) + _findings(rows)
    return "\n".join(lines) + "\n"


def _machine(run: Run) -> list[str]:
    known = run.provenance
    facts = [str(known[key]) for key in ("date", "kernel") if known.get(key)]
    if machine := known.get("machine"):
        facts.append(f"{machine['cores']} cores, {machine['cpu']}")
    if known.get("commit"):
        facts.append(f"commit {known['commit'][:12]}{' with changes' if known.get('dirty') else ''}")
    facts += [
        f"{engine['group']} ({', '.join(engine['devices'])}): {engine['engine']}, "
        f"{Path(engine['model']).name}, {engine['dtype']}"
        for engine in known.get("engines", [])
    ]
    return ["; ".join(facts) + ".", ""] if facts else []


def _end_to_end(rows: Rows) -> list[str]:
    lines = [
        "| E2E, ms | runs | mean | median | min | max | saved (medians) | against |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row, runs in rows.items():
        spread = Spread.of([run.e2e_ms for run in runs])
        saved = "-"
        if (reference := baseline(rows, row)) and reference is not runs:
            saved = f"{saved_percent(statistics.median(run.e2e_ms for run in reference), spread.median):.1f} %"
        lines.append(
            f"| {row} | {len(runs)} | {spread.mean:,.0f} | {spread.median:,.0f} | {spread.least:,.0f} "
            f"| {spread.greatest:,.0f} | {saved} | {runs[0].baseline if saved != '-' else '-'} |"
        )
    by_daemon = [run.wall_ms - run.e2e_ms for runs in rows.values() for run in runs if run.mode != "presend"]
    extra = statistics.median(by_daemon) if by_daemon else 0.0
    lines += ["", f"By the daemon's clock; its clients see {extra:,.0f} ms more (messages and events)."]
    if any(runs[0].mode == "presend" for runs in rows.values()):
        lines.append(
            "presend is what a client of a stock server can do by itself, so it is timed by the client: agents in "
            "series, each one's static prefix sent ahead at its upstream's first token."
        )
    return [*lines, ""]


def _agents_table(rows: Rows) -> list[str]:
    first = next(iter(rows.values()))
    lines = ["| TTFT / total, ms (medians) | " + " | ".join(rows) + " |", "|---|" + "--:|" * len(rows)]
    for at, agent in enumerate(first[0].result.agents):
        cells = [f"{median_ttft_ms(runs)[at]:,.0f} / {median_total_ms(runs)[at]:,.0f}" for runs in rows.values()]
        lines.append(f"| {agent.name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _inter_token_table(rows: Rows) -> list[str]:
    lines = ["| between tokens, ms | group | p50 | p99 | max | gaps |", "|---|---|--:|--:|--:|--:|"]
    for row, runs in rows.items():
        for group, gaps in inter_token(runs).items():
            lines.append(
                f"| {row} | {group} | {gaps.p50:.2f} | {gaps.p99:.2f} | {gaps.greatest:.1f} | {gaps.count:,} |"
            )
    return [*lines, ""] if len(lines) > 2 else []


def _findings(rows: Rows) -> list[str]:
    lines = []
    for row, runs in rows.items():
        facts = []
        if reference := baseline(rows, row):
            equal = exactness(reference, runs)
            against = f"the first {row} run" if reference is runs else f"the {runs[0].baseline} runs"
            detail = f" ({equal.first_difference})" if equal.first_difference else ""
            facts.append(f"exact {equal.exact} of {equal.compared} against {against}{detail}")
            if reference is not runs and downstream(runs[0]):
                facts.append(f"downstream TTFT {100 * downstream_ttft_ratio(reference, runs):.1f} % of serial")
                share = hidden_share(reference, runs)
                facts.append(f"hidden ÷ hideable TTFT {'-' if share is None else f'{share:.2f}'}")
                facts.append(_slowdown(rows, row))
        facts += [_prediction(runs), _cached(runs), _token_match(runs), _appends(runs)]
        lines.append(f"- {row}: " + "; ".join(fact for fact in facts if fact))
    lines += [
        f"- decode step, {row}: {decode_step_ms(runs):.1f} ms"
        for row, runs in rows.items()
        if baseline(rows, row) is runs
    ]
    return lines


def _slowdown(rows: Rows, row: str) -> str:
    """A token in this row over one of the baseline, and of series on the group itself where that was run too."""
    runs = rows[row]
    found = []
    for group, ratio in decode_slowdown(baseline(rows, row), runs).items():
        text = f"{group} {ratio:.3f} times"
        own = rows.get(row_name(runs[0].daemon, "serial", group))
        if own and own[0].row != runs[0].baseline and (ratios := decode_slowdown(own, runs)):
            text += f" ({ratios[group]:.3f} of series there)"
        found.append(text)
    return f"a token took {', '.join(found)}" if found else ""


def _prediction(runs: Sequence[Run]) -> str:
    """What the daemon took for the chain, where it chose, and how far off its prediction was."""
    facts = []
    if runs[0].mode == "auto":
        taken = [run.result.placement or "nothing" for run in runs]
        facts.append("took " + ", ".join(f"{name} {taken.count(name)} times" for name in dict.fromkeys(taken)))
    off = [100 * (run.result.predicted_ms / run.e2e_ms - 1) for run in runs if run.result.predicted_ms and run.e2e_ms]
    if off:
        facts.append(f"predicted {statistics.median(off):+.1f} % of what it took")
    return "; ".join(facts)


def _cached(runs: Sequence[Run]) -> str:
    agents = [agent for run in runs for agent in run.result.agents]
    prompts = sum(agent.prompt_tokens for agent in agents)
    return f"{100 * sum(agent.cached_tokens for agent in agents) / prompts:.0f} % of prompt tokens cached at the end"


def _token_match(runs: Sequence[Run]) -> str:
    known = [a.prompt_token_match for run in runs for a in run.result.agents if a.prompt_token_match is not None]
    return f"prompt_token_match {sum(known)} of {len(known)}" if known else ""


def _appends(runs: Sequence[Run]) -> str:
    agents = [agent for run in runs for agent in run.result.agents if agent.appends]
    if not agents:
        return ""
    times = [entry.done_ms - entry.at_ms for agent in agents for entry in agent.appends[1:] if entry.done_ms]
    took = f", {statistics.median(times):.0f} ms median after the first, longest {max(times):.0f}" if times else ""
    return f"{statistics.fmean(len(agent.appends) for agent in agents):.1f} appends an agent{took}"
