"""What a run with many groups has shown: a row of numbers, and a table of rows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from figures import percentile
from group_load import ChainSize, Load
from groups_config import GroupsSettings, decode_ms, expected_chain_ms
from pingpong_bus.messages import ChainResult
from provenance import command_line, provenance
from supervisor_meter import CpuReading

_ROOM = 0.7
"""Of a core: how much of it the supervisor may use before what it answers has to wait noticeably."""


class Spread(msgspec.Struct, frozen=True):
    """A distribution; of nothing it is all zero."""

    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of these values."""
        if not values:
            return cls()
        return cls(round(statistics.median(values), 3), round(percentile(values, 99), 3), round(max(values), 3))


class GroupsRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file. Times are real ones, in ms, except where said."""

    simulated: bool = True
    baseline: str = "the timing model: a chain alone, with its downstream prefills hidden"
    groups: int
    time_scale: float
    token_stretch: int
    mode: str
    calibrated: bool
    """Whether `auto` had figures to predict from; else it goes by its rule of thumb."""
    load: float
    """Chains at once per group, in the mean."""
    prefix: int
    output: int
    """Tokens that each agent but the last writes, each of which stands for `token_stretch`."""
    chains: int
    failed: list[str]
    placements: dict[str, int]
    start_s: float
    """Of the daemon, until all groups served."""
    seconds: float
    """From the first chain's submission to the last one's end."""
    supervisor_cpu_s: dict[str, float]
    """In these seconds, by thread."""
    idle_cpu_ms_per_group_second: float
    """Of the supervisor without chains, per group and second: heartbeats, and looks at who beats."""
    cpu_ms_per_chain: float
    """Of the supervisor, without what it uses when idle and asked for `status` as often."""
    cpu_ms_per_hop: float
    chains_per_s: float
    """That such a load comes to in real time, by the timing model."""
    real_time_cores: float
    """What the supervisor would use in real time: for so many chains, and for heartbeats."""
    real_time_loop_cores: float
    """Of it, the thread with the event loop: the one that cannot be spread over cores."""
    loop_waited_s: float
    """For how long the thread with the event loop could have run here and had no core, for others used them: the
    latencies below have this in them."""
    real_time_groups: float
    """Extrapolated: groups of such engines under such load at which the event loop would use 0.7 of a core, were what
    it uses in proportion to the groups. Where a chain costs more the more groups there are, it is fewer."""
    messages_per_chain: float
    """Of workers about hops, heard by the supervisor."""
    messages_per_s: float
    """With heartbeats."""
    accepted_ms: Spread
    """From a client's submission to the daemon's answer: all its prompts are checked, prepared by a worker and kept."""
    queued_ms: Spread
    """From the submission's arrival to the chain's start."""
    dispatch_ms: Spread
    """From an upstream's first token to the opening of its downstream's hop by its worker."""
    status_ms: Spread
    """A client's `status`: twice a second the event loop is asked, and answers in turn."""
    idle_status_ms: Spread
    collections: int
    """Full collections of garbage by the supervisor's Python meanwhile."""
    collection_ms: Spread
    """For how long each held everything up."""
    chain_ratio: Spread
    """A chain's time over the timing model's."""
    itl_ratio: Spread
    """An agent's mean time from token to token over the timing model's, one agent alone on its group."""
    downstream_ttft_model_ms: Spread
    """Of downstream agents, in ms of model time."""
    worker_cpu_us_per_token: float
    worker_mib: float
    """Proportional share of a worker's memory, its engine included."""
    supervisor_mib: float
    supervisor_descriptors: int
    bell_connections: Spread
    """To each worker's doorbell."""
    sweeper_cores: float
    provenance: dict[str, Any]


