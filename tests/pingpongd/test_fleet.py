"""The fleet with real processes: workers that die are replaced, crash loops end, and nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import signal
from operator import le
from pathlib import Path

import msgspec
import psutil
import pytest
import structlog
import zmq
import zmq.asyncio

from fleet_host import CHAIN, FleetHost, fleet_config, fleet_host
from pingpong_bus import codec
from pingpong_bus.errors import ConfigError, EngineError, EngineLost, Overloaded
from pingpong_bus.messages import PROTOCOL_VERSION, StartHop
from pingpong_worker.calibrator import NOISY
from pingpong_worker.config import SimulatedSettings
from pingpongd.process import WorkerProcess


async def runs_a_hop(host: FleetHost, name: str) -> None:
    """The group's worker does what workers are for."""
    hop = host.start_hop(name)
    await host.until(lambda: (hop, "finished") in [(end.hop, end.state) for end in host.notes.ended()], "the hop's end")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_worker_that_is_killed_is_replaced(folder: Path, number: signal.Signals) -> None:
    async with fleet_host(folder, fleet_config("ab")) as host:
        host.start_hop("a", max_tokens=4000)
        host.signal(number, "a")
        await runs_a_hop(host, "b")
        await host.serves_again("a")
        assert host.notes.lost == [("a", f'worker "a" is gone: it ended with signal {number.value}.')]
        assert host.notes.alive_when_lost == [False]
        assert sorted(host.notes.ready) == ["a", "a", "b"]
        assert host["a"].status().restarts == 1
        assert host["b"].status().restarts == 0
        assert host["a"].status().failure == f"it ended with signal {number.value}"
        assert len(host["a"].hops) == 0
        await runs_a_hop(host, "a")


