"""What the rounds of a load test say, as numbers and as Markdown. Pure: rounds in, text out."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from figures import percentile, saved_percent
from load_rows import Gaps, Round

_NOISE_CORES = 0.2
"""A round beside which others used fewer is taken for quiet."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All rounds of one side under one load."""

    side: str
    how: str
    decode_first: bool
    rounds: int
    chains: int
    finished: int
    e2e_mean_ms: float
    e2e_median_ms: float
    e2e_p90_ms: float
    e2e_max_ms: float
    makespan_ms: float
    """Mean of the rounds."""
    chains_per_s: float
    tokens_per_s: float
    """Both over the makespans."""
    ttft_mean_ms: float
    ttft_p99_ms: float
    """Of agents that read another."""
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    goodput_share: float
    """Chains that ended within the limit, of all that came."""
    goodput_per_s: float
    placements: dict[str, int]
    """How many chains were placed how."""
    saved: list[float]
    """Percent of the baseline's mean end-to-end time, round by round, of rounds in which all chains finished on both:
    a mean of those that did says nothing where the slow ones did not. Empty of the baseline itself."""


def limit_ms(rounds: Sequence[Round], goodput_ms: float | None, goodput_times: float) -> float:
    """The end-to-end limit: as given, or a multiple of the time that a chain takes alone in series."""
    return goodput_ms if goodput_ms is not None else goodput_times * rounds[0].unloaded_ms


def comparable(rounds: Sequence[Round]) -> list[list[Round]]:
    """Rounds of the same chains under the same load by one commit, apart from others; of each only indexes that every
    side has. The daemons of a suite run side by side: there the engines are part of the side."""
    found: dict[tuple[object, ...], list[Round]] = {}
    for one in rounds:
        known = one.provenance
        made_with = (known.get("suite") or _device(one), known.get("commit"), bool(known.get("dirty")))
        key = (one.load, one.shape, one.cache, one.exactness, one.seed, *made_with)
        found.setdefault(key, []).append(one)
    return [_complete(some) for some in found.values()]


def _complete(rounds: list[Round]) -> list[Round]:
    sides = {one.side for one in rounds}
    having = Counter(index for index, _ in {(one.index, one.side) for one in rounds})
    kept = [one for one in rounds if having[one.index] == len(sides)]
    return kept or rounds


def _device(one: Round) -> tuple[str, ...]:
    return tuple(f"{engine.get('device')} {engine.get('model')}" for engine in one.provenance.get("engines", []))


def summary(rounds: Sequence[Round], baseline: Sequence[Round], limit: float) -> Summary:
    """What the rounds of one side say, against those of another.

    Args:
        limit: a chain that takes longer does not count as goodput, in ms.
    """
    finished = [chain for one in rounds for chain in one.finished]
    e2e = [chain.e2e_ms or 0.0 for chain in finished] or [math.nan]
    ttft = [ms for chain in finished for ms in chain.ttft_ms[1:] if ms is not None] or [math.nan]
    gaps = Gaps()
    for one in rounds:
        for some in one.gaps.values():
            gaps.merge(some)
    seconds = sum(one.makespan_ms for one in rounds) / 1e3
    chains = sum(len(one.chains) for one in rounds)
    good = sum(ms <= limit for ms in e2e)
    before = {one.index: _mean_e2e_ms(one) for one in baseline if _whole(one)}
    return Summary(
        side=rounds[0].side,
        how=rounds[0].how,
        decode_first=rounds[0].decode_first,
        rounds=len(rounds),
        chains=chains,
        finished=len(finished),
        e2e_mean_ms=statistics.fmean(e2e),
        e2e_median_ms=statistics.median(e2e),
        e2e_p90_ms=percentile(e2e, 90),
        e2e_max_ms=max(e2e),
        makespan_ms=statistics.fmean(one.makespan_ms for one in rounds),
        chains_per_s=len(finished) / seconds,
        tokens_per_s=sum(chain.output_tokens for chain in finished) / seconds,
        ttft_mean_ms=statistics.fmean(ttft),
        ttft_p99_ms=percentile(ttft, 99),
        itl_p50_ms=gaps.percentile_ms(50),
        itl_p99_ms=gaps.percentile_ms(99),
        itl_max_ms=gaps.max_ms,
        goodput_share=good / chains,
        goodput_per_s=good / seconds,
        placements=dict(Counter(chain.placement or "none" for chain in finished)),
        saved=[
            saved_percent(before[one.index], _mean_e2e_ms(one))
            for one in rounds
            if one.side != baseline[0].side and _whole(one) and one.index in before
        ],
    )


def _whole(one: Round) -> bool:
    return len(one.finished) == len(one.chains)


