"""A chain's result, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pingpong_bus.messages import AgentResult, ChainResult
from pingpong_client.certificate_table import level_words
from pingpong_client.guesses import (
    all_drafts,
    guessed_words,
    is_step,
    model_label,
    seam_words,
    several_models,
    tokens_a_step,
)
from pingpong_client.live import agent_block
from pingpong_client.table import clean, format_table, milliseconds, number
from pingpong_client.timeline_account import STEP_UNKNOWN, taken_prediction

_QUEUED = 0.01
"""From this part of the predicted time on, what a chain took in the queue is told."""


def texts(result: ChainResult, *, without: Iterable[str] = ()) -> str:
    """Each agent's text with its headline, but for the agents that have been shown."""
    shown = set(without)
    return "".join(agent_block(agent.name, agent.text) for agent in result.agents if agent.name not in shown)


def result_table(result: ChainResult, width: int | None = None) -> list[str]:
    """Figures of each agent, and of the chain in the last lines.

    Models have a column where there are several, tokens a step where some were guessed; of a step between agents the
    column of workers says what it is.
    """
    agents = result.agents
    cells: dict[str, list[str]] = {
        "agent": [agent.name for agent in agents],
        "model": [model_label(agent) or "-" for agent in agents] if several_models(agents) else [],
        "worker": [f"({agent.kind})" if is_step(agent) else agent.worker or "-" for agent in agents],
        "prompt": ["-" if is_step(agent) else number(agent.prompt_tokens) for agent in agents],
        "cached": ["-" if is_step(agent) else number(agent.cached_tokens) for agent in agents],
        "output": [f"{number(agent.output_tokens)}{' chars' if is_step(agent) else ''}" for agent in agents],
        "a step": [_pace(agent) for agent in agents] if any(agent.drafts for agent in agents) else [],
        "TTFT ms": ["-" if is_step(agent) else milliseconds(agent.ttft_ms) for agent in agents],
        "total ms": [milliseconds(agent.total_ms) for agent in agents],
        "finish": [_finish(agent) for agent in agents],
    }
    headers = [name for name, column in cells.items() if column or not agents]
    rows = [[cells[name][at] for name in headers] for at in range(len(agents))]
    right = [at for at, name in enumerate(headers) if name not in ("agent", "model", "worker", "finish")]
    lines = format_table(headers, rows, right=right, width=width)
    notes = [f"{agent.name}: {clean(note, lines=False)}" for agent in agents for note in _notes(agent)]
    guessed = all_drafts(agents)
    told = [guessed_words(guessed)] if guessed is not None else []
    return [*lines, *notes, *told, *_attempt_lines(agents), *_predicted_lines(result), _ending(result)]


def _pace(agent: AgentResult) -> str:
    pace = tokens_a_step(agent.drafts)
    return "-" if pace is None else f"{pace:.2f}"


def _finish(agent: AgentResult) -> str:
    """How it ended; a step has no reasons to stop but one."""
    return agent.state if is_step(agent) else agent.finish_reason or agent.state


def _notes(agent: AgentResult) -> Iterable[str]:
    """What is worth telling of an agent beside its figures."""
    for entry in agent.resumed:
        why = f": {entry.why}" if entry.why else ""
        if is_step(agent):
            yield f"begun again at {milliseconds(entry.at_ms)} ms{why}"
            continue
        yield f"resumed at {milliseconds(entry.at_ms)} ms, {number(entry.tokens)} tokens kept from {entry.worker}{why}"
    if agent.seam is not None and (taken_back := seam_words(agent.seam)):
        yield taken_back
    if agent.note:
        yield agent.note


def _attempt_lines(agents: Sequence[AgentResult]) -> list[str]:
    """Every start of the daemon raises the attempt of all agents that have not finished, also of those not begun."""
    names: dict[int, list[str]] = {}
    for agent in agents:
        names.setdefault(agent.attempt, []).append(agent.name)
    return [
        f"attempt {attempt}: {', '.join(names[attempt])} (the daemon was restarted, or they gave way to others)"
        for attempt in sorted(names)
        if attempt > 1
    ]


def _predicted_lines(result: ChainResult) -> Iterable[str]:
    """What was predicted, against what it took; `why` tells of the next best placement.

    Nothing of a chain that was held up by what no prediction knows: a lost worker, a restart of the daemon.
    """
    if result.predicted_ms is None or result.resumed or any(agent.attempt > 1 for agent in result.agents):
        return
    words = f"predicted {milliseconds(result.predicted_ms)} ms"
    if any(agent.finish_reason == "stop" for agent in result.agents):
        words += " with outputs of full length"  # how early an agent stops is not known before
    if result.state == "finished" and result.e2e_ms is not None and result.predicted_ms > 0:
        queued = min((agent.opened_ms for agent in result.agents if agent.opened_ms is not None), default=0.0)
        took = result.e2e_ms - queued
        predicted = taken_prediction(result)
        guess = predicted is not None and predicted.unknown_steps
        words += f", took {milliseconds(took)} ({STEP_UNKNOWN if guess else f'{took / result.predicted_ms - 1:+.1%}'})"
        if queued >= _QUEUED * result.predicted_ms:
            words += f" after {milliseconds(queued)} ms in the queue"
    yield words


def _ending(result: ChainResult) -> str:
    facts = [f"{result.id}: {result.state}"]
    if result.e2e_ms is not None:
        facts.append(f"E2E {milliseconds(result.e2e_ms)} ms")
    if result.placement:
        facts.append(f"{result.placement} ({result.why})" if result.why else result.placement)
    elif result.state == "queued" and result.why:
        facts.append(result.why)
    if result.exactness != "fast":
        facts.append(f"exactness {level_words(result.exactness, result.grid)}")
    if result.resumed:
        facts.append("resumed")
    if result.error and result.error != result.state:
        facts.append(result.error)
    return clean(", ".join(facts), lines=False)
