"""A worker as a process of its own, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from pingpong_bus.chain import Agent, Chain, rendered_messages
from pingpong_bus.codec import decode_worker_message, encode
from pingpong_bus.errors import EngineError, EngineLost
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    AbortHop,
    Calibrate,
    Calibrated,
    DecodePace,
    Heartbeat,
    Hello,
    HopAppended,
    HopChecked,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopSegment,
    HopSpec,
    HopText,
    JoinedPrompt,
    KeptPrefix,
    Literals,
    Loading,
    NextScored,
    PrefixCacheReset,
    Prepare,
    Prepared,
    PreparedAgent,
    Ready,
    ReleaseHop,
    RequestFailed,
    ResetPrefixCache,
    Resume,
    Sampling,
    ScoreNext,
    SessionKind,
    StartHop,
    Stop,
    StreamRef,
    StreamSegment,
    SupervisorMessage,
    Welcome,
    WorkerFailed,
    WorkerMessage,
)
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.step_times import StepTimes
from pingpong_bus.token_log import TokenLogReader, TokenLogWriter
from pingpong_worker.calibrator import NOISY
from pingpong_worker.config import SimulatedSettings, WorkerConfig
from pingpong_worker.simulated_engine import SimulatedEngine
from pingpong_worker.simulated_prompts import SimulatedPrompts
from pingpong_worker.simulated_sessions import PrefixSession
from pingpong_worker.worker import Parts, Worker

HANG_S = 30
T = TypeVar("T")

CHAIN = Chain(
    name="two",
    agents=[
        Agent(name="writer", prompt="Write a line.", max_tokens=60, ignore_eos=True),
        Agent(name="critic", prompt="A long instruction. " * 20 + "Judge: {{writer}} Now.", max_tokens=20),
    ],
)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def all_gone(pids: Sequence[int]) -> None:
    async with asyncio.timeout(HANG_S):
        while not all(is_gone(pid) for pid in pids):
            await asyncio.sleep(0.02)


class Supervisor:
    """The other end of a worker's socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slab = Slab.create(8, 4096)
        self.messages: list[WorkerMessage] = []
        self.process: asyncio.subprocess.Process | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"ipc://{folder}/workers.sock")

    def config(self, **changes: object) -> WorkerConfig:
        values = {
            "name": "g0",
            "devices": ["cpu:0"],
            "engine": "simulated",
            "calibrate": False,
            "simulated": SimulatedSettings(step_ms=2.0),
            "slab_fd": self.slab.fd,
            "control": f"ipc://{self.folder}/workers.sock",
            "bell": f"ipc://{self.folder}/bus-g0.sock",
            "supervisor_pid": os.getpid(),
            "heartbeat_s": 0.05,
            **changes,
        }
        return WorkerConfig(**values)  # type: ignore[arg-type]

    async def spawn(self, config: WorkerConfig, *program: str) -> asyncio.subprocess.Process:
        """Start a worker, or another program that is one."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(program or ("-m", "pingpong_worker")),
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(self.slab.fd,),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config))
        self.process.stdin.close()
        return self.process

    async def send(self, message: SupervisorMessage) -> None:
        await self.send_frame(encode(message))

    async def send_frame(self, frame: bytes) -> None:
        await self._socket.send_multipart([b"g0", frame])

    async def receive(self, kind: type[T], **fields: object) -> T:
        """The next message of a kind with these fields; all on the way are kept in `messages`."""
        async with asyncio.timeout(HANG_S):
            while True:
                _, frame = await self._socket.recv_multipart()
                message = decode_worker_message(frame)
                self.messages.append(message)
                if isinstance(message, kind) and all(getattr(message, name) == fields[name] for name in fields):
                    return message

    async def start(self, config: WorkerConfig | None = None) -> Ready:
        await self.spawn(config or self.config())
        hello = await self.receive(Hello)
        assert self.process is not None
        assert (hello.worker, hello.pid) == ("g0", self.process.pid)
        await self.send(Welcome())
        return await self.receive(Ready)

    async def exit_code(self) -> int:
        assert self.process is not None
        async with asyncio.timeout(HANG_S):
            _, stderr = await self.process.communicate()
        self.stderr = stderr.decode()
        return self.process.returncode or 0

    def family(self) -> list[int]:
        """The worker and what it started."""
        assert self.process is not None
        worker = psutil.Process(self.process.pid)
        return [worker.pid, *(child.pid for child in worker.children(recursive=True))]

    def allocate(self) -> StreamRef:
        return msgspec.structs.replace(self.slab.allocate(), bell=f"ipc://{self.folder}/bus-g0.sock")

    def log(self, stream: StreamRef) -> tuple[list[int], LogState]:
        view = TokenLogReader(self.slab, stream).read()
        return view.ids, view.state

    async def close(self) -> None:
        if self.process is not None:
            if self.process.returncode is None:
                self.process.kill()
            await self.process.communicate()
        self._socket.close(0)
        self._context.term()
        self.slab.close()


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(tmp_path)
    yield supervisor
    await supervisor.close()


def spec(
    hop: str, output: StreamRef, prepared: PreparedAgent, sampling: Sampling, upstream: StreamRef | None = None
) -> HopSpec:
    segments: list[HopSegment] = []
    for segment in prepared.segments:
        if isinstance(segment, Literals):
            segments.append(segment)
        else:
            assert upstream is not None
            segments.append(StreamSegment(stream=upstream, expected=60))
    return HopSpec(hop=hop, output=output, segments=segments, sampling=sampling)


@pytest.mark.parametrize("session", ["prefix-cache", "streaming-input"])
async def test_second_hop_reads_the_first_as_it_is_written(supervisor: Supervisor, session: SessionKind) -> None:
    ready = await supervisor.start(supervisor.config(session=session))
    assert ready.limits.engine.startswith("simulated")
    await supervisor.send(Prepare(request=4, chain=CHAIN, inputs={}))
    prepared = (await supervisor.receive(Prepared, request=4)).agents
    writer, critic = supervisor.allocate(), supervisor.allocate()
    first = spec("two/writer/0", writer, prepared[0], Sampling(max_tokens=60, ignore_eos=True))
    match = JoinedPrompt(agent=CHAIN.agents[1], messages=rendered_messages(CHAIN, 1, {}), outputs={0: writer})
    second = spec("two/critic/0", critic, prepared[1], Sampling(max_tokens=20, ignore_eos=True), writer)
    await supervisor.send(StartHop(spec=first))
    await supervisor.send(StartHop(spec=msgspec.structs.replace(second, match=match)))
    checked = await supervisor.receive(HopChecked, hop="two/critic/0")
    assert checked.prompt_token_match is True

    of_critic = [message for message in supervisor.messages if getattr(message, "hop", "") == "two/critic/0"]
    appended = [message.append for message in of_critic if isinstance(message, HopAppended)]
    assert len(appended) >= 2  # the static prefix, and a part of what the writer wrote
    ended = next(message for message in of_critic if isinstance(message, HopEnded))
    assert (ended.state, ended.output_tokens, ended.session) == ("finished", 20, session)
    finalized = next(message for message in of_critic if isinstance(message, HopFinalized))
    assert finalized.prompt_tokens == appended[-1].sent + finalized.final_tokens
    read_ahead = next(message for message in of_critic if isinstance(message, HopFirstToken))
    text = "".join(message.text for message in of_critic if isinstance(message, HopText))
    ids, state = supervisor.log(critic)
    assert (bytes(ids).decode(), state) == (text, LogState.CLOSED)

    # The same hop once more, from closed logs and one request: series.
    again = supervisor.allocate()
    await supervisor.send(StartHop(spec=msgspec.structs.replace(second, hop="again", output=again)))
    await supervisor.receive(HopEnded, hop="again", state="finished")
    assert supervisor.log(again) == (ids, LogState.CLOSED)
    serial = next(m for m in supervisor.messages if isinstance(m, HopFinalized) and m.hop == "again")
    assert serial.prompt_digest == finalized.prompt_digest
    assert serial.final_tokens == serial.prompt_tokens
    assert read_ahead.at_ns > finalized.at_ns


async def test_stop_leaves_logs_open_and_leaves_no_process(supervisor: Supervisor) -> None:
    await supervisor.start()
    output = supervisor.allocate()
    endless = Sampling(max_tokens=4000, ignore_eos=True)
    await supervisor.send(StartHop(spec=HopSpec(hop="h", output=output, segments=[LITERAL], sampling=endless)))
    await supervisor.receive(HopFirstToken)
    family = supervisor.family()
    assert len(family) == 2
    await supervisor.send(Stop())
    ended = await supervisor.receive(HopEnded)
    assert (ended.state, ended.code) == ("lost", "EngineLost")
    assert await supervisor.exit_code() == 0
    ids, state = supervisor.log(output)
    assert (len(ids), state) == (ended.output_tokens, LogState.OPEN)
    await all_gone(family)


LITERAL = Literals(ids=[1, 2, 3])
PREFIX = Literals(ids=list(range(64)))


async def test_abort_hop_ends_one_hop(supervisor: Supervisor) -> None:
    await supervisor.start()
    output = supervisor.allocate()
    endless = Sampling(max_tokens=4000, ignore_eos=True)
    await supervisor.send(StartHop(spec=HopSpec(hop="h", output=output, segments=[LITERAL], sampling=endless)))
    await supervisor.receive(HopFirstToken)
    await supervisor.send(AbortHop(hop="h"))
    ended = await supervisor.receive(HopEnded, hop="h")
    assert ended.state == "aborted"
    assert len(supervisor.log(output)[0]) == ended.output_tokens
    heartbeat = await supervisor.receive(Heartbeat, open_hops=0)
    assert heartbeat.output_tokens == ended.output_tokens
    assert heartbeat.rss_bytes > 1_000_000
    await supervisor.send(AbortHop(hop="h"))
    await supervisor.receive(HopEnded, hop="h", state="aborted")


async def test_beats_tell_of_an_engine_that_stands_still(supervisor: Supervisor) -> None:
    await supervisor.start()
    idle = await supervisor.receive(Heartbeat)
    assert (idle.steps, idle.waiting, idle.predicted_step_ms) == (0, 0, 0.0)
    endless = Sampling(max_tokens=4000, ignore_eos=True)
    output = supervisor.allocate()
    await supervisor.send(StartHop(spec=HopSpec(hop="h", output=output, segments=[LITERAL], sampling=endless)))
    await supervisor.receive(HopFirstToken)
    first, second = [await supervisor.receive(Heartbeat, waiting=1) for _ in range(2)]
    assert second.steps > first.steps > 0
    assert second.predicted_step_ms > 0
    assert idle.scheduler is None
    assert second.scheduler is not None
    assert second.scheduler.steps > 0
    assert second.scheduler.reason == "no appends"
    _, engine = supervisor.family()
    os.kill(engine, signal.SIGSTOP)
    try:
        async with asyncio.timeout(HANG_S):
            while (beat := await supervisor.receive(Heartbeat, waiting=1)).steps != second.steps:
                second = beat
        still = [await supervisor.receive(Heartbeat) for _ in range(3)]
        assert {(beat.steps, beat.waiting) for beat in still} == {(second.steps, 1)}
        # A hop can be aborted all the same, and then nothing waits.
        await supervisor.send(AbortHop(hop="h"))
        await supervisor.receive(HopEnded, hop="h", state="aborted")
        assert supervisor.log(output)[1] is LogState.ABORTED
        await supervisor.receive(Heartbeat, waiting=0)
    finally:
        os.kill(engine, signal.SIGCONT)
    again = HopSpec(hop="i", output=supervisor.allocate(), segments=[LITERAL], sampling=Sampling(max_tokens=3))
    await supervisor.send(StartHop(spec=again))
    await supervisor.receive(HopEnded, hop="i", state="finished")


async def test_beats_tell_how_long_tokens_were_waited_for_and_who_belongs_to_the_worker(
    supervisor: Supervisor,
) -> None:
    await supervisor.start(supervisor.config(simulated=SimulatedSettings(step_ms=20.0, row_us=0.0)))
    first, second, reader = (supervisor.allocate() for _ in range(3))
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    for hop, output in (("a", first), ("b", second)):
        await supervisor.send(StartHop(spec=HopSpec(hop=hop, output=output, segments=[LITERAL], sampling=sampling)))
    segments: list[HopSegment] = [PREFIX, StreamSegment(stream=first, expected=40), LITERAL]
    await supervisor.send(
        StartHop(spec=HopSpec(hop="r", output=reader, segments=segments, sampling=Sampling(max_tokens=2)))
    )
    for hop in ("a", "b", "r"):
        await supervisor.receive(HopEnded, hop=hop, state="finished")
    await supervisor.receive(Heartbeat, waiting=0)
    beats = [message for message in supervisor.messages if isinstance(message, Heartbeat)]
    assert set(beats[0].pids) == set(supervisor.family())
    assert beats[0].pids[0] == supervisor.family()[0]
    assert all(beat.loop_late_ms < HANG_S * 1e3 for beat in beats)
    counts = [cell for beat in beats for cell in beat.step_counts]
    assert sum(sum(cell.buckets.values()) for cell in counts) == 2 * 39 + 1, "each token but the first of each answer"
    assert {cell.kind for cell in counts} >= {"decode", "appends"}
    alone = StepTimes()
    for cell in counts:
        if cell.kind == "decode":
            alone.merge(cell.buckets, cell.worst_ms)
    assert alone.quantile_ms(0.5) == pytest.approx(20, rel=0.15)
    assert beats[-1].gc_ms >= beats[0].gc_ms


async def test_a_hop_that_reads_is_aborted_at_once_and_waits_for_nothing(supervisor: Supervisor) -> None:
    await supervisor.start()
    upstream, output = supervisor.allocate(), supervisor.allocate()
    segments: list[HopSegment] = [PREFIX, StreamSegment(stream=upstream, expected=60), LITERAL]
    hop = HopSpec(hop="r", output=output, segments=segments, sampling=Sampling(max_tokens=4))
    await supervisor.send(StartHop(spec=hop))
    await supervisor.receive(HopAppended, hop="r")
    beat = await supervisor.receive(Heartbeat, open_hops=1)
    assert (beat.steps, beat.waiting) == (1, 0)
    await supervisor.send(AbortHop(hop="r"))
    await supervisor.receive(HopEnded, hop="r", state="aborted")
    assert supervisor.log(output)[1] is LogState.ABORTED


async def test_a_reader_waits_for_an_upstream_that_is_interrupted_and_goes_on(supervisor: Supervisor) -> None:
    """The one that goes on rings another bell, if any: the reader finds its tokens all the same."""
    await supervisor.start()
    upstream, output = supervisor.allocate(), supervisor.allocate()
    writer = TokenLogWriter(supervisor.slab, upstream)
    segments: list[HopSegment] = [PREFIX, StreamSegment(stream=upstream, expected=60), LITERAL]
    hop = HopSpec(hop="r", output=output, segments=segments, sampling=Sampling(max_tokens=4, ignore_eos=True))
    await supervisor.send(StartHop(spec=hop))
    await supervisor.receive(HopAppended, hop="r")
    writer.append([5, 6, 7])
    TokenLogWriter(supervisor.slab, upstream).close("length", ids=[8, 9])
    finalized = await supervisor.receive(HopFinalized, hop="r")
    assert finalized.prompt_tokens == 64 + 5 + 3
    await supervisor.receive(HopEnded, hop="r", state="finished")


async def test_a_resumed_hop_goes_on_in_its_log(supervisor: Supervisor) -> None:
    await supervisor.start()
    sampling = Sampling(max_tokens=50, ignore_eos=True)
    whole, cut = supervisor.allocate(), supervisor.allocate()
    await supervisor.send(StartHop(spec=HopSpec(hop="w", output=whole, segments=[LITERAL], sampling=sampling)))
    await supervisor.receive(HopEnded, hop="w", state="finished")
    ids, _ = supervisor.log(whole)
    TokenLogWriter(supervisor.slab, cut).append(ids[:20])
    spec = HopSpec(hop="c", output=cut, segments=[LITERAL], sampling=sampling, resume=Resume(tokens=20, text_chars=15))
    await supervisor.send(StartHop(spec=spec))
    ended = await supervisor.receive(HopEnded, hop="c", state="finished")
    assert (ended.output_tokens, ended.finish_reason) == (50, "length")
    assert supervisor.log(cut) == (ids, LogState.CLOSED)
    texts = [message for message in supervisor.messages if isinstance(message, HopText) and message.hop == "c"]
    assert "".join(message.text for message in texts) == bytes(ids).decode()[15:]
    assert texts[-1].upto == 50
    beat = await supervisor.receive(Heartbeat, open_hops=0)
    assert beat.output_tokens == 80, "written, not read"


async def test_a_released_hop_goes_on_elsewhere_as_if_nothing_had_been(supervisor: Supervisor) -> None:
    await supervisor.start()
    sampling = Sampling(max_tokens=1000, ignore_eos=True)
    whole, moved = supervisor.allocate(), supervisor.allocate()
    await supervisor.send(StartHop(spec=HopSpec(hop="m", output=moved, segments=[LITERAL], sampling=sampling)))
    await supervisor.receive(HopText, hop="m")
    await supervisor.send(ReleaseHop(hop="m"))
    ended = await supervisor.receive(HopEnded, hop="m")
    tokens = ended.output_tokens
    assert (ended.state, ended.code) == ("released", "")
    assert 0 < tokens < 1000
    assert (len(supervisor.log(moved)[0]), supervisor.log(moved)[1]) == (tokens, LogState.OPEN)
    idle = await supervisor.receive(Heartbeat, open_hops=0)
    assert idle.waiting == 0, "its request is gone from the engine"
    texts = [message.text for message in supervisor.messages if isinstance(message, HopText)]
    chars = len("".join(texts))
    assert chars == tokens, "all of its text was sent"
    again = HopSpec(
        hop="n", output=moved, segments=[LITERAL], sampling=sampling, resume=Resume(tokens=tokens, text_chars=chars)
    )
    await supervisor.send(StartHop(spec=again))
    await supervisor.receive(HopEnded, hop="n", state="finished")
    await supervisor.send(StartHop(spec=HopSpec(hop="w", output=whole, segments=[LITERAL], sampling=sampling)))
    await supervisor.receive(HopEnded, hop="w", state="finished")
    assert supervisor.log(moved) == supervisor.log(whole)
    await supervisor.send(ReleaseHop(hop="n"))
    await supervisor.receive(HopEnded, hop="n", state="aborted")


async def test_reset_prefix_cache(supervisor: Supervisor) -> None:
    await supervisor.start()
    segments: list[HopSegment] = [Literals(ids=list(range(100)))]

    async def cached(hop: str) -> int:
        one = HopSpec(hop=hop, output=supervisor.allocate(), segments=segments, sampling=Sampling(max_tokens=1))
        await supervisor.send(StartHop(spec=one))
        return (await supervisor.receive(HopFirstToken, hop=hop)).cached_tokens

    assert [await cached("a"), await cached("b")] == [0, 96]
    await supervisor.send(ResetPrefixCache(request=9))
    await supervisor.receive(PrefixCacheReset, request=9)
    assert await cached("c") == 0


async def test_tokens_are_scored(supervisor: Supervisor) -> None:
    await supervisor.start()
    await supervisor.send(ScoreNext(request=3, ids=[70, 71, 72], tokens=[1, 4000], grid=256))
    assert len((await supervisor.receive(NextScored, request=3)).logprobs) == 2
    await supervisor.send(ScoreNext(request=4, ids=[70] * 5000, tokens=[1]))
    failed = await supervisor.receive(RequestFailed, request=4)
    assert failed.code == "EngineError"
    assert "5000" in failed.message


class HeldScores(SimulatedEngine):
    """Scores once it is let, and counts how many it scores at once."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.go_on = asyncio.Event()
        self.at_once = 0
        self.most = 0
        self.beside = 0
        """Requests that the engine held meanwhile."""

    async def score(self, ids: Sequence[int], tokens: Sequence[int], *, grid: int | None = None) -> list[float | None]:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.beside = max(self.beside, len(self._inboxes))
        await self.go_on.wait()
        self.at_once -= 1
        if grid == 7:
            raise EngineError("no such grid.")
        return [-1.0 for _ in tokens]


