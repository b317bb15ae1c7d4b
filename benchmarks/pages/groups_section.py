"""What a supervisor of many groups uses, as Markdown."""

from __future__ import annotations

from pages.engine_sections import source
from pages.machines import version
from pages.markdown import NOTHING, number, opened, table
from pages.rows import Results, rows
from pages.views import GroupsRow, Spread


def many_groups(results: Results) -> list[str]:
    """How scheduling cost and latency grow with the number of groups."""
    if not results.groups:
        return []
    lines = opened(
        "Many groups",
        "**Simulated** engines that take what an H200 was measured to take, under the daemon of that commit. *Scale*: "
        "model time ÷ real time, so that few cores can stand for many machines; *in one*: tokens that one stands for, "
        "likewise; *cores* are what the supervisor would use in "
        "real time, *loop* the one thread of it that cannot be spread, *groups at 0.7* those at which that would "
        "use 0.7 of a core, extrapolated in proportion. Latencies are p50 / p99 / max in real ms; "
        "*chain* is its time ÷ that of the timing model for one alone with its downstream prefills hidden, p50 / p99; "
        "*waited* is how long the loop could have run and had no core, which the latencies have in them. "
        f"{source(results.groups)}",
    )
    found = sorted(rows(results.groups), key=lambda row: (row.mode, row.prefix, row.output, row.groups))
    header = ["mode, P, output; commit", "groups", "scale", "in one", "chains", "failed"]
    header += ["CPU ms a chain", "a hop", "cores", "loop"]
    header += ["groups at 0.7", "messages a chain", "idle CPU ms a group and s", "MiB", "descriptors"]
    lines += table(header, [_cost(row) for row in found])
    header = ["mode, P, output; commit", "groups", "in one"]
    header += ["accepted", "dispatch", "status", "status, idle", "chain", "waited, s"]
    lines += table(header, [_latency(row) for row in found])
    return lines


def _what(row: GroupsRow) -> str:
    return f"{row.mode}, {row.prefix:,}, {row.output * row.token_stretch:,}; {version(row.provenance)[:7] or NOTHING}"


def _cost(row: GroupsRow) -> list[str]:
    return [
        _what(row),
        number(row.groups),
        number(row.time_scale),
        number(row.token_stretch),
        number(row.chains),
        number(len(row.failed)),
        number(row.cpu_ms_per_chain, 1),
        number(row.cpu_ms_per_hop, 1),
        number(row.real_time_cores, 2),
        number(row.real_time_loop_cores, 2),
        number(row.real_time_groups),
        number(row.messages_per_chain),
        number(row.idle_cpu_ms_per_group_second, 3),
        number(row.supervisor_mib),
        number(row.supervisor_descriptors),
    ]


def _latency(row: GroupsRow) -> list[str]:
    chain = f"{number(row.chain_ratio.p50, 2)} / {number(row.chain_ratio.p99, 2)}"
    spreads = (row.accepted_ms, row.dispatch_ms, row.status_ms, row.idle_status_ms)
    counts = [number(row.groups), number(row.token_stretch)]
    return [_what(row), *counts, *(_spread(one) for one in spreads), chain, number(row.loop_waited_s, 1)]


def _spread(spread: Spread) -> str:
    """Nothing where there was none, which results have as zeros."""
    values = (spread.p50, spread.p99, spread.max)
    return " / ".join(number(value, 1) for value in values) if any(values) else NOTHING
