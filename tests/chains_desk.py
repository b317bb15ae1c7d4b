"""The daemon's chains over workers and a store that a test plays."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import ChainFailed, EngineError, EngineLost, Overloaded, StoreError
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    AbortHop,
    ChainEvent,
    ChainResult,
    DeviceState,
    DraftCounts,
    EngineFigures,
    EngineLimits,
    GroupHealth,
    HopChecked,
    HopEnded,
    HopFinalized,
    HopFirstToken,
    HopOpened,
    HopSpec,
    Literals,
    OutputOf,
    PreparedAgent,
    ReleaseHop,
    StartHop,
    Submit,
    SubmitOptions,
    SupervisorMessage,
    TokenizerSource,
    WorkerMessage,
)
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.token_log import TokenLogReader, TokenLogWriter
from pingpongd.chain_record import ChainRecord
from pingpongd.chain_steps import StepTools
from pingpongd.chains import Chains
from pingpongd.config import GroupConfig, StoreConfig, parse_config
from pingpongd.placement import GroupView, PrefixMemory
from pingpongd.step_runner import StepWork
from pingpongd.stored import AgentOutcome, EndedChain, Job, LiveChain
from pingpongd.worker_handle import EndOrder

LIMITS = EngineLimits(
    engine="fake",
    model="m",
    max_model_len=1000,
    vocabulary_size=1000,
    block_size=16,
    kv_tokens=10_000,
    max_num_seqs=8,
    device="d",
    grid_tokens=64,
    decode_first=True,
    overlap=True,
)
SLOTS = 7
STEP_TURNS = 6
"""Of the event loop, for steps to begin and to end."""
OUTPUT = 3
"""Tokens that every agent writes."""


class FakeHop:
    """A hop on a fake worker, and how far it has come."""

    def __init__(self, spec: HopSpec, slab: Slab) -> None:
        self.spec = spec
        _, state = TokenLogReader(slab, spec.output).peek()
        # An earlier hop may have closed the log, and could not say so any more: then that is all there is to do.
        self.writer = TokenLogWriter(slab, spec.output) if state is not LogState.CLOSED else None
        self.step = 0


class FakeWorker:
    """Keeps what the supervisor sends; its reports go out in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bell = f"ipc://{name}"
        self.state = "ready"
        self.limits = LIMITS
        self.figures: EngineFigures | None = None
        self.order: EndOrder | None = None
        self.hops: set[str] = set()
        self.memory = PrefixMemory(10_000)
        self.group = GroupConfig(name=name, devices=["cpu:0"])
        self.gpus: list[DeviceState] = []
        self.health = GroupHealth()
        self.kv_held_tokens = 0
        self.reachable = True
        self.running: dict[str, FakeHop] = {}
        self.reports: deque[WorkerMessage] = deque()

    @property
    def model(self) -> str:
        return self.group.model or ""

    def view(self, *, held: bool = True) -> GroupView:
        digests = self.memory.held if held else frozenset()
        late, health = self.health.state != "healthy", self.health
        return GroupView(
            *(self.name, len(self.hops), digests, self.limits.overlap, self.figures),
            degraded=late,
            slowdown=health.slowdown,
            cause=health.cause,
            model=self.model,
        )


