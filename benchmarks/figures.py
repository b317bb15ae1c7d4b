"""What a set of runs says, as numbers. Pure: runs in, numbers out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

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


Rows = dict[str, list[Run]]
"""The measured runs of each row, by its name."""


def measured(runs: Iterable[Run]) -> Rows:
    """Runs by row, warm-up left out: by daemon as they come, and in the order in which reports show modes."""
    kept = [run for run in runs if not run.warmup]
    daemons = list(dict.fromkeys(run.daemon for run in kept))
    kept.sort(key=lambda run: (daemons.index(run.daemon), RUN_MODES.index(run.mode), run.group))
    return {row: [run for run in kept if run.row == row] for row in dict.fromkeys(run.row for run in kept)}


def baseline(rows: Rows, row: str) -> list[Run]:
    """The runs that a row is compared with: its own where it is a baseline itself; none where they are not there."""
    return rows.get(rows[row][0].baseline, [])


def pairs(reference: Iterable[Run], runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Runs side by side with the reference's run of the same index."""
    by_index = {run.index: run for run in reference}
    return [(by_index[run.index], run) for run in runs if run.index in by_index]


def saved_percent(baseline_ms: float, ms: float) -> float:
    """How much less time than the baseline, in percent; negative where it is more."""
    return 100 * (1 - ms / baseline_ms)


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that at least so many percent of the values do not pass."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


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


def downstream(run: Run) -> list[int]:
    """The agents that read others; only they have something to hide."""
    if run.reads is None:
        return list(range(1, len(run.result.agents)))
    return [at for at, reads in enumerate(run.reads) if reads]


def downstream_ttft_ratio(serial: Sequence[Run], other: Sequence[Run]) -> float:
    """Downstream agents' TTFT as a share of the serial one: sums of medians."""
    after, before = median_ttft_ms(other), median_ttft_ms(serial)
    agents = downstream(other[0])
    return sum(after[at] for at in agents) / sum(before[at] for at in agents)


def hidden_share(serial: Sequence[Run], other: Sequence[Run]) -> float | None:
    """Hidden ÷ hideable TTFT of the downstream agents, each run against the serial one of its index: the median.

    None where there are no such runs, or less than a decode step an agent is hideable.
    """
    shares = hidden_shares(serial, other)
    return statistics.median(shares) if shares else None


def hidden_shares(serial: Sequence[Run], other: Sequence[Run]) -> list[float]:
    """Of each run, hidden ÷ hideable TTFT.

    Hideable is all of the serial TTFT but one decode step, for the first token still has to be decoded once the
    upstream's last token is known. Where the caches hold nearly everything, what is left is noise: then there is none.
    """
    shares = []
    for before, after in pairs(serial, other):
        agents = downstream(after)
        step = decode_step_ms([before])
        serial_ms = sum(_ttft(before.result.agents[at]) for at in agents)
        hidden_ms = serial_ms - sum(_ttft(after.result.agents[at]) for at in agents)
        hideable_ms = serial_ms - step * len(agents)
        if agents and hideable_ms >= step * len(agents):
            shares.append(hidden_ms / hideable_ms)
    return shares


def devices_used(runs: Sequence[Run]) -> int:
    """Devices that the chain's agents ran on, of the run that used most: comparisons are fair on as many."""
    used = []
    for run in runs:
        devices = {engine["group"]: engine.get("devices", []) for engine in run.provenance.get("engines", [])}
        workers = {agent.worker for agent in run.result.agents}
        used.append(sum(len(devices.get(worker, [worker])) for worker in workers))
    return max(used)


def decode_ms_by_group(run: Run) -> dict[str, float]:
    """Of each group, milliseconds a token of the agents that it decoded, their first tokens left out."""
    spent: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for agent in run.result.agents:
        if agent.output_tokens > 1:
            spent[agent.worker] = spent.get(agent.worker, 0.0) + (agent.total_ms or 0.0) - _ttft(agent)
            tokens[agent.worker] = tokens.get(agent.worker, 0) + agent.output_tokens - 1
    return {group: spent[group] / tokens[group] for group in spent}


def decode_slowdown(serial: Sequence[Run], other: Sequence[Run]) -> dict[str, float]:
    """Of each group, what a token takes in a run over what a token of the same agents takes in series, wherever that
    ran: medians over the runs. What reading ahead hides and what it costs in decoding are two numbers.
    """
    ratios: dict[str, list[float]] = {}
    for before, after in pairs(serial, other):
        for group, ms in decode_ms_by_group(after).items():
            agents = [
                old
                for old, new in zip(before.result.agents, after.result.agents, strict=True)
                if new.worker == group and new.output_tokens > 1 and old.output_tokens > 1
            ]
            if agents:
                series = sum((agent.total_ms or 0.0) - _ttft(agent) for agent in agents)
                ratios.setdefault(group, []).append(ms / (series / sum(agent.output_tokens - 1 for agent in agents)))
    return {group: statistics.median(some) for group, some in sorted(ratios.items())}


class InterToken(msgspec.Struct, frozen=True):
    """Gaps between neighbouring tokens of one device group, in ms."""

    p50: float
    p99: float
    greatest: float
    count: int


def inter_token(runs: Iterable[Run]) -> dict[str, InterToken]:
    """Of each group, the gaps of all runs together; empty where the runs do not have them."""
    gaps: dict[str, list[int]] = {}
    for run in runs:
        for device in run.gaps:
            gaps.setdefault(device.group, []).extend(device.gaps_us)
    return {
        group: InterToken(percentile(some, 50) / 1e3, percentile(some, 99) / 1e3, max(some) / 1e3, len(some))
        for group, some in sorted(gaps.items())
        if some
    }


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
    # The daemons of a suite run side by side: there the engines are part of the row.
    beside = run.suite or engines
    return msgspec.json.encode([chain, level, run.cache, run.session, run.append_tokens, beside, made_with])


def _agents(runs: Sequence[Run]) -> int:
    return len(runs[0].result.agents)


def _ttft(agent: AgentResult) -> float:
    return agent.ttft_ms or 0.0
