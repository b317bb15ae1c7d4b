"""Many chains while processes die at random: nothing may be lost, doubled or left behind, and nothing may grow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import psutil

from faults.client_handle import ClientProcess
from faults.reader import check_reading
from faults.service import CellFault, Service, engine_of
from pingpong_bus.chain import Chain
from pingpong_bus.errors import DaemonUnavailable, Overloaded, PingpongError
from pingpong_bus.messages import ChainEvent, ChainResult, StatusReply, SubmitOptions
from pingpong_client import AsyncClient

_FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
_CLIENT_PROCESS_ONE_IN = 40
_CHAIN_S = 600.0
"""A hang limit for one chain, with all that dies under it."""
_MOST_FAULTS = 20
_SUPERVISOR_SHARE = 0.6
"""The part of the chains in which supervisors die; in the rest one of them lives, to see whether it grows."""


class Job(msgspec.Struct, frozen=True):
    """A chain to run."""

    chain: Chain
    options: SubmitOptions
    outputs: list[list[int]]
    """What its agents write, undisturbed."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """How large everything was at one moment."""

    kind: str = "sample"
    seconds: float
    chains: int
    """That have ended by then."""
    life: int
    """Of the supervisor."""
    supervisor_mib: float
    supervisor_descriptors: int
    workers_mib: float
    """Workers and their engines."""
    worker_descriptors: int
    processes: int
    segments: int
    slots_free: int
    state_mib: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    kind: str = "summary"
    chains: int
    finished: int
    differing: int
    """Chains of which an agent wrote other tokens than undisturbed."""
    faults: list[str]
    """Tokens lost or doubled, chains that failed or hung, ends of the daemon that nobody asked for, what stayed."""
    kills: dict[str, int]
    lives: int
    """Of the supervisor."""
    resumed: int
    """Hops that were resumed or run again after their worker was lost."""
    attempts: int
    """The most of any agent."""
    clean_s: float
    """The longest that anything of a dead supervisor was left."""
    seconds: float
    log: list[str] = []


class Soak:
    """One soak on one service."""

    def __init__(
        self,
        service: Service,
        config: str,
        jobs: Sequence[Job],
        *,
        at_once: int,
        kill_every_s: float,
        sample_every_s: float = 5.0,
        seed: int = 0,
        patience_s: float = 120.0,
        tell: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        """Args:
        service: not running.
        config: of the daemon.
        jobs: the chains.
        at_once: that are submitted and have not ended.
        kill_every_s: mean time from one fault to the next.
        seed: of the faults.
        patience_s: for a start.
        tell: is given samples.
        """
        self._service = service
        self._config = config
        self._jobs = jobs
        self._at_once = at_once
        self._kill_every_s = kill_every_s
        self._sample_every_s = sample_every_s
        self._seed = seed
        self._random = random.Random(seed)
        self._patience_s = patience_s
        self._tell = tell
        self._faults: list[str] = []
        self._kills: Counter[str] = Counter()
        self._clients: dict[int, ClientProcess] = {}
        self._ended = self._finished = self._differing = self._resumed = self._lives = 0
        self._attempts = 1
        self._asked = False
        """The supervisor was hit by us."""
        self._starting = asyncio.Lock()

    async def run(self) -> Summary:
        """Run all chains; whatever goes wrong is in the summary."""
        service, started = self._service, time.monotonic()
        self._start()
        await service.ready(self._patience_s)
        async with service.client() as client:
            self._client = client
            tasks = [asyncio.create_task(work) for work in (self._keep(), self._kill(), self._sample(started))]
            queue: asyncio.Queue[tuple[int, Job]] = asyncio.Queue()
            for item in enumerate(self._jobs):
                queue.put_nowait(item)
            try:
                await asyncio.gather(*(self._work(queue) for _ in range(self._at_once)))
            finally:
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
            self._faults += [f"{end!r}" for end in ends if isinstance(end, Exception)]
            await self._settle()
        with self._noting("the end"):
            await service.stop()
            self._faults += service.complaints()
        service.kill()
        return Summary(
            chains=self._ended,
            finished=self._finished,
            differing=self._differing,
            faults=self._faults,
            kills=dict(sorted(self._kills.items())),
            lives=self._lives,
            resumed=self._resumed,
            attempts=self._attempts,
            clean_s=max(service.clean_s, default=0.0),
            seconds=round(time.monotonic() - started, 1),
            log=service.log_path.read_text(errors="replace").splitlines()[-100:] if self._faults else [],
        )

    # ----------------------------------------------------------------------------------------------------------- chains

    async def _work(self, queue: asyncio.Queue[tuple[int, Job]]) -> None:
        while len(self._faults) < _MOST_FAULTS:
            try:
                number, job = queue.get_nowait()
            except asyncio.QueueEmpty:
                return
            with self._noting(f"chain {number}"):
                async with asyncio.timeout(_CHAIN_S):
                    events, result = await self._read(number, job)
                self._count(number, job, events, result)
            self._ended += 1

    async def _read(self, number: int, job: Job) -> tuple[list[ChainEvent], ChainResult]:
        key = f"soak-{number}"
        if number % _CLIENT_PROCESS_ONE_IN == 0:
            return await self._read_in_process(number, job, key)
        while True:
            try:
                chain = await self._client.submit(job.chain, options=job.options, follow=True, key=key)
                break
            except Overloaded:  # no engine serves for the moment
                await asyncio.sleep(0.2)
        events = [event async for event in self._client.follow(chain)]
        return events, await self._client.wait(chain)

    async def _read_in_process(self, number: int, job: Job, key: str) -> tuple[list[ChainEvent], ChainResult]:
        """Read it in a process that may be hit; then another one reads it from the beginning."""
        path = self._service.folder / f"chain-{number}.json"
        path.write_bytes(msgspec.json.encode(job.chain))
        try:
            while True:
                process = self._clients[number] = ClientProcess(self._service, number, "submit", str(path), key)
                while process.process.poll() is None:
                    await asyncio.sleep(0.1)
                if found := process.read("result"):
                    events = [msgspec.convert(event, ChainEvent) for event in process.read("event")]
                    return events, msgspec.convert(found[0], ChainResult)
                await asyncio.sleep(0.2)
        finally:
            self._clients.pop(number).clear()
            path.unlink()

    def _count(self, number: int, job: Job, events: list[ChainEvent], result: ChainResult) -> None:
        if result.state != "finished":
            raise CellFault(f"{result.state}: {result.error or 'no cause is given'}")
        self._finished += 1
        self._resumed += sum(len(agent.resumed) for agent in result.agents)
        self._attempts = max(self._attempts, *(agent.attempt for agent in result.agents))
        check_reading(events, result)
        self._differing += [agent.output_ids for agent in result.agents] != job.outputs

    # ----------------------------------------------------------------------------------------------------------- faults

    async def _keep(self) -> None:
        """Start the daemon again where it was killed."""
        while True:
            if not self._service.alive:
                async with self._starting:
                    code = await self._service.ended()
                    if not self._asked:
                        self._faults.append(f"the daemon ended with {code}, and nobody had asked it to")
                    self._start()
            await asyncio.sleep(0.05)

    def _start(self) -> None:
        self._asked = False
        self._lives += 1
        self._service.start(self._config)

    async def _kill(self) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._kill_every_s))
            target = self._random.choices(
                ["worker", "engine", "supervisor", "client"], [4, 4, 2 * self._supervisors_die(), 2]
            )[0]
            try:
                pid = await self._pid(target)
            except (DaemonUnavailable, psutil.NoSuchProcess):  # it is dead already
                continue
            if pid is None:
                continue
            stops = self._random.random() < 0.15
            number = signal.SIGSTOP if stops else self._random.choice(_FATAL)
            self._asked |= target == "supervisor" and not stops
            self._send(pid, number)
            self._kills[f"{number.name} {target}"] += 1
            if stops:
                await asyncio.sleep(self._random.uniform(0.05, 3.0))
                self._send(pid, signal.SIGCONT)

    def _supervisors_die(self) -> bool:
        return self._ended < _SUPERVISOR_SHARE * len(self._jobs)

    async def _pid(self, target: str) -> int | None:
        if target == "client":
            living = [one.process.pid for one in self._clients.values() if one.process.poll() is None]
            return self._random.choice(living) if living else None
        if not self._service.alive or self._starting.locked():
            return None
        if target == "supervisor":
            return self._service.pid
        workers = [worker.pid for worker in (await self._status()).workers if worker.pid is not None]
        if not workers:
            return None
        worker = self._random.choice(workers)
        if target == "worker":
            return worker
        engine = engine_of(psutil.Process(worker))
        return engine.pid if engine is not None else None

    @staticmethod
    def _send(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    # ---------------------------------------------------------------------------------------------------------- samples

    async def _sample(self, started: float) -> None:
        while True:
            with contextlib.suppress(DaemonUnavailable, psutil.Error, OSError):
                self._tell(await self.sample(started))
            await asyncio.sleep(self._sample_every_s)

    async def sample(self, started: float) -> Sample:
        """How large everything is now.

        Raises:
            DaemonUnavailable, psutil.Error: something is just dying.
        """
        status, service = await self._status(), self._service
        supervisor = psutil.Process(service.pid)
        workers = [psutil.Process(worker.pid) for worker in status.workers if worker.pid is not None]
        family = [*workers, *(child for worker in workers for child in worker.children(recursive=True))]
        return Sample(
            seconds=round(time.monotonic() - started, 1),
            chains=self._ended,
            life=self._lives,
            supervisor_mib=_mib(supervisor.memory_info().rss),
            supervisor_descriptors=supervisor.num_fds(),
            workers_mib=_mib(sum(process.memory_info().rss for process in family)),
            worker_descriptors=sum(worker.num_fds() for worker in workers),
            processes=len(service.processes()),
            segments=len(service.segments()),
            slots_free=status.slots_free,
            state_mib=_mib(sum(path.stat().st_size for path in service.state_dir.rglob("*") if path.is_file())),
        )

    async def _settle(self) -> None:
        """Wait until all serve and nothing runs; then everything has to be free."""
        with self._noting("the rest"):
            async with asyncio.timeout(self._patience_s):
                if not self._service.alive:
                    await self._service.ended()
                    self._start()
                while True:
                    with contextlib.suppress(DaemonUnavailable):
                        status = await self._status()
                        free = status.slots_free == status.slots_total and not any(w.hops for w in status.workers)
                        if status.state == "ready" and free:
                            return
                    await asyncio.sleep(0.1)

    async def _status(self) -> StatusReply:
        async with AsyncClient(self._service.runtime_dir / "control.sock", timeout_s=5, reconnect_s=0) as client:
            return await client.status()

    @contextlib.contextmanager
    def _noting(self, what: str) -> Any:
        """Note what goes wrong, and go on."""
        try:
            yield
        except TimeoutError:
            self._faults.append(f"{what}: it hangs")
        except (CellFault, PingpongError) as error:
            self._faults.append(f"{what}: {type(error).__name__}: {error}"[:2000])


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """How much the last life of the supervisor has grown.

    Returns:
        Ratios: of the supervisor's medians in the last and the first quarter of that life; of all else, which dies and
        loads again and again, of its peaks in the second and the first half.
    """
    last = [sample for sample in samples if sample.life == samples[-1].life]

    def values(name: str, part: Sequence[Sample]) -> list[float]:
        return [max(1e-9, getattr(sample, name)) for sample in part]

    quarter, half = max(1, len(last) // 4), max(1, len(last) // 2)
    found = {
        name: statistics.median(values(name, last[-quarter:])) / statistics.median(values(name, last[:quarter]))
        for name in ("supervisor_mib", "supervisor_descriptors")
    } | {
        name: max(values(name, last[-half:])) / max(values(name, last[:half]))
        for name in ("workers_mib", "worker_descriptors", "processes", "segments")
    }
    return {name: round(ratio, 3) for name, ratio in found.items()}


def _mib(count: float) -> float:
    return round(count / 2**20, 1)
