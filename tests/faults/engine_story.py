"""Eight cells on two real engines, one daemon: where a cell costs a start, that start is the next cell's."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec
import psutil

from faults.cell import Cell
from faults.client_handle import ClientProcess
from faults.outcome import Outcome
from faults.phases import BEGINS, ENDS, STRUCK
from faults.reader import Reader, check_reading, check_result
from faults.scene import OPTIONS
from faults.service import CellFault, Service, engine_of, until
from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.errors import PingpongError
from pingpong_bus.messages import ChainEvent, ChainResult
from pingpong_client import AsyncClient

SERVING_CELLS = [
    Cell("SIGKILL", "client", "decoding"),
    Cell("SIGKILL", "worker", "decoding"),
    Cell("SIGSEGV", "engine", "appending"),
    Cell("SIGSTOP", "engine", "decoding"),
    Cell("SIGTERM", "worker", "waiting"),
]
"""Each begins with both engines serving."""
STARTING_CELLS = [
    Cell("SIGKILL", "supervisor", "finalizing"),
    Cell("SIGKILL", "supervisor", "loading"),
    Cell("SIGSEGV", "engine", "loading"),
]
"""These follow one another: the second hits the start after the first, the third the one after that."""
ENGINE_CELLS = [*SERVING_CELLS, *STARTING_CELLS]

CONFIG = """
engine = "vllm"
model = "smollm2-135m"
dtype = "float32"
slots = 3
drain_seconds = 60
[watch]
stall_s = 5
stop_s = 3
[restart]
backoff_s = 0.1
give_up_after = 20
[vllm]
max_model_len = 2048
max_num_seqs = 4
enforce_eager = true
[environment]
VLLM_CPU_KVCACHE_SPACE = "1"
[[groups]]
name = "a"
devices = ["cpu:0"]
[[groups]]
name = "b"
devices = ["cpu:1"]
"""

_NOTICED_S = 60.0
"""A hang limit for noticing that an engine stands still; `stall_s` or five predicted steps are less."""
_TRIES = 3


def chain() -> Chain:
    """Some seconds of work on one core for each engine; like `scene.chain`."""
    head, tail = (
        "Tell of the sea, of its tides and of the ships upon it. " * 4,
        " Say it in other words, and go on." * 70,
    )
    agents = [
        {"name": "first", "prompt": head, "max_tokens": 64, "ignore_eos": True},
        {"name": "second", "prompt": head + "{{first}}" + tail, "max_tokens": 64, "ignore_eos": True},
        {"name": "third", "prompt": "{{second}} Go on.", "max_tokens": 8, "ignore_eos": True},
    ]
    return parse_chain(json.dumps({"name": "fault", "agents": agents}).encode())


class EngineStory:
    """Runs the cells in a folder; `outcomes` has what became of them, in their order."""

    def __init__(self, folder: Path, tell: Callable[[Outcome], None] = lambda outcome: None) -> None:
        self.outcomes: list[Outcome] = []
        self._service = Service(folder)
        self._tell = tell
        self._clients: list[ClientProcess] = []
        self._readers: list[Reader] = []

    async def run(self) -> list[Outcome]:
        service = self._service
        try:
            service.start(CONFIG)
            await service.ready(patience_s=300)
            async with service.client() as client:
                serial = msgspec.structs.replace(OPTIONS, mode="serial")
                self._reference = await client.run(chain(), options=serial)
                for cell in SERVING_CELLS:
                    await self._outcome(cell, self._hit_serving(cell, client))
                await self._outcome(STARTING_CELLS[0], self._hit_supervisor(client))
                await self._outcome(STARTING_CELLS[1], self._hit_start())
                await self._outcome(STARTING_CELLS[2], self._hit_loading_engine())
                await service.stop()
        finally:
            for reader in self._readers:
                await reader.close()
            for process in self._clients:
                process.kill()
            service.kill()
        return self.outcomes

    async def _outcome(self, cell: Cell, work: Coroutine[None, None, None]) -> None:
        started, wrong = time.monotonic(), ""
        read = len(self._readers)
        try:
            async with asyncio.timeout(400):
                await work
        except TimeoutError:
            wrong = "it was not through after 400 s"
        except (CellFault, PingpongError) as error:
            wrong = f"{type(error).__name__}: {error}"
        if not wrong and (complaints := self._service.complaints()):
            wrong = f"the log complains: {complaints[0]}"
        results = [reader.result for reader in self._readers[read:] if reader.result is not None]
        agents = [agent for result in results for agent in result.agents]
        outcome = Outcome(
            cell=cell.name,
            wrong=wrong,
            exit_codes=list(self._service.exit_codes),
            resumed=sum(len(agent.resumed) for agent in agents),
            attempts=max((agent.attempt for agent in agents), default=1),
            clean_s=max(self._service.clean_s, default=0.0),
            seconds=round(time.monotonic() - started, 1),
            log=self._service.log_path.read_text(errors="replace").splitlines()[-60:] if wrong else [],
        )
        self.outcomes.append(outcome)
        self._tell(outcome)
        if wrong:
            raise CellFault(f"{cell.name}: {wrong}")  # the cells that follow build on this one

    # ------------------------------------------------------------------------------------------- while engines serve

    async def _hit_serving(self, cell: Cell, client: AsyncClient) -> None:
        await self._service.ready(patience_s=300)
        for _ in range(_TRIES):
            first, others = await self._into_phase(cell, client)
            pid = self._pid(cell, first)
            if not first.has(*ENDS[cell.phase]):
                break
            await asyncio.gather(first.task, *(other.task for other in others))
        else:
            raise CellFault("the signal came too late for the phase, each time")
        os.kill(pid, cell.number)
        if cell.signal == "SIGSTOP":
            await self._hung(pid)
        if cell.target == "client":
            await self._attach_anew(first)
        for reader in (first, *others):
            await self._finishes(reader)
        if cell.target != "client":
            await until(lambda: not psutil.pid_exists(pid), "the end of what was hit")

    async def _into_phase(self, cell: Cell, client: AsyncClient) -> tuple[Reader, list[Reader]]:
        others = []
        key = f"{cell.name}-{len(self._readers)}"
        if cell.target == "client":
            path = self._service.folder / "chain.json"
            path.write_bytes(msgspec.json.encode(chain()))
            self._clients.append(ClientProcess(self._service, len(self._clients), "submit", str(path), key))
            await self._clients[-1].wrote("chain")
        first = self._reader(client, await client.submit(chain(), options=OPTIONS, follow=True, key=key))
        await first.until(lambda: first.has(*BEGINS[cell.phase]), cell.phase)
        if cell.phase == "waiting":
            others.append(self._reader(client, await client.submit(chain(), options=OPTIONS, follow=True)))
            if (await client.result(others[0].chain)).state != "queued":
                raise CellFault("the second chain does not wait")
        return first, others

    def _pid(self, cell: Cell, reader: Reader) -> int:
        if cell.target == "client":
            return self._clients[-1].process.pid
        agent = STRUCK[cell.phase]
        opened = [event for event in reader.events if event.kind == "opened" and event.agent == agent]
        worker = self._service.workers()[opened[-1].data["worker"]]
        engine = engine_of(worker)
        assert engine is not None
        return worker.pid if cell.target == "worker" else engine.pid

    async def _hung(self, pid: int) -> None:
        """Wait until the stop is noticed; what was stopped does not live to go on."""
        await until(
            lambda: any(line["event"] == "worker_hung" for line in self._service.log()),
            "that it is noticed",
            _NOTICED_S,
        )
        await until(lambda: not psutil.pid_exists(pid), "the end of the engine that was stopped")

    async def _attach_anew(self, reader: Reader) -> None:
        await until(lambda: self._clients[-1].process.poll() is not None, "the end of the client that was hit")
        self._clients.append(ClientProcess(self._service, len(self._clients), "attach", reader.chain))
        result = msgspec.convert(await self._clients[-1].wrote("result"), ChainResult)
        events = [msgspec.convert(event, ChainEvent) for event in self._clients[-1].read("event")]
        check_reading(events, result, from_start=False)
        check_result(result, self._reference)

    # ----------------------------------------------------------------------------------------------- while they start

    async def _hit_supervisor(self, client: AsyncClient) -> None:
        await self._service.ready(patience_s=300)
        first, _ = await self._into_phase(STARTING_CELLS[0], client)
        if first.has(*ENDS["finalizing"]):
            raise CellFault("the signal came too late for the phase")
        await self._kill_supervisor()

    async def _hit_start(self) -> None:
        await self._loading()
        await self._kill_supervisor()

    async def _hit_loading_engine(self) -> None:
        engine = await self._loading()
        os.kill(engine.pid, STARTING_CELLS[2].number)
        await self._service.ready(patience_s=300)
        await self._finishes(self._readers[-1])  # which three deaths have not lost

    async def _loading(self) -> psutil.Process:
        """Wait for an engine that loads; the daemon was just started."""
        found: list[psutil.Process] = []

        def there() -> bool:
            engines = [engine_of(worker) for worker in self._service.workers().values()]
            found[:] = [engine for engine in engines if engine is not None]
            return bool(found)

        await until(there, "an engine that loads", look_s=0.2)
        return found[0]

    async def _kill_supervisor(self) -> None:
        os.kill(self._service.pid, STARTING_CELLS[0].number)
        await self._service.ended()
        self._service.start(CONFIG)

    # --------------------------------------------------------------------------------------------------------- helpers

    def _reader(self, client: AsyncClient, chain_id: str) -> Reader:
        self._readers.append(Reader(client, chain_id))
        return self._readers[-1]

    async def _finishes(self, reader: Reader) -> None:
        await reader.task
        assert reader.result is not None
        check_reading(reader.events, reader.result)
        check_result(reader.result, self._reference)
