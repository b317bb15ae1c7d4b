"""What a set of runs says, as numbers and as Markdown. Pure: runs in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pingpong_bus.messages import AgentResult
from runs import RUN_MODES, Run


class Spread(msgspec.Struct, frozen=True):
    """A sample's mean, median, least and greatest."""

    mean: float
    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.median(values), min(values), max(values))


class Exactness(msgspec.Struct, frozen=True):
    """In how many runs prompts and outputs equal those of the serial run of the same index."""

    exact: int
    compared: int
    first_difference: str = ""
    """Run, agent and what differs first; empty where all are equal."""


def measured(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by mode, warm-up left out, in the order in which reports show modes."""
    kept = [run for run in runs if not run.warmup]
    return {mode: found for mode in RUN_MODES if (found := [run for run in kept if run.mode == mode])}


def saved_percent(baseline_ms: float, ms: float) -> float:
    """How much less time than the baseline, in percent; negative where it is more."""
    return 100 * (1 - ms / baseline_ms)


def median_ttft_ms(runs: Sequence[Run]) -> list[float]:
    """Of each agent, the median over the runs."""
    return [statistics.median(_ttft(run.result.agents[at]) for run in runs) for at in range(_agents(runs))]


def median_total_ms(runs: Sequence[Run]) -> list[float]:
    """Of each agent, ready to last token: the median over the runs."""
    return [statistics.median(run.result.agents[at].total_ms or 0.0 for run in runs) for at in range(_agents(runs))]


def decode_step_ms(runs: Sequence[Run]) -> float:
    """The median time between two tokens of an agent, over all agents with more than one."""
    steps = [
        ((agent.total_ms or 0.0) - _ttft(agent)) / (agent.output_tokens - 1)
        for run in runs
        for agent in run.result.agents
        if agent.output_tokens > 1
    ]
    return statistics.median(steps)


def downstream_ttft_ratio(serial: Sequence[Run], other: Sequence[Run]) -> float:
    """Downstream agents' TTFT as a share of the serial one: sums of medians, the first agent left out."""
    return sum(median_ttft_ms(other)[1:]) / sum(median_ttft_ms(serial)[1:])


def hidden_share(serial: Sequence[Run], other: Sequence[Run]) -> float | None:
    """Hidden ÷ hideable TTFT of the downstream agents; None where less than a decode step an agent is hideable.

    Hideable is all of the serial TTFT but one decode step, for the first token still has to be decoded once the
    upstream's last token is known. Where the caches hold nearly everything, what is left is noise.
    """
    step = decode_step_ms(serial)
    before, after = median_ttft_ms(serial)[1:], median_ttft_ms(other)[1:]
    hideable = sum(before) - step * len(before)
    return None if hideable < step * len(before) else (sum(before) - sum(after)) / hideable


def exactness(reference: Sequence[Run], runs: Sequence[Run]) -> Exactness:
    """Compare runs with the reference run of their index; with the first one where they are the reference themselves.

    Prompts are compared by the digest of the ids that the engine was given, outputs id by id.
    """
    itself = reference is runs or list(reference) == list(runs)
    by_index = {run.index: reference[0] if itself else run for run in reference}
    compared = [run for run in (runs[1:] if itself else runs) if run.index in by_index]
    differences = [text for run in compared if (text := difference(by_index[run.index], run))]
    return Exactness(len(compared) - len(differences), len(compared), differences[0] if differences else "")


def difference(reference: Run, run: Run) -> str:
    """The first thing in which a run differs from another, or an empty string."""
    for old, new in zip(reference.result.agents, run.result.agents, strict=True):
        if old.prompt_digest != new.prompt_digest:
            return f"run {run.index}, {new.name}: other prompt ids"
        if old.output_ids != new.output_ids:
            pairs = zip(old.output_ids, new.output_ids, strict=False)
            at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(old.output_tokens, new.output_tokens))
            return f"run {run.index}, {new.name}: output ids differ from token {at} on"
    return ""


def render(runs: Sequence[Run]) -> str:
    """The whole report, one section for each set of `comparable` runs."""
    return "\n".join(_section(some) for some in comparable(runs))


