"""Predictions on their way through the daemon: into results and answers, and back from how chains end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from chains_desk import Service, chain_reading
from engine_figures import H200
from pingpong_bus.errors import UsageError
from pingpong_bus.messages import PROTOCOL_VERSION, Explain, Explained, GroupHealth, Submit, SubmitOptions
from pingpongd.drift import IN_A_ROW
from pingpongd.recalibration import PAUSE_S

LINE = chain_reading([set(), {0}, {1}])


@pytest.fixture
def service() -> Iterator[Service]:
    """Chains on two groups that were measured."""
    found = Service(H200)
    yield found
    found.close()


class Clock:
    """Has chains take as much of what was predicted as a test likes: hops report that they ended at 4 ns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.took_ms = 0.0
        monkeypatch.setattr("pingpongd.planner.time", SimpleNamespace(monotonic_ns=self.started_ns))

    def started_ns(self) -> int:
        return 4 - int(self.took_ms * 1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def events(logs: list[Any], name: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] == name]


def predicted_ms(service: Service) -> float:
    """Of a chain in series on one idle group, with the outputs that the fake workers write, without a factor."""
    number = service.submit(LINE, "serial", group="a")
    with structlog.testing.capture_logs() as logs:
        service.settle()
    (entry,) = events(logs, "prediction")
    assert service.result(number).state == "finished"
    found: float = entry["predicted_ms"]
    return found


def test_a_result_says_what_was_predicted_and_keeps_it(service: Service) -> None:
    number = service.submit(LINE)
    begun = service.result(number)
    service.settle()
    ended = service.result(number)
    assert ended.state == "finished"
    assert begun.predictions == ended.predictions
    assert {one.placement for one in ended.predictions} == {"serial", "ping-pong", "overlap"}
    assert ended.predicted_ms in [one.e2e_ms for one in ended.predictions if one.placement == ended.placement]


def test_a_chain_that_is_told_its_placement_has_that_prediction(service: Service) -> None:
    number = service.submit(LINE, "ping-pong")
    found = service.result(number)
    assert [one.placement for one in found.predictions] == ["ping-pong"]
    assert found.predicted_ms == found.predictions[0].e2e_ms
    assert found.why == "asked for"


def test_engines_that_were_not_measured_predict_nothing() -> None:
    service = Service()
    found = service.result(service.submit(LINE))
    assert (found.predictions, found.predicted_ms) == ([], None)
    service.close()


def test_a_chain_that_ended_is_compared_and_learned_from(service: Service, clock: Clock) -> None:
    usual = predicted_ms(service)
    clock.took_ms = 1.1 * usual
    with structlog.testing.capture_logs() as logs:
        service.submit(LINE, "serial", group="a")
        service.settle()
    (entry,) = events(logs, "prediction")
    assert entry["ratio"] == pytest.approx(1.1, abs=0.01)
    assert entry["learned"]
    assert (entry["placement"], entry["groups"], entry["load"]) == ("serial", ["a"], 0)
    later = service.result(service.submit(LINE, "serial", group="a"))
    assert later.predictions[0].factor == pytest.approx(1.02, abs=0.005)


def test_chains_that_met_others_lost_hops_or_were_cancelled_teach_nothing(service: Service, clock: Clock) -> None:
    clock.took_ms = 10_000.0
    first = service.submit(LINE, "serial", group="a")
    service.submit(LINE, "serial", group="a")  # and the first one's load has changed
    with structlog.testing.capture_logs() as logs:
        service.settle()
    assert {entry["chain"]: entry["learned"] for entry in events(logs, "prediction")}[first] is False

    service.submit(LINE, "serial")
    cancelled = service.submit(LINE, "serial", group="b")
    service.run(service.chains.cancel, cancelled)
    service.lose(service.fleet.workers["a"])
    with structlog.testing.capture_logs() as logs:
        service.settle()
    assert not any(entry["learned"] for entry in events(logs, "prediction"))


def test_an_engine_that_has_drifted_is_measured_anew_when_nothing_runs_on_it(service: Service, clock: Clock) -> None:
    usual = predicted_ms(service)
    clock.took_ms = 1.3 * usual
    for _ in range(IN_A_ROW):
        service.submit(LINE, "serial", group="a")
        service.settle()
    planner = service.chains.runs.planner
    assert planner.drifted == {"a"}
    service.submit(LINE, "serial", group="a")
    service.run(service.chains.tick)
    assert service.fleet.calibrated == [], "a hop runs there"
    service.settle()

    async def tick() -> None:
        service.chains.tick()
        await asyncio.sleep(0)

    service.run(tick)
    assert service.fleet.calibrated == ["a"]
    assert planner.drifted == set()
    assert service.result(service.submit(LINE, "serial", group="a")).predictions[0].factor == 1.0


def test_on_a_grid_chains_are_compared_with_the_first_of_their_like(service: Service, clock: Clock) -> None:
    usual = predicted_ms(service)
    planner = service.chains.runs.planner

    def run(times: float) -> None:
        clock.took_ms = times * usual
        for _ in range(IN_A_ROW):
            service.submit(LINE, "serial", group="a", exactness="grid")
            service.settle()

    run(1.3)
    run(1.3)
    assert planner.drifted == set()
    run(1.6)
    assert planner.drifted == {"a"}
    planner.measured("a")
    run(1.6)
    run(1.6)
    assert planner.drifted == set()


