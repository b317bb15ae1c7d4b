"""What a load test is made of, as values: the shape of its load, and a line of its results file. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from pingpong_bus.chain import Exactness
from profiles import Profile

How = Literal["auto", "serial", "ping-pong", "overlap", "round-robin"]
"""A mode of the daemon's; or round-robin: chain k in series on group k mod N, as clients of stock engines do."""
BUCKET = 1.01
"""Gaps are counted in buckets that are 1 % wide."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """When chains come: all at once, or by themselves."""

    at_once: int | None = None
    """So many together: how they share what there is."""
    rate: float | None = None
    """Chains a second on average, each independent of all others (a Poisson process), whether earlier ones have
    finished or not."""
    seconds: float | None = None
    """With `rate`: for how long they come."""

    def arrivals_ms(self, seed: str) -> list[float]:
        """When each chain is due, since the round's start; the same for the same seed."""
        if self.rate is None or self.seconds is None:
            return [0.0] * (self.at_once or 0)
        draw, at_s, found = random.Random(seed), 0.0, []
        while (at_s := at_s + draw.expovariate(self.rate)) < self.seconds:
            found.append(at_s * 1e3)
        return found or [0.0]

    def __str__(self) -> str:
        return f"{self.at_once} at once" if self.rate is None else f"{self.rate:g} a second for {self.seconds:g} s"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Of the chains, which differ in their token ids alone."""

    prefix: int
    """Tokens of each agent's own text."""
    output: int
    """Tokens that each agent but the last writes."""
    last_output: int
    agents: int

    @classmethod
    def of(cls, profile: Profile) -> Shape:
        """Of chains of a profile, which is a line."""
        return cls(prefix=profile.prefix, output=profile.output, last_output=profile.last_output, agents=profile.agents)

    def __str__(self) -> str:
        return f"{self.agents} agents, prefix {self.prefix}, output {self.output}"


class ChainRow(msgspec.Struct, frozen=True, kw_only=True):
    """One chain of a round."""

    due_ms: float
    """When it was to be submitted, since the round's start."""
    submitted_ms: float
    """When it was; what the load generator was late counts as the chain's time."""
    e2e_ms: float | None = None
    """From `due_ms` to its end, as the client sees it; None where it did not finish."""
    daemon_ms: float | None = None
    """Submission to last token, by the daemon's clock."""
    placement: str | None = None
    workers: list[str] = []
    """Per agent."""
    ttft_ms: list[float | None] = []
    """Per agent."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that prefix caches held, of all agents."""
    predicted_ms: float | None = None
    """What the daemon's cost model said of the placement."""
    error: str = ""


class Gaps(msgspec.Struct, kw_only=True):
    """Times between neighbouring tokens, counted in buckets: a round has tens of thousands."""

    counts: dict[int, int] = {}
    """By bucket: the k-th is around `BUCKET` ** k ms."""
    max_ms: float = 0.0

    def add(self, gaps_ms: Iterable[float]) -> None:
        """Count some more."""
        for gap in gaps_ms:
            bucket = round(math.log(max(gap, 1e-3), BUCKET))
            self.counts[bucket] = self.counts.get(bucket, 0) + 1
            self.max_ms = max(self.max_ms, gap)

    def merge(self, other: Gaps) -> None:
        """Count those of another round, too."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.max_ms = max(self.max_ms, other.max_ms)

    def percentile_ms(self, percent: float) -> float:
        """The least gap that so many percent do not pass, to within half a bucket; NaN of none."""
        wanted = math.ceil(sum(self.counts.values()) * percent / 100)
        for bucket in sorted(self.counts):
            wanted -= self.counts[bucket]
            if wanted <= 0:
                return min(BUCKET**bucket, self.max_ms)
        return math.nan


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a results file: all chains of one round, on one side."""

    benchmark: Literal["load"] = "load"
    side: str
    """Its name on the command line."""
    how: How
    decode_first: bool
    """Whether the engines ran the decode-first scheduler; otherwise vLLM's own."""
    groups: list[str]
    index: int
    """Rounds of one index have the same chains and arrivals on every side."""
    load: Load
    shape: Shape
    cache: Literal["cold", "warm"]
    """What prefix caches held before the round: nothing, or prefixes of the chains on every group."""
    warm_chains: int = 0
    """Of how many chains: as many as fit."""
    exactness: Exactness
    seed: int
    unloaded_ms: float
    """What one such chain took in series, alone, on the first side's daemon."""
    makespan_ms: float
    """First chain due to last one ended."""
    chains: list[ChainRow]
    gaps: dict[str, Gaps]
    """By the group that wrote the tokens."""
    missed_tokens: int = 0
    """Whose doorbells were dropped, so that a gap is too long."""
    others_cores: float = 0.0
    """Cores that processes of others kept busy meanwhile: with many, a slow round may be theirs."""
    cpu_s: float = 0.0
    """Seconds of cores that all daemons and the load generator used: idle ones use next to nothing."""
    provenance: dict[str, Any] = {}

    @property
    def finished(self) -> list[ChainRow]:
        """The chains that have finished."""
        return [chain for chain in self.chains if chain.e2e_ms is not None]