async def test_one_that_ends_without_being_asked_is_replaced(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a")) as host:
        host.signal(signal.SIGTERM)
        await host.serves_again()
        assert host.notes.lost == [("a", 'worker "a" is gone: it ended with exit code 0.')]


async def test_an_engine_that_is_killed_takes_its_worker_along(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a")) as host:
        host.start_hop(max_tokens=4000)
        host.note()
        psutil.Process(host.engine_pid()).kill()
        await host.serves_again()
        ((name, why),) = host.notes.lost
        assert name == "a"
        assert "the engine's process ended with code -9" in why
        assert [end.state for end in host.notes.ended()] in (["lost"], [])
        await runs_a_hop(host, "a")


async def test_a_new_process_is_not_taken_for_the_old_one(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a")) as host:
        before = host["a"].identity
        host["a"].memory.computed([("digest", 1)], 1)
        host.signal(signal.SIGKILL)
        await host.serves_again()
        assert host["a"].identity != before
        assert not host["a"].memory.held
        assert host["a"].limits is not None


async def test_whoever_reads_a_worker_hears_its_successor(folder: Path) -> None:
    """The new process binds the endpoint of the old one, which could not tidy up, and subscribers find it."""
    async with fleet_host(folder, fleet_config("a")) as host:
        reader: zmq.asyncio.Socket = host.context.socket(zmq.SUB)
        reader.subscribe(b"")
        reader.connect(host["a"].bell)
        try:
            host.signal(signal.SIGKILL)
            await host.serves_again()
            while not await reader.poll(100):
                host.start_hop()
        finally:
            reader.close(0)


async def test_replacements_leave_nothing_behind(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a", restart={"give_up_after": 100})) as host:

        def held() -> tuple[int, int, int]:
            return psutil.Process().num_fds(), len(asyncio.all_tasks()), len(psutil.Process().children())

        for start in range(1, 7):
            host.signal(signal.SIGKILL)
            await host.serves_again(after=start)
            if start == 2:
                at_first = held()  # the first replacement brings threads and descriptors that stay
        await host.until(lambda: all(map(le, held(), at_first)), "as many descriptors, tasks and processes as before")


async def test_no_hop_starts_on_a_worker_that_is_gone(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a", restart={"backoff_s": 60.0, "backoff_max_s": 60.0})) as host:
        host.signal(signal.SIGKILL)
        await host.until(lambda: host["a"].state == "waiting", "back-off")
        assert host.fleet.ready == []
        assert host.fleet.views() == []
        assert host["a"].status().pid is None
        assert host["a"].status().stage == "starts again in 60 s: it ended with signal 9"
        with pytest.raises(EngineLost):
            host.start_hop()
        with pytest.raises(Overloaded, match="no engine serves now"):
            await host.fleet.prepare(CHAIN, {})
        assert not host.fleet.broken.done()


# ------------------------------------------------------------------------------------------------------- first starts


async def test_one_that_is_killed_while_it_loads_is_started_again(folder: Path) -> None:
    config = fleet_config("ab", simulated={"start_ms": 500.0})
    async with fleet_host(folder, config, start=False) as host:
        starting = host.start()
        await host.until(lambda: host["a"].state == "loading", "loading")
        host.signal(signal.SIGKILL, "a")
        await starting
        assert host["a"].number == 2
        assert host["b"].number == 1
        assert host.notes.lost == []  # it had not served
        await runs_a_hop(host, "a")


async def test_a_start_that_can_never_work_ends_the_daemons(folder: Path) -> None:
    config = fleet_config("ab", restart={"backoff_s": 60.0, "backoff_max_s": 60.0})
    config = msgspec.structs.replace(config, simulated=SimulatedSettings(max_num_seqs=0))
    async with fleet_host(folder, config, start=False) as host:
        with pytest.raises(ConfigError, match=r'group "[ab]": simulated.max_num_seqs: 0 is below 1'):
            await host.start()


async def test_one_that_dies_at_every_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    async with fleet_host(folder, fleet_config("a", restart={"give_up_after": 3}), start=False) as host:
        with pytest.raises(EngineError, match='group "a": crash loop: it ended 3 times within 600 s') as caught:
            await host.start()
        assert not isinstance(caught.value, EngineLost)
        assert host["a"].number == 3
        assert host["a"].state == "failed"


async def test_no_process_to_be_had(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, refused = WorkerProcess.spawn, [OSError(errno.EAGAIN, "Resource temporarily unavailable")]

    def scarce(*arguments: object) -> WorkerProcess:
        if refused:
            raise refused.pop()
        return spawn(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(WorkerProcess, "spawn", scarce)
    async with fleet_host(folder, fleet_config("a")) as host:
        assert host["a"].status().failure == "it could not be started: Resource temporarily unavailable"
        await runs_a_hop(host, "a")


async def test_a_start_that_takes_too_long(folder: Path) -> None:
    config = fleet_config("a", simulated={"start_ms": 600_000.0}, start_seconds=1.0)
    async with fleet_host(folder, config, start=False) as host:
        with pytest.raises(EngineError, match=r"did not start within 1 s \(it was at: loading the (model|weights)\)"):
            await host.start()


# -------------------------------------------------------------------------------------------------------- crash loops


async def test_a_crash_loop_ends_and_others_go_on(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("ab", restart={"give_up_after": 2})) as host:
        await host.kill_until_given_up("a")
        why = 'group "a": crash loop: it ended 2 times within 600 s, at last because it ended with signal 9.'
        assert host.notes.failed == [("a", why)]
        assert [worker.name for worker in host.fleet.ready] == ["b"]
        assert not host.fleet.broken.done()
        await runs_a_hop(host, "b")
        await host.kill_until_given_up("b")
        assert [name for name, _ in host.notes.failed] == ["a", "b"]
        with pytest.raises(EngineError, match=r'group "b": crash loop: it ended 2 times'):
            await host.fleet.broken


async def test_a_replacement_that_can_never_work(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a")) as host:
        host.fleet._config = msgspec.structs.replace(host.fleet._config, simulated=SimulatedSettings(kv_tokens=0))
        host.signal(signal.SIGKILL)
        with pytest.raises(ConfigError, match='group "a": simulated.kv_tokens: 0 is below 1'):
            await host.fleet.broken
        assert host["a"].state == "failed"
        assert host["a"].number == 2


async def test_a_configuration_that_was_read_again(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a")) as host:
        host.fleet.apply(
            msgspec.structs.replace(
                fleet_config("a", restart={"give_up_after": 1}), simulated=SimulatedSettings(kv_tokens=0)
            )
        )
        host.signal(signal.SIGKILL)
        with pytest.raises(EngineError, match=r'group "a": crash loop: it ended once within 600 s'):
            await host.fleet.broken


async def test_last_words_are_kept(folder: Path, tmp_path: Path) -> None:
    async with fleet_host(folder, fleet_config("a", log_dir=str(tmp_path / "log"))) as host:
        host.signal(signal.SIGKILL)
        await host.serves_again()
        (file,) = (tmp_path / "log").iterdir()
        assert file.read_text().splitlines()[0].endswith("it ended with signal 9")
        await host.fleet.stop()
        assert list((tmp_path / "log").iterdir()) == [file]  # an end that was asked for leaves none


# ------------------------------------------------------------------------------------------------------------ messages


async def test_garbage_is_counted_and_dropped(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a")) as host:
        stranger: zmq.asyncio.Socket = host.context.socket(zmq.DEALER)
        stranger.connect(host.runtime.workers)
        try:
            frames = [[b"garbage"], [], [b""], [b"two", b"frames"], [b"\x81" * 1000]]
            for frame in frames * 100:
                stranger.send_multipart(frame or [b""])
            await host.until(lambda: host.fleet.refused_frames >= 500, "all of it counted")
            assert host.fleet.refused_frames == 500
            await runs_a_hop(host, "a")
            assert host["a"].number == 1
        finally:
            stranger.close(0)


async def test_a_stranger_under_a_workers_name(folder: Path) -> None:
    """Only the process that was started speaks for a worker."""
    async with fleet_host(folder, fleet_config("a", restart={"backoff_s": 60.0, "backoff_max_s": 60.0})) as host:
        host.signal(signal.SIGSTOP)  # its connection stands, and its name is taken
        impostor: zmq.asyncio.Socket = host.context.socket(zmq.DEALER)
        impostor.setsockopt(zmq.IDENTITY, b"a.2")
        impostor.connect(host.runtime.workers)
        try:
            host["a"].number = 2
            host.fleet._link.attach(host["a"])
            impostor.send(b"garbage")
            await host.until(lambda: host.fleet.refused_frames == 1, "it is refused")
            assert host["a"].failure is None
        finally:
            host.fleet._link.detach(host["a"])
            host["a"].number = 1
            impostor.close(0)


async def test_a_worker_that_drains_takes_no_hop(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("a")) as host:
        start = StartHop(spec=host.spec("a", "chain/0/9"))
        host["a"].state = "draining"
        with pytest.raises(EngineLost, match="it is draining"):
            host.fleet.send(host["a"], start)


async def test_prefix_caches_are_emptied(folder: Path) -> None:
    async with fleet_host(folder, fleet_config("ab")) as host:
        host["b"].memory.computed([("digest", 1)], 1)
        await host.fleet.reset_prefix_caches()
        assert not host["b"].memory.held


async def test_a_group_is_measured_at_its_start_and_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = fleet_config("a", calibrate=True, simulated={"step_ms": 0.1}, decode_first={"final": 1.3, "inner": 3.0})
    async with fleet_host(folder, config) as host:
        first = host["a"].status().figures
        assert first is not None
        assert {one.itl_ratio for one in first.beside} <= {1.3, 3.0}
        await host.fleet.calibrate(host["a"])
        anew = host["a"].status().figures
        assert anew is not None
        assert anew != first
        host.signal(signal.SIGKILL)
        await host.serves_again("a")
        again = host["a"].status().figures
        assert again is not None
        assert again.cached or anew.step_p99_ms > NOISY * anew.step_p50_ms, "noisy figures are not kept"


async def test_what_a_worker_warns_of_is_logged_as_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = fleet_config("a", calibrate=True, simulated={"max_model_len": 64})
    with structlog.testing.capture_logs() as logs:
        async with fleet_host(folder, config) as host:
            assert host["a"].status().figures is None
    (warning,) = [entry for entry in logs if entry["event"] == "worker_output" and entry["log_level"] == "warning"]
    assert warning["worker"] == "a"
    assert "the engine was not measured" in warning["line"]
    assert "too small" in warning["line"], "the reason"


async def test_a_worker_of_another_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "PROTOCOL_VERSION", codec.PROTOCOL_VERSION + 1)
    async with fleet_host(folder, fleet_config("a"), start=False) as host:
        theirs = f"of protocol version {PROTOCOL_VERSION}, this side speaks {PROTOCOL_VERSION + 1}"
        with pytest.raises(ConfigError, match=f'group "a": The message is {theirs}'):
            await host.start()
        assert host.fleet.refused_frames == 1