class FakeFleet:
    """The part of `Fleet` that chains use."""

    def __init__(self, names: str, slab: Slab) -> None:
        self.workers = {name: FakeWorker(name) for name in names}
        self._slab = slab
        self.calibrated: list[str] = []
        self.released: list[str] = []
        self.health_listeners: list[Callable[[FakeWorker], None]] = []
        self.scored: list[tuple[str, list[int], list[int], int | None]] = []
        self.scoring = asyncio.Event()
        """Scores wait for it."""
        self.scoring.set()

    @property
    def ready(self) -> list[FakeWorker]:
        return [worker for worker in self.workers.values() if worker.state == "ready"]

    def running(self) -> list[FakeHop]:
        return [hop for worker in self.workers.values() for hop in worker.running.values()]

    def views(self) -> list[GroupView]:
        return [worker.view() for worker in self.ready]

    async def prepare(
        self,
        chain: Chain,
        inputs: dict[str, str],
        model: str = "",
        agents: Sequence[int] | None = None,
        as_text: Sequence[int] = (),
    ) -> list[PreparedAgent]:
        if not any(worker.model == model for worker in self.ready):
            raise Overloaded("no engine serves now.")
        positions = {agent.name: at for at, agent in enumerate(chain.agents)}
        prepared = []
        for at in range(len(chain.agents)) if agents is None else agents:
            text = chain.agents[at].prompt or ""
            reads = [OutputOf(agent=at) for name, at in positions.items() if f"{{{{{name}}}}}" in text]
            prepared.append(PreparedAgent(segments=[Literals(ids=[1, 2, 3]), *reads]))
        return prepared

    def tokenizer_source(self, model: str) -> TokenizerSource:
        return TokenizerSource(model=model)

    async def calibrate(self, worker: FakeWorker) -> None:
        self.calibrated.append(worker.name)
        if not worker.reachable:
            raise EngineLost(f'worker "{worker.name}" is gone.')

    async def score(
        self, worker: FakeWorker, ids: Sequence[int], tokens: Sequence[int], grid: int | None
    ) -> list[float | None]:
        self.scored.append((worker.name, list(ids), list(tokens), grid))
        await self.scoring.wait()
        if not worker.reachable:
            raise EngineLost(f'worker "{worker.name}" is gone.')
        return [-1.0 for _ in tokens]

    def send(self, worker: FakeWorker, message: SupervisorMessage) -> None:
        if not worker.reachable:
            raise EngineError(f'worker "{worker.name}" is gone.')
        if isinstance(message, StartHop):
            assert message.spec.hop not in worker.running
            worker.running[message.spec.hop] = FakeHop(message.spec, self._slab)
        elif isinstance(message, AbortHop):
            # A worker answers always, also for a hop that has just ended by itself.
            if (hop := worker.running.pop(message.hop, None)) is not None and hop.writer is not None:
                hop.writer.abort()
            worker.reports.append(HopEnded(hop=message.hop, state="aborted", at_ns=1))
        elif isinstance(message, ReleaseHop):
            self.released.append(message.hop)
            left = worker.running.pop(message.hop, None)
            state = "aborted" if left is None else "released"
            worker.reports.append(HopEnded(hop=message.hop, state=state, at_ns=1))


def advance(worker: FakeWorker, hop: FakeHop, *, fails: bool = False) -> None:
    """Let a hop do its next step and report it: tokens are the agent's index, and how many it has written."""
    number = hop.spec.hop
    report = worker.reports.append
    if fails:
        del worker.running[number]
        if hop.writer is not None:
            hop.writer.abort()
        report(HopEnded(hop=number, state="failed", at_ns=1, code="EngineError", message="it broke"))
    elif hop.step == 0:
        report(HopOpened(hop=number, at_ns=1))
    elif hop.step == 1:
        report(HopFinalized(hop=number, at_ns=2, prompt_tokens=3, prompt_digest="d", final_tokens=3))
    elif hop.writer is not None and hop.writer.count < OUTPUT:
        hop.writer.append([int(number.split("/")[1]) * 10 + hop.writer.count])
        if hop.step == 2:
            report(HopFirstToken(hop=number, at_ns=3, cached_tokens=0))
    else:
        del worker.running[number]
        if hop.writer is not None:
            hop.writer.close("length")
        # What is guessed saves two steps of three.
        drafts = DraftCounts(steps=1, drafted=4, accepted=2) if hop.spec.speculate else None
        report(
            HopEnded(hop=number, state="finished", at_ns=4, output_tokens=OUTPUT, finish_reason="length", drafts=drafts)
        )
        if hop.spec.match is not None:
            report(HopChecked(hop=number, prompt_token_match=True))
    hop.step += 1