def _mean_e2e_ms(one: Round) -> float:
    return statistics.fmean(chain.e2e_ms or 0.0 for chain in one.finished)


def summaries(rounds: Sequence[Round], baseline: str | None, limit: float) -> list[Summary]:
    """One for each side, the baseline first.

    Args:
        rounds: comparable ones.
        baseline: a side's name; None, or where there is none of it: a round-robin side, else the last one.
    """
    by_side: dict[str, list[Round]] = {}
    for one in rounds:
        by_side.setdefault(one.side, []).append(one)
    base = baseline if baseline in by_side else _usual_baseline(rounds)
    names = [base, *(name for name in by_side if name != base)]
    return [summary(by_side[name], by_side[base], limit) for name in names]


def _usual_baseline(rounds: Sequence[Round]) -> str:
    return next((one.side for one in rounds if one.how == "round-robin"), rounds[-1].side)


Column = tuple[str, Callable[[Summary], str]]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


_TIMES: list[Column] = [
    ("side", lambda found: found.side),
    ("how", lambda found: f"{found.how}, {'decode first' if found.decode_first else 'stock'}"),
    ("rounds", lambda found: str(found.rounds)),
    ("chains", lambda found: f"{found.finished} of {found.chains}"),
    ("e2e mean", lambda found: _ms(found.e2e_mean_ms)),
    ("saved", lambda found: _saved(found.saved)),
    ("median", lambda found: _ms(found.e2e_median_ms)),
    ("p90", lambda found: _ms(found.e2e_p90_ms)),
    ("max", lambda found: _ms(found.e2e_max_ms)),
    ("makespan", lambda found: _ms(found.makespan_ms)),
    ("chains/s", lambda found: f"{found.chains_per_s:.3f}"),
    ("tokens/s", lambda found: f"{found.tokens_per_s:.1f}"),
]
_STEPS: list[Column] = [
    ("side", lambda found: found.side),
    ("TTFT mean", lambda found: _ms(found.ttft_mean_ms)),
    ("TTFT p99", lambda found: _ms(found.ttft_p99_ms)),
    ("ITL p50", lambda found: _ms(found.itl_p50_ms)),
    ("ITL p99", lambda found: _ms(found.itl_p99_ms)),
    ("ITL max", lambda found: _ms(found.itl_max_ms)),
    ("goodput", lambda found: f"{100 * found.goodput_share:.0f} %"),
    ("goodput chains/s", lambda found: f"{found.goodput_per_s:.3f}"),
    ("placed", lambda found: ", ".join(f"{count} {name}" for name, count in sorted(found.placements.items()))),
]


def _saved(percents: Sequence[float]) -> str:
    if not percents:
        return "-"
    middle = f"{statistics.median(percents):+.1f} %"
    return middle if len(percents) == 1 else f"{middle} ({min(percents):+.1f} to {max(percents):+.1f})"


def render(
    rounds: Sequence[Round], *, baseline: str | None = None, goodput_ms: float | None = None, goodput_times: float = 2.0
) -> str:
    """All of it as Markdown; times in ms."""
    return "\n\n".join(
        _section(some, baseline, limit_ms(some, goodput_ms, goodput_times)) for some in comparable(rounds)
    )


def _section(rounds: Sequence[Round], baseline: str | None, limit: float) -> str:
    found = summaries(rounds, baseline, limit)
    first = rounds[0]
    where = ", ".join(sorted({*_device(first)})) or "unknown devices"
    about = (
        f"{len(first.groups)} groups, {where}; {first.cache} caches; exactness {first.exactness}. One chain alone in "
        f"series took {_ms(first.unloaded_ms)} ms. Times in ms; saved: of the mean of {found[0].side}, median of the "
        f"rounds; TTFT: of agents that read another; goodput: chains that ended within {_ms(limit)} ms."
    )
    lines = [f"## {first.load}: {first.shape}", "", about, "", *_table(_TIMES, found), "", *_table(_STEPS, found)]
    if (others := max(one.others_cores for one in rounds)) >= _NOISE_CORES:
        lines += ["", f"Other processes kept up to {others:.1f} cores busy in a round: times are of a shared machine."]
    if missed := sum(one.missed_tokens for one in rounds):
        lines += ["", f"{missed} doorbells were dropped: some gaps are too long."]
    if errors := Counter(chain.error for one in rounds for chain in one.chains if chain.error):
        lines += ["", *(f"{count} times: {error}" for error, count in errors.most_common(5))]
    return "\n".join(lines)


def _table(columns: Sequence[Column], rows: Sequence[Summary]) -> list[str]:
    head = "| " + " | ".join(name for name, _ in columns) + " |"
    rule = "|" + "---|" * len(columns)
    return [head, rule, *("| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows)]