def comparable(runs: Iterable[Run]) -> list[list[Run]]:
    """The runs in sets of the same conditions, whatever files they come from: one chain and its options, run by one
    commit with the same engines on the same machine. Only the mode differs within a set.
    """
    sets: dict[bytes, list[Run]] = {}
    for run in runs:
        sets.setdefault(_conditions(run), []).append(run)
    return list(sets.values())


def _conditions(run: Run) -> bytes:
    known = run.provenance
    fields = ("group", "devices", "engine", "model", "dtype")
    engines = [[engine.get(field) for field in fields] for engine in known.get("engines", [])]
    made_with = [known.get(key) for key in ("commit", "dirty", "machine")]
    chain = [run.profile, run.max_tokens, run.forced_lengths, run.temperature, run.seed]
    level = [run.exactness, run.result.grid]
    return msgspec.json.encode([chain, level, run.cache, run.session, run.append_tokens, engines, made_with])


def _section(runs: Sequence[Run]) -> str:
    by_mode = measured(runs)
    if not by_mode:
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
    lines += _machine(some) + _end_to_end(by_mode) + _agents_table(by_mode) + _findings(by_mode)
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


def _end_to_end(by_mode: dict[str, list[Run]]) -> list[str]:
    serial = by_mode.get("serial")
    lines = ["| E2E, ms | runs | mean | median | min | max | saved (medians) |", "|---|--:|--:|--:|--:|--:|--:|"]
    for mode, runs in by_mode.items():
        spread = Spread.of([run.e2e_ms for run in runs])
        saved = "-"
        if serial and mode != "serial":
            saved = f"{saved_percent(statistics.median(run.e2e_ms for run in serial), spread.median):.1f} %"
        lines.append(
            f"| {mode} | {len(runs)} | {spread.mean:,.0f} | {spread.median:,.0f} | {spread.least:,.0f} "
            f"| {spread.greatest:,.0f} | {saved} |"
        )
    extra = (
        statistics.median(
            run.wall_ms - run.e2e_ms for mode, runs in by_mode.items() if mode != "presend" for run in runs
        )
        if any(mode != "presend" for mode in by_mode)
        else 0.0
    )
    lines += ["", f"By the daemon's clock; its clients see {extra:,.0f} ms more (messages and events)."]
    if "presend" in by_mode:
        lines.append(
            "presend is what a client of a stock server can do by itself, so it is timed by the client: agents in "
            "series, each one's static prefix sent ahead at its upstream's first token."
        )
    return [*lines, ""]


def _agents_table(by_mode: dict[str, list[Run]]) -> list[str]:
    first = next(iter(by_mode.values()))
    lines = ["| TTFT / total, ms (medians) | " + " | ".join(by_mode) + " |", "|---|" + "--:|" * len(by_mode)]
    for at, agent in enumerate(first[0].result.agents):
        cells = [f"{median_ttft_ms(runs)[at]:,.0f} / {median_total_ms(runs)[at]:,.0f}" for runs in by_mode.values()]
        lines.append(f"| {agent.name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _findings(by_mode: dict[str, list[Run]]) -> list[str]:
    lines = []
    serial = by_mode.get("serial")
    for mode, runs in by_mode.items():
        facts = []
        if serial:
            equal = exactness(serial, runs)
            against = "the first serial run" if mode == "serial" else "the serial runs"
            detail = f" ({equal.first_difference})" if equal.first_difference else ""
            facts.append(f"exact {equal.exact} of {equal.compared} against {against}{detail}")
            if mode != "serial" and _agents(runs) > 1:
                facts.append(f"downstream TTFT {100 * downstream_ttft_ratio(serial, runs):.1f} % of serial")
                share = hidden_share(serial, runs)
                facts.append(f"hidden ÷ hideable TTFT {'-' if share is None else f'{share:.2f}'}")
        facts.append(_cached(runs))
        facts.append(_token_match(runs))
        facts.append(_appends(runs))
        lines.append(f"- {mode}: " + "; ".join(fact for fact in facts if fact))
    if serial:
        lines.append(f"- decode step, serial: {decode_step_ms(serial):.1f} ms")
    return lines


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


def _agents(runs: Sequence[Run]) -> int:
    return len(runs[0].result.agents)


def _ttft(agent: AgentResult) -> float:
    return agent.ttft_ms or 0.0
