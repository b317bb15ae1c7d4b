"""Runs one cell: brings its target to its phase, strikes, does what a service manager and a user would do, judges."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import time
from pathlib import Path

import msgspec

from faults.cell import Cell
from faults.client_handle import ClientProcess
from faults.outcome import Outcome
from faults.phases import BEGINS, ENDS, STRUCK
from faults.reader import Reader, check_reading, check_result
from faults.scene import GROUPS, KEPT_KEY, OPTIONS_OF, chain, config, warm_up
from faults.service import CellFault, Service, engine_of, until
from pingpong_bus.errors import PingpongError
from pingpong_bus.messages import ChainEvent, ChainResult, SubmitOptions
from pingpong_client import AsyncClient

_CELL_S = 150.0
"""A hang limit for a whole cell."""


class CellRun:
    """One run of a cell in a service's folders."""

    def __init__(self, cell: Cell, service: Service, reference: ChainResult, kept: Path) -> None:
        """Args:
        cell: which.
        service: not running.
        reference: the result of an undisturbed run in series.
        kept: a state directory with one accepted chain, and its id in its name's suffix.
        """
        self._cell = cell
        self._service = service
        self._reference = reference
        self._kept = kept
        self._config = config(cell.phase)
        self._readers: list[Reader] = []
        self._clients: list[ClientProcess] = []
        self._observer: AsyncClient | None = None
        self._missed = False
        self._client_failed = ""

    async def run(self) -> Outcome:
        started = time.monotonic()
        wrong = ""
        try:
            async with asyncio.timeout(_CELL_S):
                await self._run()
        except TimeoutError:
            wrong = f"it was not through after {_CELL_S:g} s"
        except (CellFault, PingpongError) as error:
            wrong = f"{type(error).__name__}: {error}"
        finally:
            for reader in self._readers:
                await reader.close()
            if self._observer is not None:
                await self._observer.close()
            for client in self._clients:
                client.kill()
        results = [reader.result for reader in self._readers if reader.result is not None]
        log = self._service.log_path.read_text(errors="replace").splitlines()[-60:] if wrong else []
        if wrong:
            self._service.kill()
        agents = [agent for result in results for agent in result.agents]
        return Outcome(
            cell=self._cell.name,
            wrong="" if self._missed else wrong,
            missed=self._missed,
            stop_s=self._cell.stop_s,
            exit_codes=self._service.exit_codes,
            resumed=sum(len(agent.resumed) for agent in agents),
            attempts=max((agent.attempt for agent in agents), default=1),
            clean_s=max(self._service.clean_s, default=0.0),
            seconds=round(time.monotonic() - started, 1),
            log=log,
        )

    async def _run(self) -> None:
        await self._to_phase()
        self._strike()
        if self._cell.stop_s is not None:
            await asyncio.sleep(self._cell.stop_s)  # the fault itself, not a wait for luck
            self._send(signal.SIGCONT)
        await self._recover()
        self._judge()
        if self._cell.must_be_noticed and not any(line["event"] == "worker_hung" for line in self._service.log()):
            raise CellFault(f"nobody noticed a stop of {self._cell.stop_s} s")
        await self._service.stop()
        if complaints := self._service.complaints():
            raise CellFault(f"the log complains: {complaints[0]}")

    # ------------------------------------------------------------------------------------------------- into the phase

    async def _to_phase(self) -> None:
        cell, service = self._cell, self._service
        if cell.phase == "loading":
            shutil.rmtree(service.state_dir, ignore_errors=True)
            shutil.copytree(self._kept, service.state_dir)
            service.start(self._config)
            await self._find_loading()
            return
        service.start(self._config)
        await service.ready()
        if cell.must_be_noticed:
            client = await self._connected()
            await asyncio.gather(*(client.run(warm_up(), options=SubmitOptions(group=group)) for group in GROUPS))
        first = await self._submit()
        await first.until(lambda: first.has(*BEGINS[cell.phase]), cell.phase)
        if cell.phase == "waiting":
            second = await self._submit()
            self._missed = (await self._client.result(second.chain)).state != "queued"
        elif cell.phase == "draining":
            await self._drain()
        await self._find(first, STRUCK[cell.phase])
        self._missed |= first.has(*ENDS[cell.phase])

    async def _find_loading(self) -> None:
        service = self._service
        chain_id = self._kept.name
        if self._cell.target == "client":
            await until(lambda: (service.runtime_dir / "control.sock").exists(), "the control socket")
            client = self._start_client("attach", chain_id)
            await client.wrote("snapshot")
            self._pid = client.process.pid
        else:
            await until(lambda: any(engine_of(worker) for worker in service.workers().values()), "an engine that loads")
            engine = next(engine for worker in service.workers().values() if (engine := engine_of(worker)))
            parent = engine.ppid()
            self._pid = {"supervisor": service.pid, "worker": parent, "engine": engine.pid}[self._cell.target]
        self._missed = any(line["event"] == "daemon_ready" for line in service.log())

    async def _submit(self, key: str = "") -> Reader:
        key = key or secrets.token_hex(8)
        client = await self._connected()
        if self._cell.target == "client" and key != KEPT_KEY:
            path = self._service.folder / "chain.json"
            path.write_bytes(msgspec.json.encode(chain()))
            await self._start_client("submit", str(path), key).wrote("chain")
        # With the key of a chain that was submitted before, this follows that chain, and from its beginning.
        chain_id = await client.submit(chain(), options=OPTIONS_OF[self._cell.how], follow=True, key=key)
        self._readers.append(Reader(client, chain_id))
        return self._readers[-1]

    async def _drain(self) -> None:
        if self._cell.long:
            os.kill(self._service.pid, signal.SIGTERM)
        else:
            await self._client.drain()
        await until(
            lambda: any(line["event"] == "daemon_draining" for line in self._service.log()), "that the daemon drains"
        )

    async def _find(self, reader: Reader, agent: str) -> None:
        """The target's process id."""
        if self._cell.target == "client":
            self._pid = self._clients[-1].process.pid
        elif self._cell.target == "supervisor":
            self._pid = self._service.pid
        else:
            opened = [event for event in reader.events if event.kind == "opened" and event.agent == agent]
            worker = self._service.workers()[opened[-1].data["worker"]]
            engine = engine_of(worker)
            assert engine is not None
            self._pid = worker.pid if self._cell.target == "worker" else engine.pid

    # --------------------------------------------------------------------------------------------- the fault, and after

    def _strike(self) -> None:
        self._send(self._cell.number)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # stopped, it may have been ended meanwhile
            os.kill(self._pid, number)

    async def _recover(self) -> None:
        """Start again what died, until every chain has ended."""
        dies = self._cell.target == "supervisor" and self._cell.stop_s is None
        if dies and (self._cell.phase == "loading" or self._cell.signal != "SIGTERM"):
            await until(lambda: not self._service.alive, "the end of the daemon that was hit")
        if self._cell.phase == "loading":
            await self._service_up()
            await self._submit(KEPT_KEY)
        async with asyncio.timeout(_CELL_S):
            while not all(reader.task.done() for reader in self._readers):
                await self._service_up()
                await asyncio.sleep(0.05)
        for reader in self._readers:
            if (error := reader.task.exception()) is not None:
                raise CellFault(f"a reader of {reader.chain} ended with {error!r}")
        if self._cell.phase == "draining" and not self._service.exit_codes:
            await until(lambda: not self._service.alive, "the end of a daemon that drains")
        await self._service_up()
        for number, client in enumerate(list(self._clients)):
            await self._client_up(number, client)

    async def _service_up(self) -> None:
        if self._service.alive:
            return
        code = await self._service.ended()
        struck = self._cell.target == "supervisor"
        expected = {0} | ({-self._cell.number} if struck else set())
        if code not in expected or (code == 0 and not struck and self._cell.phase != "draining"):
            raise CellFault(f"the daemon ended with {code}")
        self._service.start(self._config)
        await self._service.ready()

    async def _client_up(self, number: int, client: ClientProcess) -> None:
        """A client that died attaches again; either way it reads its chain to the end."""
        chain_id = self._readers[number].chain
        if self._cell.stop_s is None and client is self._clients[-1]:
            await until(lambda: client.process.poll() is not None, "the end of the client that was hit")
            client = self._start_client("attach", chain_id)
        result = msgspec.convert(await client.wrote("result"), ChainResult)
        await until(lambda: client.process.poll() is not None, "the client's end")
        events = [msgspec.convert(event, ChainEvent) for event in client.read("event")]
        whole = not client.read("snapshot")
        if whole:
            check_reading(events, result)
        check_result(result, self._reference)

    # ----------------------------------------------------------------------------------------------------- the judgment

    def _judge(self) -> None:
        for reader in self._readers:
            assert reader.result is not None
            check_reading(reader.events, reader.result)
            check_result(reader.result, self._reference)

    # ---------------------------------------------------------------------------------------------------------- helpers

    @property
    def _client(self) -> AsyncClient:
        assert self._observer is not None
        return self._observer

    async def _connected(self) -> AsyncClient:
        if self._observer is None:
            self._observer = self._service.client()
            await self._observer.__aenter__()
        return self._observer

    def _start_client(self, how: str, *what: str) -> ClientProcess:
        self._clients.append(ClientProcess(self._service, len(self._clients), how, *what))
        return self._clients[-1]
