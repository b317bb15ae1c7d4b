"""A decoding group in virtual time, for tests of the jitter watchdog: what its worker would tell of each second."""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from statistics import NormalDist
from typing import Any

from pingpong_bus.log_records import Record
from pingpong_bus.messages import DeviceState, EngineLimits, Heartbeat, HostState, SchedulerState, StepCounts, StepKind
from pingpong_bus.step_times import BUCKETS, bucket_of, middle_ms, upper_ms
from pingpongd.jitter_episodes import Named
from pingpongd.jitter_group import JitterGroup

LIMITS = EngineLimits(
    engine="x 1",
    model="m",
    max_model_len=4096,
    vocabulary_size=100,
    block_size=16,
    kv_tokens=10_000,
    max_num_seqs=8,
    device="some device",
)
"""Of any engine: groups with the same are of a kind."""

_LABELS = (1, 2, 3, 5, 9, 17)


@cache
def _noise(sigma: float, outliers: float) -> tuple[float, ...]:
    """Cumulated probabilities of a token's time by its bucket's distance from 1 ms, lognormal, some twice as long."""
    normal = NormalDist(0.0, sigma)
    shares = [0.0] * BUCKETS
    for factor, weight in ((1.0, 1.0 - outliers), (2.0, outliers)):
        for bucket in range(BUCKETS):
            low, high = (_log(upper_ms(at) / factor / 100.0) for at in (bucket - 1, bucket))
            shares[bucket] += weight * (normal.cdf(high) - normal.cdf(low))
    return tuple(accumulate(shares))


def _log(ratio: float) -> float:
    return math.log(ratio)


class Group:
    """Decodes some answers at once; a token's time follows the answers, the context, and what a test makes of it."""

    def __init__(
        self, seed: int = 0, *, step_ms: float = 16.0, sigma: float = 0.06, outliers: float = 0.001, name: str = "a"
    ) -> None:
        self.random = random.Random(seed)
        self.step_ms = step_ms
        self.sigma, self.outliers = sigma, outliers
        self.now = 1000.0
        self.jitter = JitterGroup(Named(name, [f"cpu:{name}"], "test"))
        self.records: list[tuple[float, Record]] = []
        self.steps = 0
        self.gc_ms = self.engine_gc_ms = self.loop_late_ms = 0.0
        self.allowed: float | None = None
        """Beside appends, as the scheduler says."""

    def usual_ms(self, rows: int, context: int) -> float:
        """What a token takes."""
        return self.step_ms * (1.0 + 0.06 * (rows - 1) + 0.10 * context / 8192)

    def counts(
        self, seconds: float = 1.0, *, rows: int = 1, context: int = 500, kind: StepKind = "decode", slow: float = 1.0
    ) -> StepCounts:
        """Tokens of so many seconds of decoding, `slow` times as slow as usual."""
        ms = self.usual_ms(rows, context) * slow
        steps = max(1, int(1000.0 * seconds / ms))
        cumulated = _noise(self.sigma, self.outliers)
        shift = ms / 100.0
        found: Counter[int] = Counter()
        worst = total = 0.0
        for _ in range(steps):
            drawn = middle_ms(bisect.bisect_left(cumulated, self.random.random())) * shift
            found[bucket_of(drawn)] += rows
            worst, total = max(worst, drawn), total + drawn * rows
        self.steps += steps * rows
        return StepCounts(
            kind=kind,
            decodes=_LABELS[bisect.bisect_right(_LABELS, rows) - 1],
            context=0 if context < 1024 else 1 << (context.bit_length() - 1),
            buckets=dict(found),
            worst_ms=worst,
            total_ms=total,
        )

    def stalled(self, counts: StepCounts, ms: float) -> StepCounts:
        """One more token that took so long."""
        self.steps += 1
        buckets = dict(counts.buckets)
        buckets[bucket_of(ms)] = buckets.get(bucket_of(ms), 0) + 1
        return StepCounts(
            kind=counts.kind,
            decodes=counts.decodes,
            context=counts.context,
            buckets=buckets,
            worst_ms=max(ms, counts.worst_ms),
            total_ms=counts.total_ms + ms,
        )

    def second(
        self,
        *counts: StepCounts,
        waiting: int | None = None,
        silent: bool = False,
        chains: Sequence[str] = ("c1",),
        look: tuple[HostState, Sequence[DeviceState]] | None = None,
        peers: Sequence[Group] = (),
    ) -> list[Record]:
        """A second passes; with `silent` nothing was heard of the worker."""
        self.now += 1.0
        if look is not None:
            self.jitter.look(*look)
        if not silent:
            self._beat(counts, (1 if counts else 0) if waiting is None else waiting)
        records = self.jitter.judge(
            self.now,
            heartbeat_s=1.0,
            allowed=1.5,
            quiet_s=10.0,
            chains=chains,
            peers=[peer.jitter for peer in peers],
        )
        self.records += [(self.now, record) for record in records]
        return records

    def run(self, seconds: int, **how: Any) -> None:
        """Decode for so many seconds."""
        look = how.pop("look", None)
        for _ in range(seconds):
            self.second(self.counts(**how), look=look)

    def idle(self, seconds: int, **how: Any) -> None:
        """Do nothing for so many seconds."""
        for _ in range(seconds):
            self.second(chains=(), **how)

    @property
    def health(self) -> str:
        return self.jitter.state.health

    def of(self, kind: type[Any]) -> list[Any]:
        """The records of a kind."""
        return [record for _, record in self.records if isinstance(record, kind)]

    def _beat(self, counts: Sequence[StepCounts], waiting: int) -> None:
        scheduler = None
        if self.allowed is not None or self.engine_gc_ms:
            scheduler = SchedulerState(
                steps=self.steps,
                step_ms=self.step_ms,
                decode_ms=self.step_ms,
                target_ms=self.step_ms * (self.allowed or 1.5),
                budget_tokens=32,
                reason="",
                append_tokens=0,
                withheld_steps=0,
                gc_ms=self.engine_gc_ms,
            )
        beat = Heartbeat(
            at_ns=int(self.now * 1e9),
            open_hops=1,
            output_tokens=self.steps,
            rss_bytes=0,
            steps=self.steps,
            waiting=waiting,
            predicted_step_ms=2 * self.step_ms,
            scheduler=scheduler,
            step_counts=list(counts),
            loop_late_ms=self.loop_late_ms,
            gc_ms=self.gc_ms,
        )
        self.jitter.beat(beat, self.now, 1.0)
