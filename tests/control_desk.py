"""A control socket over chains that a test plays, and raw clients to talk to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import zmq
import zmq.asyncio

from pingpong_bus import codec
from pingpong_bus.chain import Agent, Chain
from pingpong_bus.errors import ChainNotFound
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    ChainEvent,
    ChainResult,
    ChainSummary,
    ClientRequest,
    DaemonMessage,
    Explain,
    Explained,
    StatusReply,
    Submit,
)
from pingpongd.client_ledger import ClientLimits
from pingpongd.control import Control
from pingpongd.peers import Doorkeeper
from pingpongd.runtime_dir import RuntimeDir

HANG_SECONDS = 60.0
CHAIN = Chain(name="c", agents=[Agent(name="a", prompt="x")])


class FakeChains:
    """Chains that run for as long as the test likes; fits `ChainService`."""

    def __init__(self) -> None:
        self.results: dict[str, ChainResult] = {}
        self.keys: dict[str, str] = {}
        self.calls: list[str] = []
        self.tokenizing = asyncio.Event()
        """Submissions and scores wait for it."""
        self.tokenizing.set()
        self.under_way = 0
        self.most_under_way = 0
        self.error = ""
        """Text of every result."""

    async def submit(self, request: Submit) -> str:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.tokenizing.wait()
        finally:
            self.under_way -= 1
        if request.key in self.keys:
            return self.keys[request.key]
        chain = f"chain-{len(self.results)}"
        if request.key:
            self.keys[request.key] = chain
        self.results[chain] = ChainResult(id=chain, name=request.chain.name, state="running", error=self.error)
        return chain

    async def explain(self, request: Explain) -> Explained:
        self.calls.append("explain")
        await self.tokenizing.wait()
        return Explained(request=request.request, predictions=[], chosen=None, placement="serial", why="only")

    def start_waiting(self) -> None:
        self.calls.append("start_waiting")

    def is_live(self, chain: str) -> bool:
        return chain in self.results and self.results[chain].state in ("queued", "running")

    async def snapshot(self, chain: str) -> ChainResult:
        await asyncio.sleep(0)
        if chain not in self.results:
            raise ChainNotFound(f'there is no chain "{chain}".')
        return self.results[chain]

    async def result(self, chain: str, *, prompt_ids: bool = False) -> ChainResult:
        self.calls.append(f"result {chain} {prompt_ids}")
        return await self.snapshot(chain)

    async def summaries(self, limit: int) -> list[ChainSummary]:
        return [
            ChainSummary(
                id=result.id,
                name=result.name,
                state=result.state,
                placement=None,
                agents=1,
                finished_agents=0,
                age_s=0.0,
                e2e_ms=None,
            )
            for result in self.results.values()
        ][-limit:]

    def cancel(self, chain: str) -> None:
        self.calls.append(f"cancel {chain}")

    async def forget(self, chain: str) -> None:
        self.calls.append(f"forget {chain}")
        if self.results.pop(chain, None) is None:
            raise ChainNotFound(f'there is no chain "{chain}".')

    async def reset_caches(self) -> None:
        self.calls.append("reset_caches")

    async def score(
        self, ids: Sequence[int], tokens: Sequence[int], grid: int | None, model: str = ""
    ) -> list[float | None]:
        self.calls.append(f"score {list(ids)} {list(tokens)} {grid}")
        await self.tokenizing.wait()
        return [None if token > len(ids) else -1.0 for token in tokens]

    def end(self, chain: str) -> ChainEvent:
        """It has finished; returns its last event."""
        self.results[chain] = ChainResult(id=chain, name="c", state="finished", e2e_ms=7.0)
        return ChainEvent(chain=chain, kind="ended", at_ms=7.0, data={"state": "finished", "error": ""})


class Desk:
    """A served control socket."""

    def __init__(self, path: Path, control: Control, chains: FakeChains, context: zmq.asyncio.Context) -> None:
        self.path = path
        self.control = control
        self.chains = chains
        self._context = context
        self.drained: list[tuple[str | None, float | None]] = []
        self.clients: list[RawClient] = []

    def client(self, identity: bytes | None = None) -> RawClient:
        """A new connection, closed with the desk."""
        client = RawClient(self._context, self.path, identity)
        self.clients.append(client)
        return client

    async def drain(self, group: str | None, deadline_s: float | None) -> None:
        self.drained.append((group, deadline_s))

    def status(self, request: int) -> StatusReply:
        return StatusReply(
            request=request,
            instance="test",
            version="0",
            pid=1,
            uptime_s=0.0,
            state="ready",
            slots_free=0,
            slots_total=0,
            slot_capacity=0,
            workers=[],
            chains={},
            refused_frames={"control.sock": self.control.refused_frames},
        )


class RawClient:
    """A DEALER that sends whatever it is given."""

    def __init__(self, context: zmq.asyncio.Context, path: Path, identity: bytes | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        if identity is not None:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.connect(f"ipc://{path}")
        self._number = 0

    async def send(self, request: ClientRequest) -> None:
        await self.socket.send(codec.encode(request))

    async def receive(self) -> DaemonMessage:
        async with asyncio.timeout(HANG_SECONDS):
            return codec.decode_daemon_message(await self.socket.recv())

    async def ask(self, build: Callable[[int], ClientRequest]) -> DaemonMessage:
        """Send a request; returns the answer of its number, and drops what came before."""
        self._number += 1
        await self.send(build(self._number))
        while True:
            message = await self.receive()
            if not isinstance(message, ChainEvent) and message.request == self._number:
                return message

    def close(self) -> None:
        self.socket.close()


def submit(number: int, *, follow: bool = False, key: str = "", text: str = "x") -> Submit:
    chain = Chain(name="c", agents=[Agent(name="a", prompt=text)])
    return Submit(request=number, version=PROTOCOL_VERSION, chain=chain, follow=follow, key=key)


@asynccontextmanager
async def open_desk(
    folder: Path,
    *,
    limits: ClientLimits | None = None,
    doorkeeper: Doorkeeper | None = None,
    client_group: str | None = None,
) -> AsyncIterator[Desk]:
    """A control socket in a folder whose path is short, served for as long as the context lasts."""
    context = zmq.asyncio.Context()
    with RuntimeDir(folder / "r", "test", client_group) as runtime:
        control = Control(runtime, context, limits, doorkeeper)
        chains = FakeChains()
        desk = Desk(folder / "r" / "control.sock", control, chains, context)
        serving = asyncio.create_task(control.serve(chains, desk.status, desk.drain))
        try:
            yield desk
            assert not serving.done(), "the control socket is not served any more"
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for client in desk.clients:
                client.close()
            control.close()
            context.term()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a limit for hangs."""
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(what) from None