class FakeStore:
    """Chains in memory; outlives the daemon that it belongs to."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.begun: set[str] = set()
        self.attempts: dict[str, int] = {}
        self.outcomes: dict[str, dict[int, AgentOutcome]] = {}
        self.results: dict[str, ChainResult] = {}
        self.full = False

    def configure(self, config: StoreConfig) -> None:
        pass

    @property
    def next_number(self) -> int:
        return len(self.jobs) + 1

    def live(self) -> list[LiveChain]:
        found = []
        for chain, job in self.jobs.items():
            if chain in self.results:
                continue
            self.attempts[chain] = self.attempts.get(chain, 1) + 1
            outcomes, attempt = dict(self.outcomes.get(chain, {})), self.attempts[chain]
            found.append(LiveChain(id=chain, job=job, started=chain in self.begun, attempt=attempt, outcomes=outcomes))
        return found

    def knows(self, chain: str) -> bool:
        return chain in self.jobs

    def find_key(self, key: str) -> str | None:
        return next((chain for chain, job in self.jobs.items() if job.key == key), None)

    async def added(self, chain: str) -> None:
        pass

    async def add(self, chain: str, job: Job) -> None:
        await asyncio.sleep(0)
        if self.full:
            raise StoreError("the disk is full.")
        self.jobs[chain] = job

    def started(self, chain: str) -> None:
        self.begun.add(chain)

    def attempt(self, chain: str, attempt: int) -> None:
        self.attempts[chain] = max(self.attempts.get(chain, 1), attempt)

    def agent_finished(self, chain: str, index: int, outcome: AgentOutcome) -> None:
        assert chain not in self.results
        self.outcomes.setdefault(chain, {})[index] = outcome

    def ended(self, chain: str, result: ChainResult, ended_at: float) -> Awaitable[None]:
        assert chain not in self.results, "a chain ended twice"
        self.results[chain] = result
        return asyncio.sleep(0)

    async def result(self, chain: str, *, fetched: bool) -> ChainResult | None:
        return self.results.get(chain)

    async def list(self, limit: int) -> list[EndedChain]:
        return []

    async def forget(self, chain: str) -> bool:
        return self.results.pop(chain, None) is not None and self.jobs.pop(chain) is not None


class FakeRunner:
    """Steps that end when a test says so."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[str]] = {}
        """By chain and name."""
        self.inputs: dict[str, str] = {}
        self.waits: dict[str, Callable[[str], None]] = {}
        """Tells what a step waits for."""

    def configure(self, calls: object) -> None:
        pass

    def expect(self, steps: object) -> None:
        pass

    async def run(self, work: StepWork, began: Callable[[], None], waits: Callable[[str], None]) -> str:
        name = f"{work.chain}/{work.spec.name}"
        assert name not in self.running, "a step runs twice at a time"
        began()
        self.waits[name] = waits
        self.inputs[name] = work.text
        self.running[name] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[name]
        finally:
            del self.running[name]

    async def close(self) -> None:
        pass


def chain_reading(
    reads: list[set[int]], *, ids: bool = False, start: str = "first_token", steps: frozenset[int] = frozenset()
) -> Chain:
    agents: list[dict[str, Any]] = []
    for index, upstreams in enumerate(reads):
        agent: dict[str, Any] = {"name": f"a{index}", "max_tokens": 4}
        if index in steps:
            text = "step " + " ".join(f"{{{{a{at}}}}}" for at in sorted(upstreams))
            kind: dict[str, Any] = {"call": "x"} if index % 2 else {"extract": {"fenced": ""}}
            agent = {"name": f"a{index}", "input": text, "max_chars": 16, **kind}
        elif ids and not upstreams:
            agent["prompt_ids"] = [1, 2, 3]
        else:
            agent["prompt"] = "read " + " ".join(f"{{{{a{at}}}}}" for at in sorted(upstreams))
        agents.append(agent)
    return parse_chain(json.dumps({"name": "c", "agents": agents, "start": start}).encode())