def summarize(
    settings: GroupsSettings,
    size: ChainSize,
    load: Load,
    *,
    mode: str,
    calibrated: bool,
    load_share: float,
    start_s: float,
    quiet: CpuReading,
    idle: CpuReading,
    busy: CpuReading,
    idle_status_ms: Sequence[float],
    status_ms: Sequence[float],
    collections_ms: Sequence[float],
    supervisor_mib: float,
    supervisor_descriptors: int,
    worker_mib: Sequence[tuple[float, float]],
    bells: dict[str, int],
) -> GroupsRow:
    """Boil a run down to a row.

    Args:
        quiet: what was used without chains.
        idle: the same while `status` was asked for, as it was under load.
        busy: what was used under load.
    """
    scale, results = settings.time_scale, [one.result for one in load.finished]
    chains, hops = max(1, len(results)), max(1, len(results) * size.agents)
    idle_share, total_s = sum(idle.supervisor.values()) / idle.at_s, sum(busy.supervisor.values())
    chain_cpu_s = max(0.0, total_s - idle_share * busy.at_s)
    quiet_share = sum(quiet.supervisor.values()) / quiet.at_s
    loop_share = busy.supervisor["loop"] / max(total_s, 1e-9)
    heard = sum(count for kind, count in load.events.items() if kind not in ("started", "ended"))
    tokens = sum(agent.output_tokens for result in results for agent in result.agents)
    model_ms = expected_chain_ms(settings, size)
    chains_per_s = settings.groups * load_share / model_ms * 1e3 * scale
    cores = chain_cpu_s / chains * chains_per_s + quiet_share
    return GroupsRow(
        groups=settings.groups,
        time_scale=scale,
        token_stretch=settings.token_stretch,
        mode=mode,
        calibrated=calibrated,
        load=load_share,
        prefix=size.prefix,
        output=size.output,
        chains=len(results),
        failed=load.failures[:10],
        placements=dict(Counter(str(result.placement) for result in results)),
        start_s=round(start_s, 1),
        seconds=round(busy.at_s, 1),
        supervisor_cpu_s={name: round(used, 2) for name, used in busy.supervisor.items()},
        idle_cpu_ms_per_group_second=round(quiet_share * 1e3 / settings.groups, 4),
        cpu_ms_per_chain=round(chain_cpu_s * 1e3 / chains, 2),
        cpu_ms_per_hop=round(chain_cpu_s * 1e3 / hops, 2),
        chains_per_s=round(chains_per_s, 2),
        real_time_cores=round(cores, 3),
        real_time_loop_cores=round(cores * loop_share, 3),
        loop_waited_s=round(busy.loop_waited, 2),
        real_time_groups=round(settings.groups * _ROOM / max(cores * loop_share, 1e-9)),
        messages_per_chain=round(heard / chains, 1),
        messages_per_s=round(heard / busy.at_s + settings.groups, 1),
        accepted_ms=Spread.of([one.accepted_ms for one in load.finished]),
        queued_ms=Spread.of([one.queued_ms for one in load.finished]),
        dispatch_ms=Spread.of([late for result in results for late in dispatch_times(result)]),
        status_ms=Spread.of(status_ms),
        idle_status_ms=Spread.of(idle_status_ms),
        collections=len(collections_ms),
        collection_ms=Spread.of(collections_ms),
        chain_ratio=Spread.of([(result.e2e_ms or 0.0) / model_ms for result in results]),
        itl_ratio=Spread.of([ratio for result in results for ratio in token_ratios(settings, result)]),
        downstream_ttft_model_ms=Spread.of(
            [(agent.ttft_ms or 0.0) / scale for result in results for agent in result.agents[1:]]
        ),
        worker_cpu_us_per_token=round(busy.workers * 1e6 / max(1, tokens), 1),
        worker_mib=round(statistics.mean(pss for _, pss in worker_mib), 1),
        supervisor_mib=supervisor_mib,
        supervisor_descriptors=supervisor_descriptors,
        bell_connections=Spread.of(list(bells.values())),
        sweeper_cores=round(busy.others.get("sweeper", 0.0) / busy.at_s, 4),
        provenance={**provenance(), "arguments": command_line()},
    )


def dispatch_times(result: ChainResult) -> list[float]:
    """Ms from each upstream's first token to the opening of the next agent's hop, where that was read ahead."""
    return [
        later.opened_ms - earlier.first_token_ms
        for earlier, later in zip(result.agents, result.agents[1:], strict=False)
        if later.opened_ms is not None and earlier.first_token_ms is not None and result.placement != "serial"
    ]


