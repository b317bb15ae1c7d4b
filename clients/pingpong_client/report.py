"""A status and a list of chains, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pingpong_bus.messages import (
    ChainState,
    ChainSummary,
    EngineFigures,
    Progress,
    SchedulerState,
    StatusReply,
    StoreStatus,
    WorkerStatus,
)
from pingpong_client.abilities import ability_lines
from pingpong_client.certificate_table import level_words
from pingpong_client.start_bars import amount
from pingpong_client.table import clean, clip, duration, format_table, milliseconds, number

_STAGE_CELLS = 24
_STATUS_WAITING = 5


def status_lines(status: StatusReply, chains: Sequence[ChainSummary] = (), width: int | None = None) -> list[str]:
    """The daemon, its workers, slots and chains.

    Args:
        chains: the latest, for what queued ones wait for.
    """
    models = len({worker.model for worker in status.workers}) > 1
    lines = [
        f"pingpongd {status.version}, instance {status.instance}: {status.state}",
        f"pid {status.pid}, up {duration(status.uptime_s)}",
        f"slots: {status.slots_free} of {status.slots_total} free, {number(status.slot_capacity)} tokens each",
        _chains_line(status.chains),
        *_waiting_lines(chains)[-_STATUS_WAITING:],
    ]
    if status.progress is not None:
        lines.append(clean(f"the daemon itself: {_how_far(status.progress)}", lines=False))
    if status.store is not None:
        lines.append(_store_line(status.store))
    if refused := ", ".join(f"{count:,} on {socket}" for socket, count in status.refused_frames.items() if count):
        lines.append(f"refused frames: {refused}")
    engines = dict.fromkeys(f"{it.limits.engine}, {it.limits.model}" for it in status.workers if it.limits)
    if engines:
        lines.append(clean(f"engine: {'; '.join(engines)}", lines=False))
    lines += [clean(line, lines=False) for line in _exactness_lines(status)]
    lines += [clean(line, lines=False) for line in ability_lines(status.workers)]
    lines.append("")
    rows = [
        [
            worker.name,
            ",".join(worker.devices),
            *([worker.model or "(default)"] if models else []),
            _state(worker),
            "-" if worker.pid is None else str(worker.pid),
            number(worker.hops),
            number(worker.output_tokens),
            f"{worker.rss_bytes / 2**20:,.0f}",
        ]
        for worker in status.workers
    ]
    headers = ["worker", "devices", *(["model"] if models else []), "state", "pid", "running", "tokens", "RSS MiB"]
    troubles = [trouble for worker in status.workers for trouble in _troubles(worker)]
    steps = [_step_line(worker.name, worker.scheduler) for worker in status.workers if worker.scheduler is not None]
    figures = [_figures_line(worker.name, worker.figures) for worker in status.workers if worker.figures is not None]
    unmeasured = [worker.name for worker in status.workers if worker.state == "ready" and worker.figures is None]
    if unmeasured:
        figures.append(clean(f"not measured: {', '.join(unmeasured)}", lines=False))
    if width is not None:
        steps = [clip(line, width) for line in steps]
        figures = [clip(line, width) for line in figures]
    if not rows:
        return [*lines, "no workers yet"]
    table = format_table(headers, rows, right=range(len(headers) - 4, len(headers)), width=width)
    return [
        *lines,
        *table,
        "running: agents that it works on now; tokens: written since its own start",
        *figures,
        *steps,
        *troubles,
    ]


def list_lines(chains: Sequence[ChainSummary], width: int | None = None) -> list[str]:
    """One line per chain."""
    if not chains:
        return ["no chains"]
    rows = [
        [
            chain.id,
            chain.name,
            chain.state,
            chain.placement or "-",
            chain.exactness,
            f"{chain.finished_agents}/{chain.agents}",
            duration(chain.age_s),
            milliseconds(chain.e2e_ms),
        ]
        for chain in chains
    ]
    headers = ["id", "name", "state", "placement", "exactness", "agents", "age", "E2E ms"]
    return [*format_table(headers, rows, right=(5, 6, 7), width=width), *_waiting_lines(chains)]


def _troubles(worker: WorkerStatus) -> Iterable[str]:
    """What has befallen a worker since the daemon's start, and what does not fit in the table."""
    times = "twice" if worker.restarts == 1 else f"{worker.restarts + 1} times"
    facts = [f"started {times}"] if worker.restarts else []
    if worker.stage and not _in_table(worker):
        facts.append(worker.stage)
    if worker.progress is not None:
        facts.append(_how_far(worker.progress))
    if (health := worker.health).state != "healthy":
        why = f": {health.why}" if health.why else ""
        facts.append(f"{health.state} for {duration(health.since_s)}, {health.cause or 'unknown'}{why}")
    if worker.failure and worker.failure not in "".join(facts):
        facts.append(f"the last failure: {worker.failure}")
    if facts:
        yield clean(f"{worker.name}: {'; '.join(facts)}", lines=False)


