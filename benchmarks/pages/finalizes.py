"""Where the time goes between an upstream's last token and its downstream's first. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from figures import percentile
from pages.machines import version
from pages.markdown import series
from pages.views import FinalizeRun


class Account(msgspec.Struct, frozen=True):
    """Runs of one kind; medians."""

    mode: str
    session: str
    prefix: int
    commit: str
    """Empty where all runs are of one."""
    runs: int
    gave_up: int
    """Runs in which an append was still in flight."""
    ttft_ms: float
    ttft_p90_ms: float
    step_ms: float
    ratio: float
    """TTFT ÷ decode step, run by run."""
    stages_ms: dict[str, float]
    """In the order in which they happen; a stage that was not seen in a run is part of its next one."""

    @property
    def name(self) -> str:
        """As tables and pictures call it."""
        return f"{series(self.mode)}, {self.session}, P {self.prefix:,}{f', {self.commit}' if self.commit else ''}"


def accounts(runs: Iterable[FinalizeRun]) -> list[Account]:
    """By mode, session, prefix and commit, in the order of the rows."""
    kinds: dict[tuple[str, str, int, str], list[FinalizeRun]] = {}
    for run in runs:
        commit = version(run.provenance)
        kinds.setdefault((run.mode, run.session or "default", run.prefix, commit), []).append(run)
    several = len({commit for *_, commit in kinds}) > 1
    return [
        _account(mode, session, prefix, commit if several else "", some)
        for (mode, session, prefix, commit), some in kinds.items()
    ]


def _account(mode: str, session: str, prefix: int, commit: str, runs: Sequence[FinalizeRun]) -> Account:
    stages = stage_names(run.stages for run in runs)
    return Account(
        mode,
        session,
        prefix,
        commit,
        len(runs),
        sum(run.gave_up for run in runs),
        statistics.median(run.ttft_ms for run in runs),
        percentile([run.ttft_ms for run in runs], 90),
        statistics.median(run.step_ms for run in runs),
        statistics.median(run.ttft_ms / run.step_ms for run in runs),
        {name: statistics.median(run.stages[name] for run in runs if name in run.stages) for name in stages},
    )


def stage_names(stages: Iterable[dict[str, float]]) -> list[str]:
    """All names in the order in which they happen, where some dictionaries lack some."""
    names: list[str] = []
    for some in stages:
        at = 0
        for name in some:
            if name in names:
                at = names.index(name) + 1
            else:
                names.insert(at, name)
                at += 1
    return names


def largest(found: Sequence[Account], count: int) -> list[str]:
    """The stages that take most anywhere, so many of them, in the order in which they happen."""
    names = stage_names(one.stages_ms for one in found)
    most = {name: max(one.stages_ms.get(name, 0.0) for one in found) for name in names}
    kept = sorted(names, key=lambda name: -most[name])[:count]
    return [name for name in names if name in kept]