async def test_tokens_are_scored_one_request_at_a_time_and_beside_no_measuring(supervisor: Supervisor) -> None:
    config = supervisor.config(slab_fd=os.dup(supervisor.slab.fd))
    engine = HeldScores(config)
    worker = asyncio.create_task(Worker(config, Parts(lambda: None, lambda _: engine, lambda _: None)).run())
    await supervisor.receive(Hello)
    await supervisor.send(Welcome())
    await supervisor.receive(Ready)
    await supervisor.send(Calibrate(request=10))
    while (await supervisor.receive(Heartbeat)).scheduler is None:  # until it is decoding
        continue
    for request, grid in enumerate([None, 7, 16]):
        await supervisor.send(ScoreNext(request=request, ids=[1, 2], tokens=[3], grid=grid))
    assert "gave way" in (await supervisor.receive(RequestFailed, request=10)).message
    await supervisor.receive(Heartbeat, waiting=1)
    await supervisor.send(Calibrate(request=11))
    assert "are scored" in (await supervisor.receive(RequestFailed, request=11)).message
    engine.go_on.set()
    assert (await supervisor.receive(NextScored, request=0)).logprobs == [-1.0]
    failed = await supervisor.receive(RequestFailed, request=1)
    assert (failed.code, failed.message) == ("EngineError", "no such grid.")
    await supervisor.receive(NextScored, request=2)
    assert (engine.most, engine.beside) == (1, 0)
    await supervisor.receive(Heartbeat, waiting=0)
    await supervisor.send(Stop())
    assert await worker == 0
    gc.unfreeze()