class Service:
    """Chains over a fake fleet and a fake store."""

    def __init__(
        self,
        figures: EngineFigures | None = None,
        limits: EngineLimits = LIMITS,
        more: dict[str, Any] | None = None,
        limits_of: dict[str, EngineLimits] | None = None,
        groups: str = "ab",
    ) -> None:
        self.names = groups
        """Of the groups, a letter each."""
        self.figures = figures
        """Of the engines."""
        self.more = more or {}
        """Further keys of the daemon's configuration, from its next start on."""
        self.runner = asyncio.Runner()
        self.store = FakeStore()
        self.events: list[ChainEvent] = []
        self.submitted: list[str] = []
        self.restarted = False
        self.limits = limits
        """Of the engines, from the daemon's next start on."""
        self.limits_of = limits_of or {}
        """The same, of those of some models."""
        self.vllm: dict[str, Any] = {}
        """Raw arguments of the daemon's configuration, likewise."""
        self.begin()

    def begin(self) -> None:
        """A daemon's start."""
        self.slab = Slab.create(SLOTS, 16)
        groups = [{"name": name, "devices": ["cpu:0"]} for name in self.names]
        keys = {"max_queued": 4, "restart": {"give_up_after": 1000}, "vllm": self.vllm}
        config = parse_config({"engine": "simulated", "groups": groups} | keys | self.more)
        self.steps = FakeRunner()
        tools = StepTools(self.steps)  # type: ignore[arg-type]
        self.chains = Chains(config, self.slab, self.store, self.events.append, None, tools)  # type: ignore[arg-type]
        self.fleet = FakeFleet(self.names, self.slab)
        for worker, group in zip(self.fleet.workers.values(), config.groups, strict=False):
            worker.group, worker.limits = group, self.limits_of.get(group.model or "", self.limits)
            worker.figures = self.figures
        self.run(self.serve)

    def give_up_after(self, ends: int) -> None:
        config = parse_config(
            {"engine": "simulated", "groups": [{"name": "a", "devices": ["cpu:0"]}], "restart": {"give_up_after": ends}}
        )
        self.chains.runs.configure(config)

    def serve(self) -> None:
        self.chains.restore()
        for worker in self.fleet.workers.values():
            self.chains.runs.worker_ready(worker)  # type: ignore[arg-type]
        self.chains.serve(self.fleet)  # type: ignore[arg-type]

    def run(self, action: Any, *arguments: Any) -> Any:
        """Call it inside the loop, and let what follows from it be done."""

        async def call() -> Any:
            found = action(*arguments)
            if asyncio.iscoroutine(found):
                found = await found
            for _ in range(STEP_TURNS if self.chains.runs.steps.running else 0):
                await asyncio.sleep(0)
            await self.chains.settled()
            return found

        return self.runner.run(call())

    def submit(self, chain: Chain, mode: str = "auto", **options: Any) -> str:
        given = SubmitOptions(mode=mode, **options)  # type: ignore[arg-type]
        request = Submit(request=1, version=PROTOCOL_VERSION, chain=chain, options=given)
        number: str = self.run(self.chains.submit, request)
        self.submitted.append(number)
        self.run(self.chains.start_waiting)
        return number

    def submit_later(self, chain: Chain, **options: Any) -> Awaitable[str]:
        """A submission that waits for a worker; to be awaited in the loop."""
        request = Submit(request=1, version=PROTOCOL_VERSION, chain=chain, options=SubmitOptions(**options))

        async def begin() -> asyncio.Task[str]:
            task = asyncio.create_task(self.chains.submit(request))
            await asyncio.sleep(0)
            return task

        task: asyncio.Task[str] = self.runner.run(begin())

        async def finish() -> str:
            return await task

        return finish()

    def record(self, number: str) -> ChainRecord:
        return next(record for record in self.chains.live() if record.id == number)

    def result(self, number: str) -> ChainResult:
        found: ChainResult = self.run(lambda: self.chains.result(number, prompt_ids=True))
        return found

    def deliver(self, worker: FakeWorker) -> None:
        self.run(self.chains.runs.hop_message, worker, worker.reports.popleft())

    def lose(self, worker: FakeWorker) -> None:
        """Its process was reaped."""
        worker.state, worker.reachable = "dead", False
        worker.running.clear()
        worker.reports.clear()
        self.run(self.chains.runs.worker_lost, worker, f'worker "{worker.name}" is gone')

    def bring_back(self, worker: FakeWorker) -> None:
        worker.state, worker.reachable = "ready", True
        self.run(self.chains.runs.worker_ready, worker)

    def kill(self) -> None:
        """The daemon dies, and the next one takes up what it has left."""
        self.runner.run(self.chains.end_steps())
        for record in self.chains.live():
            for agent in record.agents:
                agent.stream = None
        self.slab.close()
        self.restarted = True
        self.begin()

    def settle(self) -> None:
        """Let all workers do all they have to do."""
        busy = True
        while busy:
            busy = False
            for worker in self.fleet.workers.values():
                for hop in list(worker.running.values()):
                    advance(worker, hop)
                    busy = True
                while worker.reports:
                    self.deliver(worker)
                    busy = True
            for name in list(self.steps.running):
                self.end_step(name)
                busy = True

    def end_step(self, name: str, error: str = "") -> None:
        """Let a step end, with its own name as its output, or with an error."""
        future = self.steps.running[name]
        self.run(future.set_exception, ChainFailed(error)) if error else self.run(future.set_result, name[-2:])

    def told(self, number: str) -> dict[str, list[int]]:
        """What a follower that was there all along has got of each agent."""
        found: dict[str, list[int]] = {}
        for event in self.events:
            if event.chain != number:
                continue
            ids = found.setdefault(event.agent, [])
            if event.kind == "agent_restarted":
                ids.clear()
            elif event.kind == "tokens":
                assert event.data["first_index"] == len(ids)
                ids += event.data["ids"]
        return found

    def close(self) -> None:
        self.slab.close()
        self.runner.close()