def token_ratios(settings: GroupsSettings, result: ChainResult) -> list[float]:
    """Of each agent, its time from token to token over the timing model's."""
    return [
        (agent.total_ms - agent.ttft_ms)
        / (agent.output_tokens - 1)
        / decode_ms(settings, agent.prompt_tokens + agent.output_tokens // 2)
        for agent in result.agents
        if agent.total_ms is not None and agent.ttft_ms is not None and agent.output_tokens > 1
    ]


def render(rows: Sequence[GroupsRow]) -> str:
    """A table in Markdown, a column for each row of results."""
    lines: list[tuple[str, list[str]]] = [
        ("groups", [str(row.groups) for row in rows]),
        ("time scale, tokens in one", [f"{row.time_scale:g}, {row.token_stretch}" for row in rows]),
        ("mode, placements", [f"{row.mode}, {row.placements}" for row in rows]),
        ("chains, failed", [f"{row.chains}, {len(row.failed)}" for row in rows]),
        ("start, s", [f"{row.start_s:.0f}" for row in rows]),
        ("supervisor: CPU ms per chain", [f"{row.cpu_ms_per_chain:.1f}" for row in rows]),
        ("CPU ms per hop", [f"{row.cpu_ms_per_hop:.1f}" for row in rows]),
        ("idle CPU ms per group and second", [f"{row.idle_cpu_ms_per_group_second:.3f}" for row in rows]),
        ("CPU s by thread", [", ".join(f"{k} {v:.1f}" for k, v in row.supervisor_cpu_s.items()) for row in rows]),
        ("event loop waited for a core, s of s", [f"{row.loop_waited_s:.0f} of {row.seconds:.0f}" for row in rows]),
        ("chains per s in real time", [f"{row.chains_per_s:.1f}" for row in rows]),
        ("cores in real time (event loop)", [f"{r.real_time_cores:.2f} ({r.real_time_loop_cores:.2f})" for r in rows]),
        ("groups at 0.7 of a core, extrapolated", [f"{row.real_time_groups:.0f}" for row in rows]),
        ("messages per chain; per s", [f"{row.messages_per_chain:.0f}; {row.messages_per_s:.0f}" for row in rows]),
        ("submit to Accepted, ms", [_spread(row.accepted_ms) for row in rows]),
        ("submit to start, ms", [_spread(row.queued_ms) for row in rows]),
        ("first token to downstream's hop, ms", [_spread(row.dispatch_ms) for row in rows]),
        ("status, idle, ms", [_spread(row.idle_status_ms) for row in rows]),
        ("status, loaded, ms", [_spread(row.status_ms) for row in rows]),
        ("full collections, ms each", [f"{row.collections}: {_spread(row.collection_ms)}" for row in rows]),
        ("chain over model", [_spread(row.chain_ratio) for row in rows]),
        ("token to token over model", [_spread(row.itl_ratio) for row in rows]),
        ("downstream TTFT, model ms", [_spread(row.downstream_ttft_model_ms) for row in rows]),
        ("worker CPU us per token", [f"{row.worker_cpu_us_per_token:.0f}" for row in rows]),
        ("MiB: supervisor, a worker", [f"{row.supervisor_mib:.0f}, {row.worker_mib:.1f}" for row in rows]),
        ("descriptors; bell connections", [f"{r.supervisor_descriptors}; {_spread(r.bell_connections)}" for r in rows]),
        ("sweeper, cores", [f"{row.sweeper_cores:.3f}" for row in rows]),
    ]
    (name, first), *rest = lines
    table = [f"| {name} | {' | '.join(first)} |", "|---" * (len(rows) + 1) + "|"]
    return "\n".join(table + [f"| {name} | {' | '.join(cells)} |" for name, cells in rest])


def _spread(spread: Spread) -> str:
    return f"{spread.p50:.4g} / {spread.p99:.4g} / {spread.max:.4g}"
