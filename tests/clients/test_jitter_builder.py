"""The report of jitter: what it makes of a log, and that it takes bounded memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitter_log import BEGAN, CLOCK, GPU0, GPU1, an_hour, ended, jitter, line, steps, written
from pingpong_bus.log_records import GroupHealthChanged
from pingpong_client.jitter_builder import MOST_EPISODES, JitterBuilder
from pingpong_client.jitter_report import JitterReport
from pingpong_client.jitter_series import MOST_POINTS, Series


def report_of(lines: list[bytes], **span: float) -> JitterReport:
    builder = JitterBuilder(**span)
    builder.feed(lines)
    return builder.report()


def test_an_hour_with_an_episode() -> None:
    report = report_of([*an_hour(), b"foreign", b'{"cut', b"  "])
    assert (report.lines, report.foreign) == (729, 2)
    assert (report.began, report.ended) == (BEGAN, BEGAN + 3600.1)
    quiet, shaky = report.groups
    assert (quiet.worker, quiet.devices, quiet.tokens, quiet.late, quiet.episodes) == ("gpu0", [GPU0], 360_000, 360, 0)
    assert (quiet.p50_ms, quiet.p99_ms, quiet.worst_ms, quiet.usual_ms) == (8.6, 9.5, 14.0, 8.6)
    assert (shaky.worker, shaky.devices, shaky.episodes, shaky.lost_ms, shaky.chains) == ("gpu1", [GPU1], 1, 12_000, 2)
    assert shaky.avoided_seconds == pytest.approx(37.0)
    assert max(point.p99_ms for point in shaky.points) == 31.0
    [episode] = report.episodes
    assert (episode.state, episode.cause, episode.why) == ("over", "thermal_throttle", CLOCK)
    assert (episode.began, episode.ended) == (BEGAN + 1202, BEGAN + 1232)
    assert [(one.at - BEGAN, one.cause) for one in episode.causes] == [(1203, "unknown"), (1205, "thermal_throttle")]
    assert (episode.seconds, episode.tokens, episode.late, episode.worst_ms) == (30.0, 1800, 900, 75.0)
    [cause] = report.causes
    assert (cause.cause, cause.episodes, cause.seconds, cause.lost_ms, cause.chains) == (
        *("thermal_throttle", 1, 30.0),
        *(12_000.0, 2),
    )
    assert report.moved == 1
    assert report.moves_saved_ms == 1800.0
    assert (report.moves[0].agent, report.moves[0].worker, report.moves[0].to) == ("editor", "gpu1", "gpu0")


def test_the_order_of_files_does_not_matter_to_what_is_counted() -> None:
    forward = report_of(an_hour())
    lines = an_hour()
    half = len(lines) // 2
    other = report_of(lines[half:] + lines[:half])
    assert other.groups == forward.groups
    assert other.causes == forward.causes


def test_an_episode_lasts_from_its_first_late_token_to_its_last() -> None:
    """As a daemon on two H200s wrote it: the end is 5 s before "no late token for 5 s"."""
    recovering = GroupHealthChanged(worker="gpu1", state="recovering", was="degraded", cause=None, why="")
    lines = [written(21.25, jitter()), written(32.26, recovering), written(37.27, ended(seconds=7.0))]
    [episode] = report_of(lines).episodes
    assert (episode.began, episode.ended) == pytest.approx((BEGAN + 20.25, BEGAN + 27.25), abs=0.01)


def test_lines_outside_the_time_are_left_out() -> None:
    report = report_of(an_hour(), since=BEGAN + 600, until=BEGAN + 660.05)
    assert (report.began, report.ended) == (BEGAN + 600, BEGAN + 660)
    assert [group.tokens for group in report.groups] == [7000, 6000]
    assert report.episodes == []


def test_an_episode_that_goes_on_and_one_that_its_daemon_did_not_survive() -> None:
    degraded = GroupHealthChanged(worker="gpu1", state="degraded", was="healthy", cause="unknown", why="late")
    lines = [
        written(0, jitter("default-00c0de-gpu1-1")),
        written(1, degraded),
        written(2, jitter("default-2-00c0de-gpu1-1")),
        line(60, "daemon_started", instance="default", pid=8, socket="/run/x"),
        written(70, jitter("default-0beef0-gpu1-1", cause="power_throttle")),
        written(80, degraded),
        written(90, steps("gpu1", GPU1)),
    ]
    report = report_of(lines)
    assert {one.id: one.state for one in report.episodes} == {
        "default-00c0de-gpu1-1": "cut",
        "default-2-00c0de-gpu1-1": "going on",
        "default-0beef0-gpu1-1": "going on",
    }
    cut = next(one for one in report.episodes if one.id == "default-00c0de-gpu1-1")
    assert (cut.ended, cut.lost_ms) == (BEGAN + 60, None)
    assert report.causes == []  # nobody knows yet what they cost
    assert report.groups[0].episodes == 3
    assert report.groups[0].avoided_seconds == pytest.approx(59 + 10)


def test_an_episode_that_began_before_the_log() -> None:
    [episode] = report_of([written(100, ended(seconds=40.0))]).episodes
    assert (episode.began, episode.ended, episode.why, episode.causes) == (BEGAN + 60, BEGAN + 100, "", [])


def test_a_reason_is_never_told_of_another_cause() -> None:
    [episode] = report_of([written(0, jitter()), written(40, ended(cause="unknown"))]).episodes
    assert (episode.cause, episode.why) == ("unknown", f"taken for thermal throttle at first: {CLOCK}")


def test_episodes_are_bounded_and_the_costliest_stay() -> None:
    costs = [float(cost) for cost in range(2 * MOST_EPISODES)]
    random.Random(5).shuffle(costs)
    lines = []
    for number, cost in enumerate(costs):
        lines.append(written(number, jitter(f"default-1-{number}")))
        lines.append(written(number + 0.5, ended(f"default-1-{number}", lost_ms=cost, chains=[f"c{number}"])))
    report = report_of(lines)
    assert len(report.episodes) == MOST_EPISODES
    assert report.left_out == MOST_EPISODES
    assert min(one.lost_ms or 0.0 for one in report.episodes) >= MOST_EPISODES - 1
    assert report.causes[0].episodes == 2 * MOST_EPISODES
    assert report.causes[0].lost_ms == sum(costs)
    assert report.causes[0].chains == 2 * MOST_EPISODES


def test_a_year_takes_the_memory_of_an_hour() -> None:
    series = Series()
    for hour in range(365 * 24):
        series.add(BEGAN + hour * 3600, steps(p50_ms=8.0 + hour * 37 % 100 / 100))
    points = list(series.points())
    assert MOST_POINTS / 4 < len(points) <= MOST_POINTS
    assert sum(point.tokens for point in points) == 1000 * 365 * 24
    assert all(8.3 < point.p50_ms < 8.7 for point in points)
    assert all(len(sums.medians.tokens) <= 32 for sums in series._points.values())


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.integers(0, 1000), st.floats(0.1, 1000)),
        min_size=1,
        max_size=700,
    )
)
def test_joining_points_loses_nothing(found: list[tuple[float, int, float]]) -> None:
    series = Series()
    for at, tokens, p50_ms in found:
        series.add(BEGAN + at, steps(tokens=tokens, late=tokens, p50_ms=p50_ms, p99_ms=p50_ms, worst_ms=p50_ms))
    points = list(series.points())
    assert len(points) <= MOST_POINTS
    assert sum(point.tokens for point in points) == sum(tokens for _, tokens, _ in found)
    assert max(point.worst_ms for point in points) == max(p50_ms for _, _, p50_ms in found)
    assert [point.at for point in points] == sorted({point.at for point in points})
    lowest, highest = min(one for _, _, one in found), max(one for _, _, one in found)
    assert all(lowest <= point.p50_ms <= highest for point in points if point.tokens)


def test_another_programs_line_of_that_name_ends_nothing() -> None:
    report = report_of([written(0, jitter()), line(5, "daemon_started", instance=7)])
    assert [one.state for one in report.episodes] == ["going on"]


def test_a_clock_that_was_never_set_does_no_harm() -> None:
    report = report_of([b'{"event": "daemon_ready", "timestamp": "1970-01-01T00:00:05Z"}', *an_hour()])
    assert report.began == 5.0
    series = Series()
    series.add(-5.0, steps())
    series.add(1e300, steps())
    assert list(series.points()) == []