def _how_far(progress: Progress) -> str:
    done = amount(progress)
    return f"{progress.stage}, {done}" if done else progress.stage


def _exactness_lines(status: StatusReply) -> Iterable[str]:
    """Levels of exactness that the engines offer, which is the default, and why not "grid" where they do not."""
    limits = [(worker.name, worker.limits) for worker in status.workers if worker.limits is not None]
    if not limits:
        return
    levels = ["fast"]
    cells = [each.grid_tokens for _, each in limits]
    if all(cells):
        levels.append(level_words("grid", max(cells)))
    if all(each.batch_invariant for _, each in limits):
        levels.append("invariant")
    yield f"exactness: {'; '.join(levels)}; {status.exactness} by default"
    for name, each in limits:
        if not each.grid_tokens and each.grid_refusal:
            yield f"no grid on {name}: {each.grid_refusal}"


def _step_line(name: str, state: SchedulerState) -> str:
    """What the decode-first scheduler of a worker did last."""
    return (
        f"{name}: step {milliseconds(state.step_ms)} ms, alone {milliseconds(state.decode_ms)}, "
        f"target {milliseconds(state.target_ms)}; {number(state.budget_tokens)} append tokens: {state.reason}"
    )


def _figures_line(name: str, figures: EngineFigures) -> str:
    """What a worker's engine was measured to take, alone."""
    facts = []
    if figures.decode:
        facts.append(f"decode {milliseconds(figures.decode[0][1])} ms a token")
    tokens, ms = figures.prefill[-1] if figures.prefill else (0, 0.0)
    if ms:
        facts.append(f"prefill {tokens / ms * 1000:,.0f} tokens/s")
    if figures.step_p50_ms:
        facts.append(f"jitter {figures.step_p99_ms / figures.step_p50_ms:.2f} (p99/p50)")
    return clean(f"{name}: {', '.join(facts) or 'measured'}", lines=False)


def _in_table(worker: WorkerStatus) -> bool:
    """Whether its stage is short enough for a column; of one that serves it says nothing."""
    return worker.state == "ready" or len(worker.stage) <= _STAGE_CELLS


def _state(worker: WorkerStatus) -> str:
    told = worker.stage and worker.state not in ("ready", worker.stage) and _in_table(worker)
    return f"{worker.state} ({worker.stage})" if told else worker.state


def _chains_line(counts: Mapping[ChainState, int]) -> str:
    """The daemon counts the ends that it has seen; the store has older ones as well."""
    live = [f"{counts[state]} {state}" for state in ("running", "queued") if counts.get(state)]
    ended = [f"{counts[state]} {state}" for state in ("finished", "failed", "cancelled") if counts.get(state)]
    parts = [", ".join(live)] if live else []
    parts += [f"{', '.join(ended)} since the daemon's start"] if ended else []
    return f"chains: {'; '.join(parts) or 'none'}"


def _waiting_lines(chains: Iterable[ChainSummary]) -> list[str]:
    """Chains that wait for more than their turn, or of which an agent does, and for what."""
    return [
        clean(f"{chain.id}{' is queued' if chain.state == 'queued' else ''}: {chain.why}", lines=False)
        for chain in chains
        if chain.why
    ]


def _store_line(store: StoreStatus) -> str:
    line = f"store: {store.path}, {number(store.chains)} chains kept in all, {store.bytes / 2**20:,.1f} MiB"
    if store.pending:
        line += f", {number(store.pending)} changes not on disk yet"
    if store.error:
        line += f"; it cannot be written: {store.error}"
    return clean(line, lines=False)
