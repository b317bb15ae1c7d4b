"""No alarm in days of decoding without jitter, in virtual time; and jitter that is put into such a day is found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from engine_figures import H200, scaled
from jitter_world import Group
from pingpong_bus.log_records import DecodeJitter, DecodeJitterEnded
from pingpong_bus.messages import StepCounts
from pingpong_bus.step_times import StepTimes

DAY_S = 24 * 3600
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def day(group: Group, seconds: int = DAY_S, others: tuple[Group, ...] = ()) -> None:
    """Chains come alone and in bursts, with pauses between; contexts grow while agents decode; appends come beside."""
    draw, left = group.random, seconds
    while left > 0:
        if draw.random() < 0.25:
            pause = min(left, int(draw.expovariate(1 / 60)) + 1)
            group.idle(pause)
            left -= pause
        rows, context = draw.choice((1, 1, 1, 2, 2, 3, 4, 6, 8)), draw.choice((200, 900, 3000, 9000, 25000))
        for _ in range(min(left, int(draw.expovariate(1 / 20)) + 1)):
            left -= 1
            share = draw.random()
            now = [group.counts(share if share > 0.05 else 1.0, rows=rows, context=context)]
            if share < 0.9:  # batches change within a second, and answers read ahead
                other = max(1, min(8, rows + draw.choice((-1, 1))))
                now.append(group.counts(1 - share, rows=other, context=context))
            if draw.random() < 0.2:
                slow = 1.0 + draw.random() * 0.45
                now.append(group.counts(0.3, rows=rows, context=context, kind="appends", slow=slow))
            if draw.random() < 0.1:
                stalled = group.counts(0.1, rows=rows, context=context, kind="prompts", slow=3.0)
                now.append(group.stalled(stalled, 700.0))
            group.second(*now)
            context += int(1000 / group.step_ms)


@pytest.mark.parametrize(
    ("seed", "step_ms", "sigma"), [(1, 8.6, 0.03), (2, 16.0, 0.08), (3, 60.0, 0.15), (4, 250.0, 0.2)]
)
def test_a_day_without_jitter_makes_no_alarm(seed: int, step_ms: float, sigma: float) -> None:
    group = Group(seed, step_ms=step_ms, sigma=sigma)
    day(group)
    assert group.records == []
    assert group.jitter.baseline.known_ms(("decode", 1, 0)) == pytest.approx(step_ms, rel=0.1)


def test_a_day_with_peers_and_figures_makes_no_alarm() -> None:
    first, second = Group(5), Group(6, step_ms=17.0, name="b")
    for group in (first, second):  # that were measured on a day on which all was a fifth faster
        group.jitter.measured(scaled(H200, 1.0, 13.5 / 8.6))
    for _ in range(DAY_S // 4):
        for group, peer in ((first, second), (second, first)):
            group.second(group.counts(rows=group.random.choice((1, 2))), peers=[peer])
    assert first.records == second.records == []


def test_bursts_in_a_day_are_found_and_nothing_else() -> None:
    group, draw = Group(7), random.Random(7)
    for found in range(40):
        day(group, int(draw.uniform(200, 600)))
        assert group.health == "healthy"
        assert len(group.of(DecodeJitter)) == found
        began = group.now
        group.run(12, slow=2.0)
        (when,) = [at for at, record in group.records if isinstance(record, DecodeJitter) and at > began]
        assert when - began <= 5
        over = group.now
        group.idle(30)
        ended = [at for at, record in group.records if isinstance(record, DecodeJitterEnded) and at > over]
        assert len(ended) == 1
        assert ended[0] - over <= 30


# ----------------------------------------------------------------------------------------------- what was recorded

CONTEXTS = {"gpu-12k": 8192, "gpu-4k": 4096}
"""Cells of the profiles that were recorded, in tokens of context."""


def recorded(groups: set[str]) -> list[tuple[int, list[float]]]:
    """Runs in series on H200s that nobody disturbed: the cell, and the gaps between tokens in ms."""
    found = []
    for name in ("h200x2-suite-one.jsonl", "h200x2-suite-two.jsonl"):
        for line in (RESULTS / name).read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            if row["mode"] != "serial":
                continue
            cell = CONTEXTS.get(row["profile"], 1024)
            gaps = [one["gaps_us"] for one in row.get("gaps", []) if one["group"] in groups]
            found += [(cell, [us / 1000 for us in run]) for run in gaps]
    return found


def seconds(cell: int, gaps: list[float]) -> list[StepCounts]:
    """What a worker would have told of a run, second by second."""
    found, times, passed = [], StepTimes(), 0.0
    for ms in gaps:
        times.add(ms)
        passed += ms
        if passed >= 1000:
            found.append(
                StepCounts(
                    kind="decode",
                    decodes=1,
                    context=cell,
                    buckets=times.buckets(),
                    worst_ms=times.worst_ms,
                    total_ms=passed,
                )
            )
            times, passed = StepTimes(), 0.0
    return found


@pytest.mark.parametrize(("groups", "runs"), [({"gpu0", "gpu1"}, 11), ({"tp2"}, 2)])
def test_a_day_of_replayed_steps_of_real_gpus_makes_no_alarm(groups: set[str], runs: int) -> None:
    known = recorded(groups)
    assert len(known) == runs
    group, left = Group(11), DAY_S
    while left > 0:
        cell, gaps = group.random.choice(known)
        for counts in seconds(cell, gaps[group.random.randrange(100) :]):
            group.steps += 100
            group.second(counts)
            left -= 1
        for _ in range(group.random.choice((0, 0, 0, 1, 5))):
            group.second()
            left -= 1
    assert group.records == []


def test_the_recorded_steps_slowed_down_do_make_one() -> None:
    known, group = recorded({"gpu0", "gpu1"}), Group(12)
    for cell, gaps in known:
        for counts in seconds(cell, gaps):
            group.steps += 100
            group.second(counts)
    assert group.records == []
    cell, gaps = known[0]
    for counts in seconds(cell, [1.35 * ms for ms in gaps])[:5]:
        group.steps += 100
        group.second(counts)
    (alarm,) = group.of(DecodeJitter)
    assert alarm.slowdown == pytest.approx(1.35, rel=0.1)