QUICK = SimulatedSettings(step_ms=0.1, row_us=1.0)


async def test_an_engine_is_measured_once_and_again_when_asked(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = supervisor.config(calibrate=True, simulated=QUICK)
    first = (await supervisor.start(config)).figures
    assert first is not None
    assert not first.cached
    assert [one.stage for one in supervisor.messages if isinstance(one, Loading)][-1] == "measuring the engine"
    await supervisor.send(Calibrate(request=1))
    again = (await supervisor.receive(Calibrated, request=1)).figures
    assert not again.cached
    await supervisor.send(Stop())
    assert await supervisor.exit_code() == 0
    supervisor.messages.clear()
    if again.step_p99_ms > NOISY * again.step_p50_ms:
        return  # measured on a busy machine, so not kept
    kept = (await supervisor.start(config)).figures
    assert kept == msgspec.structs.replace(again, cached=True)
    assert not [one for one in supervisor.messages if isinstance(one, Loading) and "measuring" in one.stage]


async def test_a_start_tells_how_far_it_has_come(supervisor: Supervisor, tmp_path: Path) -> None:
    simulated = SimulatedSettings(step_ms=1.0, start_ms=200.0)
    config = supervisor.config(
        calibrate=True, simulated=simulated, environment={"XDG_CACHE_HOME": str(tmp_path / "cache")}
    )
    await supervisor.start(config)
    told = [message for message in supervisor.messages if isinstance(message, Loading)]
    stages = list(dict.fromkeys(message.stage for message in told))
    assert stages == ["loading the model", "loading the weights", "loading the tokenizer", "measuring the engine"]
    assert all(message.progress is None or message.progress.stage == message.stage for message in told)
    weights, figures = (
        [message.progress for message in told if message.progress is not None and message.progress.unit == unit]
        for unit in ("shards", "figures")
    )
    assert [(one.done, one.total) for one in weights] == [(shard, 10) for shard in range(10)]
    assert [one.done for one in figures] == list(range(1, len(figures) + 1))
    assert figures[0].total == 0, "how many prompts it takes shows as they are measured"
    assert figures[-1].total == len(figures)


BLOCKING = """
import asyncio, sys, time
from pathlib import Path
from pingpong_bus.messages import Progress
from pingpong_worker.main import read_config
from pingpong_worker.simulated_engine import SimulatedEngine
from pingpong_worker.start_progress import StartProgress, tell
from pingpong_worker.worker import Parts, Worker

folder, config = Path(sys.argv[1]), read_config(sys.stdin.buffer.read())

class Blocking(SimulatedEngine):
    async def start(self):
        with StartProgress(folder / "progress", self._on_progress):
            shard = 0
            while not (folder / "go on").exists():  # the event loop stands still meanwhile
                tell(folder / "progress", Progress(stage="blocked", done=shard))
                time.sleep(0.05)
                shard += 1
        await super().start()

engine = lambda on_progress: Blocking(config, on_progress=on_progress)
sys.exit(asyncio.run(Worker(config, Parts(lambda: None, engine, lambda _: None)).run()))
"""


async def test_a_start_that_blocks_the_worker_tells_all_the_same_and_hears_later(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    await supervisor.spawn(supervisor.config(), "-c", BLOCKING, str(tmp_path))
    await supervisor.receive(Hello)
    await supervisor.send(Welcome())
    first, second = [await supervisor.receive(Loading, stage="blocked") for _ in range(2)]
    assert first.progress is not None
    assert second.progress is not None
    assert second.progress.done > first.progress.done
    await supervisor.send(ResetPrefixCache(request=1))
    await supervisor.receive(Loading, stage="blocked")
    (tmp_path / "go on").touch()
    assert (await supervisor.receive(RequestFailed, request=1)).code == "EngineLost", "it did not serve yet"
    await supervisor.receive(Ready)
    await supervisor.send(Stop())
    assert await supervisor.exit_code() == 0


async def test_measuring_gives_way_to_a_hop_and_does_not_begin_beside_one(supervisor: Supervisor) -> None:
    await supervisor.start()
    await supervisor.send(Calibrate(request=1))
    while (await supervisor.receive(Heartbeat)).scheduler is None:  # until it is decoding
        continue
    output = supervisor.allocate()
    endless = Sampling(max_tokens=4000, ignore_eos=True)
    await supervisor.send(StartHop(spec=HopSpec(hop="h", output=output, segments=[LITERAL], sampling=endless)))
    failed = await supervisor.receive(RequestFailed, request=1)
    assert (failed.code, "gave way" in failed.message) == ("EngineError", True)
    await supervisor.receive(HopFirstToken)
    await supervisor.send(Calibrate(request=2))
    assert "hops run" in (await supervisor.receive(RequestFailed, request=2)).message
    await supervisor.send(AbortHop(hop="h"))
    await supervisor.receive(HopEnded, hop="h", state="aborted")


async def test_an_engine_that_cannot_be_measured_serves(supervisor: Supervisor) -> None:
    tiny = SimulatedSettings(max_model_len=64)
    assert (await supervisor.start(supervisor.config(calibrate=True, simulated=tiny))).figures is None
    output = supervisor.allocate()
    hop = HopSpec(hop="h", output=output, segments=[LITERAL], sampling=Sampling(max_tokens=3))
    await supervisor.send(StartHop(spec=hop))
    await supervisor.receive(HopEnded, hop="h", state="finished")


async def test_frames_that_make_no_sense_are_dropped_and_counted(supervisor: Supervisor) -> None:
    await supervisor.start()
    hello = Hello(version=PROTOCOL_VERSION, worker="g0", pid=1, bell="")  # it goes the other way
    for frame in (b"", b"garbage", encode(hello), encode(Welcome(version=99))):
        await supervisor.send_frame(frame)
    await supervisor.send(AbortHop(hop="h"))
    await supervisor.receive(HopEnded, hop="h", state="aborted")
    await supervisor.send(Stop())
    assert await supervisor.exit_code() == 0
    assert "4 frames made no sense" in supervisor.stderr
    assert "3 frames" not in supervisor.stderr


async def test_a_supervisor_of_another_version_ends_the_worker(supervisor: Supervisor) -> None:
    await supervisor.spawn(supervisor.config())
    await supervisor.receive(Hello)
    await supervisor.send(Welcome(version=99))
    failed = await supervisor.receive(WorkerFailed)
    assert failed.code == "MessageError"
    assert "99" in failed.message
    assert await supervisor.exit_code() == 65


async def test_a_chain_that_cannot_be_prepared_is_answered(supervisor: Supervisor) -> None:
    await supervisor.start()
    chain = Chain(name="bad", agents=[Agent(name="a", prompt_ids=[99999])])
    await supervisor.send(Prepare(request=5, chain=chain, inputs={}))
    failed = await supervisor.receive(RequestFailed, request=5)
    assert (failed.code, failed.field) == ("ChainError", "agents[0].prompt_ids[0]")
    assert "99999" in failed.message


class BrokenPrompts(SimulatedPrompts):
    def prepare(
        self, chain: Chain, inputs: dict[str, str], limits_vocabulary: int, agents: Sequence[int] | None = None
    ) -> list[PreparedAgent]:
        raise ZeroDivisionError("oops")


async def test_a_request_that_breaks_the_program_is_answered(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    config = supervisor.config(slab_fd=os.dup(supervisor.slab.fd))  # a worker closes its own
    parts = Parts(lambda: None, lambda _: SimulatedEngine(config), lambda _: BrokenPrompts())
    worker = asyncio.create_task(Worker(config, parts).run())
    await supervisor.receive(Hello)
    await supervisor.send(Welcome())
    await supervisor.receive(Ready)
    await supervisor.send(Prepare(request=6, chain=CHAIN, inputs={}))
    failed = await supervisor.receive(RequestFailed, request=6)
    assert failed.code == "PingpongError"
    assert "ZeroDivisionError: oops" in failed.message
    assert "ZeroDivisionError" in caplog.text
    await supervisor.send(Stop())
    assert await worker == 0
    gc.unfreeze()  # a worker freezes what it has loaded


async def test_sigterm_is_stop_and_sigint_is_the_supervisors(supervisor: Supervisor) -> None:
    await supervisor.start()
    assert supervisor.process is not None
    family = supervisor.family()
    supervisor.process.send_signal(signal.SIGINT)
    await supervisor.receive(Heartbeat)
    await supervisor.receive(Heartbeat)
    supervisor.process.send_signal(signal.SIGTERM)
    assert await supervisor.exit_code() == 0
    await all_gone(family)


async def test_a_dead_engine_ends_the_worker_with_its_reason(supervisor: Supervisor) -> None:
    await supervisor.start(supervisor.config(heartbeat_s=600.0))  # the hop's failure must not wait for a heartbeat
    endless = Sampling(max_tokens=4000, ignore_eos=True)
    hop = HopSpec(hop="h", output=supervisor.allocate(), segments=[LITERAL], sampling=endless)
    await supervisor.send(StartHop(spec=hop))
    await supervisor.receive(HopFirstToken)
    _, engine = supervisor.family()
    os.kill(engine, signal.SIGKILL)
    ended = await supervisor.receive(HopEnded, hop="h")
    assert (ended.state, ended.code) == ("lost", "EngineLost")
    ids, state = supervisor.log(hop.output)
    assert (len(ids), state) == (ended.output_tokens, LogState.OPEN)
    failed = await supervisor.receive(WorkerFailed)
    assert (failed.code, failed.permanent) == ("EngineLost", False)
    assert await supervisor.exit_code() == 1
    assert "Traceback" not in supervisor.stderr


class DyingSession(PrefixSession):
    """Of an engine that dies as soon as a token is out; it is slow to let go."""

    async def abort(self) -> None:
        engine = self._engine
        assert isinstance(engine, DyingEngine)
        engine.left.set()
        await engine.go_on.wait()


class DyingEngine(SimulatedEngine):
    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.left, self.go_on, self.dies = asyncio.Event(), asyncio.Event(), False

    def open(
        self,
        session_id: str,
        *,
        cache_salt: str | None,
        sampling: Sampling,
        kind: SessionKind | None = None,
        pace: DecodePace | None = None,
        grid: int | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
        keep: KeptPrefix | None = None,
    ) -> PrefixSession:
        return DyingSession(self, session_id, cache_salt, pace, grid, keep)

    async def check(self) -> None:
        if self.dies:
            raise EngineLost("it died.")


async def test_a_hop_that_is_to_be_left_by_a_dying_worker_is_lost(supervisor: Supervisor) -> None:
    config = supervisor.config(slab_fd=os.dup(supervisor.slab.fd))
    engine = DyingEngine(config)
    worker = asyncio.create_task(Worker(config, Parts(lambda: None, lambda _: engine, lambda _: None)).run())
    await supervisor.receive(Hello)
    await supervisor.send(Welcome())
    await supervisor.receive(Ready)
    sampling = Sampling(max_tokens=1000, ignore_eos=True)
    spec = HopSpec(hop="h", output=supervisor.allocate(), segments=[LITERAL], sampling=sampling)
    await supervisor.send(StartHop(spec=spec))
    await supervisor.receive(HopFirstToken)
    engine.dies = True
    async with asyncio.timeout(HANG_S):
        await engine.left.wait()
    await supervisor.send(ReleaseHop(hop="h"))
    await supervisor.send(ResetPrefixCache(request=1))
    await supervisor.receive(RequestFailed, request=1)
    engine.go_on.set()
    ended = await supervisor.receive(HopEnded, hop="h")
    assert ended.state == "lost", "its chain goes on elsewhere"
    await supervisor.receive(WorkerFailed)
    assert await worker == 1
    assert not any(isinstance(message, HopEnded) and message is not ended for message in supervisor.messages)
    gc.unfreeze()


async def test_a_device_that_does_not_exist_is_named(supervisor: Supervisor) -> None:
    await supervisor.spawn(supervisor.config(engine="vllm", devices=["cpu:9999"]))
    await supervisor.receive(Hello)
    await supervisor.send(Welcome())
    failed = await supervisor.receive(WorkerFailed)
    assert (failed.code, failed.permanent) == ("ConfigError", True)
    assert "cpu:9999" in failed.message
    assert "Cores here: " in failed.hint
    assert await supervisor.exit_code() == 78
    assert "Traceback" not in supervisor.stderr


async def test_settings_that_cannot_work_fail_for_good(supervisor: Supervisor) -> None:
    await supervisor.spawn(supervisor.config(simulated=SimulatedSettings(block_size=0)))
    await supervisor.receive(Hello)
    await supervisor.send(Welcome())
    failed = await supervisor.receive(WorkerFailed)
    assert failed.permanent
    assert "block_size" in failed.message
    assert await supervisor.exit_code() == 78


@pytest.mark.parametrize("text", [b"", b"{}", b"not json", b'{"name": "g0", "colour": "red"}'])
def test_configuration_that_is_none_is_one_line(text: bytes) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pingpong_worker"], input=text, capture_output=True, timeout=HANG_S, check=False
    )
    assert run.returncode == 78
    assert len(run.stderr.splitlines()) == 1
    assert b"configuration cannot be read" in run.stderr


async def test_a_worker_of_another_parent_ends_at_once(supervisor: Supervisor) -> None:
    await supervisor.spawn(supervisor.config(supervisor_pid=1))
    assert await supervisor.exit_code() == 1
    assert "supervisor is gone" in supervisor.stderr


ORPHANING = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_worker_process import Supervisor

async def main():
    supervisor = Supervisor(Path({folder!r}))
    await supervisor.start()
    print(supervisor.family(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    script = ORPHANING.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    try:
        assert parent.stdout is not None
        async with asyncio.timeout(HANG_S):
            family = json.loads(await parent.stdout.readline())
        assert len(family) == 2
        assert not any(is_gone(pid) for pid in family)
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.kill()
        await parent.communicate()
    await all_gone(family)