def test_chains_that_a_measurement_made_way_for_teach_nothing(service: Service, clock: Clock) -> None:
    clock.took_ms = 10.0
    planner = service.chains.runs.planner
    with structlog.testing.capture_logs() as logs:
        for group in ("a", "b"):
            with planner.measuring(group):
                service.submit(LINE, "serial", group="a")
            service.settle()
        service.submit(LINE, "serial", group="a")
        with planner.measuring("a"):
            service.settle()
    assert [entry["learned"] for entry in events(logs, "prediction")] == [False, True, False]


def test_an_engine_that_could_not_be_measured_is_left_alone_for_a_while(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.chains.runs.planner.drifted.add("a")
    service.fleet.workers["a"].reachable = False
    now = 1000.0

    async def tick() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        service.chains.tick()
        await asyncio.sleep(0)
        monkeypatch.undo()

    service.run(tick)
    service.run(tick)
    assert service.fleet.calibrated == ["a"]
    now += PAUSE_S
    service.run(tick)
    assert service.fleet.calibrated == ["a", "a"]


def explain(service: Service, **options: Any) -> Explained:
    request = Explain(request=3, version=PROTOCOL_VERSION, chain=LINE, options=SubmitOptions(**options))
    found: Explained = service.run(service.chains.explain, request)
    return found


def test_explain_predicts_and_keeps_nothing(service: Service) -> None:
    found = explain(service)
    assert found.request == 3
    assert {one.placement for one in found.predictions} == {"serial", "ping-pong", "overlap"}
    assert [one.e2e_ms for one in found.predictions] == sorted(one.e2e_ms for one in found.predictions)
    assert found.chosen in found.predictions
    assert (found.placement, bool(found.why)) == (found.chosen.placement, True)
    assert (service.store.jobs, service.chains.live(), service.fleet.running()) == ({}, [], [])


def test_explain_tells_what_a_mode_takes_and_refuses_what_a_submission_would_be_refused(service: Service) -> None:
    found = explain(service, mode="overlap", group="b")
    assert found.chosen is not None
    assert (found.placement, found.chosen.groups) == ("overlap", ("b", "b", "b"))
    alone = Explain(
        request=3, version=PROTOCOL_VERSION, chain=chain_reading([set()]), options=SubmitOptions(mode="ping-pong")
    )
    found = service.run(service.chains.explain, alone)
    assert found.chosen in found.predictions, "auto does not look at it"
    with pytest.raises(UsageError, match="cannot alternate"):
        explain(service, mode="ping-pong", group="b")
    with pytest.raises(UsageError, match='with placement "overlap" agents share a device'):
        explain(service, mode="overlap", exactness="grid")


def test_explain_predicts_for_a_named_group_that_will_be_back(service: Service) -> None:
    service.fleet.workers["a"].state = "starting"
    found = explain(service, group="a")
    assert found.chosen in found.predictions
    assert {name for one in found.predictions for name in one.groups} == {"a", "b"}


def test_chains_that_come_together_are_started_one_after_the_other(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pingpongd.chains._TURN_S", -1.0)  # every chain takes too long
    request = Submit(request=1, version=PROTOCOL_VERSION, chain=LINE)

    async def start() -> list[int]:
        for _ in range(2):
            await service.chains.submit(request)
        counts = []
        service.chains.start_waiting()
        for _ in range(3):
            counts.append(service.chains.counts().get("running", 0))
            await asyncio.sleep(0)
        return counts

    assert service.run(start) == [1, 2, 2]


def test_explain_without_figures_names_the_placement_alone() -> None:
    service = Service()
    found = explain(service)
    assert (found.predictions, found.chosen, found.placement) == ([], None, "serial")
    service.close()


def test_a_group_that_decodes_late_is_a_matter_of_its_placements_and_not_of_its_engine(
    service: Service, clock: Clock
) -> None:
    usual = predicted_ms(service)
    clock.took_ms = 1.3 * usual
    planner = service.chains.runs.planner
    with structlog.testing.capture_logs() as logs:
        for _ in range(IN_A_ROW):
            service.submit(LINE, "serial", group="a")
            planner.degraded("a")
            service.settle()
    assert [entry["learned"] for entry in events(logs, "prediction")] == [True] * IN_A_ROW
    assert planner.drifted == set()
    assert service.result(service.submit(LINE, "serial", group="a")).predictions[0].factor > 1.1


def test_a_chain_that_began_on_a_slow_group_is_predicted_slow_and_teaches_nothing(
    service: Service, clock: Clock
) -> None:
    clock.took_ms = usual = predicted_ms(service)
    service.fleet.workers["a"].health = GroupHealth(state="degraded", slowdown=2.0)
    number = service.submit(LINE, "serial", group="a")
    begun = service.result(number).predicted_ms
    with structlog.testing.capture_logs() as logs:
        service.settle()
    (entry,) = events(logs, "prediction")
    assert entry["predicted_ms"] == pytest.approx(2 * usual, rel=0.01)
    assert entry["learned"] is False
    service.fleet.workers["a"].health = GroupHealth()
    again = service.result(service.submit(LINE, "serial", group="a")).predicted_ms
    assert begun == pytest.approx(2 * again, rel=0.01) if again is not None else False
