"""A daemon that only talks: behind a fake transport, or on a real socket. And commands that are run against it."""

from __future__ import annotations

import argparse
import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from pingpong_bus.codec import decode_client_request, encode
from pingpong_bus.errors import ChainNotFound, DaemonUnavailable, MessageError, PingpongError
from pingpong_bus.messages import (
    Accepted,
    AgentResult,
    Attach,
    Cancel,
    ChainEvent,
    ChainList,
    ChainResult,
    ChainSummary,
    ClientRequest,
    DaemonMessage,
    Done,
    Drain,
    EngineLimits,
    ErrorReply,
    Explain,
    Explained,
    Forget,
    GetResult,
    GetStatus,
    ListChains,
    ResetCaches,
    ResultReply,
    Score,
    Scored,
    Seen,
    Snapshot,
    StatusReply,
    Submit,
    WorkerStatus,
)
from pingpong_client import AsyncClient
from pingpong_client.certificate import digest
from pingpong_client.cli import COMMANDS, build_parser
from pingpong_client.commands.context import Context
from pingpong_client.transport import no_daemon


class FakeDaemon:
    """Answers every request; a chain's agents write fixed texts. Tests bend it through its attributes."""

    def __init__(self) -> None:
        self.requests: list[ClientRequest] = []
        self.seen: list[int] = []
        self.results: dict[str, ChainResult] = {}
        self.keys: dict[str, str] = {}
        self.ended: set[str] = set()
        """Chains that ended although they were held."""
        self.away = False
        """Whether nobody answers on the socket."""
        self.refuse: dict[type, PingpongError] = {}
        self.silent: set[type] = set()
        self.hold = False
        """Whether chains stay unfinished until `finish`."""
        self.edit: Callable[[Submit, ChainResult], ChainResult] = lambda submit, result: result
        """Changes a result before it is kept."""
        self.logprobs: list[float | None] = [-0.5, -0.75]
        """Answers every `Score`."""
        self.explained = Explained(request=0, predictions=[], chosen=None, placement="serial", why="one device group")
        """Answers every `Explain`, but for the number."""
        self.edit_status: Callable[[StatusReply], StatusReply] = lambda status: status
        self.drop_events = False
        self.send_frame: Callable[[bytes], None] = lambda frame: None
        """To the client that asked last."""

    def send(self, message: DaemonMessage) -> None:
        self.send_frame(encode(message))

    def handle(self, request: ClientRequest) -> None:
        if isinstance(request, Seen):
            self.seen.append(request.messages)
            return
        self.requests.append(request)
        if type(request) in self.silent:
            return
        try:
            if (error := self.refuse.get(type(request))) is not None:
                raise error
            self._answer(request)
        except PingpongError as error:
            self.send(
                ErrorReply(
                    request=request.request, code=error.code, message=error.message, hint=error.hint, field=error.field
                )
            )

    def finish(self, chain_id: str) -> None:
        result = self.results[chain_id]
        self.ended.add(chain_id)
        for event in events_of(result):
            if not self.drop_events:
                self.send(event)

    def finish_agent(self, chain_id: str, index: int) -> None:
        result = self.results[chain_id]
        for event in events_of(result):
            if event.agent == result.agents[index].name:
                self.send(event)

    def _answer(self, request: ClientRequest) -> None:
        number = request.request
        if isinstance(request, Submit):
            known = self.keys.get(request.key)
            ended_before = known is not None and not self.hold
            if known is None:
                known = f"c{len(self.results)}"
                self.results[known] = self.edit(request, result_of(known, request))
                self.keys[request.key] = known
            self.send(Accepted(request=number, chain=known))
            if ended_before and request.follow:
                self.send(ended_of(self.results[known]))
            elif not self.hold and request.follow:
                self.finish(known)
        elif isinstance(request, Attach):
            self.send(Snapshot(request=number, result=self._now(request.chain)))
        elif isinstance(request, ListChains):
            chains = [
                ChainSummary(
                    id=result.id,
                    name=result.name,
                    state=result.state,
                    placement=result.placement,
                    agents=len(result.agents),
                    finished_agents=len(result.agents),
                    age_s=3723.0,
                    e2e_ms=result.e2e_ms,
                    exactness=result.exactness,
                    why=result.why if result.state == "queued" else "",
                )
                for result in list(self.results.values())[-request.limit :]
            ]
            self.send(ChainList(request=number, chains=chains))
        elif isinstance(request, GetStatus):
            self.send(self.edit_status(status_of(number, len(self.results))))
        elif isinstance(request, GetResult):
            result = self._now(request.chain)
            if not request.prompt_ids:
                bare = [msgspec.structs.replace(agent, prompt_ids=None) for agent in result.agents]
                result = msgspec.structs.replace(result, agents=bare)
            self.send(ResultReply(request=number, result=result))
        elif isinstance(request, Cancel):
            result = self._now(request.chain)
            self.send(Done(request=number))
            if result.state == "queued":
                self.results[request.chain] = msgspec.structs.replace(result, state="cancelled", error="cancelled")
                self.ended.add(request.chain)
                self.send(ended_of(self.results[request.chain]))
        elif isinstance(request, Forget):
            self._find(request.chain)
            del self.results[request.chain]
            self.send(Done(request=number))
        elif isinstance(request, Explain):
            self.send(msgspec.structs.replace(self.explained, request=number))
        elif isinstance(request, Score):
            self.send(Scored(request=number, logprobs=self.logprobs[: len(request.tokens)]))
        elif isinstance(request, ResetCaches | Drain):
            self.send(Done(request=number))

    def _now(self, chain_id: str) -> ChainResult:
        result = self._find(chain_id)
        if not self.hold or chain_id in self.ended:
            return result
        agents = [AgentResult(name=agent.name) for agent in result.agents]
        return msgspec.structs.replace(result, state="queued", placement=None, agents=agents)

    def _find(self, chain_id: str) -> ChainResult:
        if chain_id not in self.results:
            raise ChainNotFound(f'there is no chain "{chain_id}".', hint="See `pingpong-client list`.")
        return self.results[chain_id]


def result_of(chain_id: str, submit: Submit) -> ChainResult:
    agents = [
        AgentResult(
            name=agent.name,
            state="finished",
            text=f"text of {agent.name}",
            output_ids=[index, 7],
            prompt_tokens=3,
            output_tokens=2,
            finish_reason="stop",
            stop_token=2,
            ttft_ms=12.5,
            total_ms=1250.0,
            worker="w0",
            session="prefix-cache",
            prompt_ids=[1, 2, index],
            prompt_digest=digest([1, 2, index]),
        )
        for index, agent in enumerate(submit.chain.agents)
    ]
    mode = submit.options.mode
    placement = "ping-pong" if mode == "auto" else mode
    level = submit.options.exactness or submit.chain.exactness or "fast"
    return ChainResult(
        id=chain_id, name=submit.chain.name, state="finished", placement=placement, e2e_ms=2500.0, agents=agents,
        exactness=level, grid=256 if level == "grid" else None,
    )  # fmt: skip


def events_of(result: ChainResult) -> list[ChainEvent]:
    events = [ChainEvent(chain=result.id, kind="started", at_ms=0.1, data={"placement": result.placement, "why": ""})]
    for agent in result.agents:

        def event(kind: str, at_ms: float, name: str = agent.name, **data: object) -> ChainEvent:
            return ChainEvent(chain=result.id, kind=kind, at_ms=at_ms, agent=name, data=data)

        events += [
            event("opened", 1.0, worker="w0"),
            event("reading", 5.0, sent=3),
            event("finalized", 6.0, prompt_tokens=3),
            event("writing", 10.0, cached_tokens=0, ttft_ms=9.0),
            event("tokens", 20.0, ids=agent.output_ids, text=agent.text, first_index=0, output_tokens=2),
            event("agent_finished", 21.0, finish_reason="stop", output_tokens=2, total_ms=20.0),
        ]
    return [*events, ended_of(result)]


def ended_of(result: ChainResult) -> ChainEvent:
    return ChainEvent(chain=result.id, kind="ended", at_ms=22.0, data={"state": result.state, "error": result.error})


def status_of(number: int, chains: int) -> StatusReply:
    limits = EngineLimits(
        engine="simulated 1", model="timing", max_model_len=4096, vocabulary_size=4096, block_size=16, kv_tokens=65536,
        max_num_seqs=64, dtype="float32", device="timing model", grid_tokens=256, decode_first=True, overlap=True,
    )  # fmt: skip
    workers = [
        WorkerStatus(
            name=f"w{at}", devices=[f"cpu:{at}"], state="ready", stage="", pid=100 + at, hops=0, limits=limits,
            rss_bytes=64 * 2**20, output_tokens=1234,
        )
        for at in range(2)
    ]  # fmt: skip
    return StatusReply(
        request=number, instance="default", version="0.1.0", pid=99, uptime_s=75.0, state="ready", slots_free=60,
        slots_total=64, slot_capacity=4096, workers=workers, chains={"finished": chains}, python="3.11.9",
    )  # fmt: skip


class FakeTransport:
    """Hands frames to a FakeDaemon and back, without a socket."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon
        self._frames: asyncio.Queue[bytes | PingpongError] = asyncio.Queue()
        self.peer = "/fake/control.sock"
        self.closed = False

    async def open(self) -> None:
        if self._daemon.away:
            raise no_daemon(self.peer)
        self._daemon.send_frame = self._frames.put_nowait

    async def send(self, frame: bytes) -> None:
        self._daemon.handle(decode_client_request(frame))

    async def receive(self) -> bytes:
        frame = await self._frames.get()
        if isinstance(frame, PingpongError):
            raise frame
        return frame

    async def close(self) -> None:
        self.closed = True

    def lose(self) -> None:
        self._frames.put_nowait(DaemonUnavailable("the daemon went away."))


class Link:
    """A fake daemon, and clients that reach it by fake transports."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.transports: list[FakeTransport] = []
        self.settings: dict[str, object] = {}
        """Of every client; a test may change them."""

    def transport(self, path: Path) -> FakeTransport:
        transport = FakeTransport(self.daemon)
        self.transports.append(transport)
        return transport

    def client(self, **settings: object) -> AsyncClient:
        return AsyncClient("/fake", transport=self.transport, **(self.settings | settings))

    def lose(self) -> None:
        """End the connection that was made last."""
        self.transports[-1].lose()

    async def command(self, *words: str, stdin: bytes = b"", terminal: bool = False) -> CommandOutcome:
        """Run a command of the command line in this process."""
        args: argparse.Namespace = build_parser().parse_args(words)
        self.stdout, self.stderr = (Terminal() if terminal else io.StringIO()), io.StringIO()
        context = Context(args, io.BytesIO(stdin), self.stdout, self.stderr, connect=self.client)
        error: PingpongError | None = None
        try:
            code = await COMMANDS[args.command].run(context)
        except PingpongError as raised:
            code, error = raised.exit_code, raised
        return CommandOutcome(code, self.stdout.getvalue(), self.stderr.getvalue(), error)


class CommandOutcome(msgspec.Struct):
    code: int
    out: str
    err: str
    error: PingpongError | None


class Terminal(io.StringIO):
    """Looks like a terminal to whoever asks."""

    def isatty(self) -> bool:
        return True


@asynccontextmanager
async def served(daemon: FakeDaemon, path: Path) -> AsyncIterator[zmq.asyncio.Socket]:
    """A fake daemon on a real socket, for one client at a time."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(f"ipc://{path}")
    peer = b""

    def send_frame(frame: bytes) -> None:
        zmq.Socket.send_multipart(socket, [peer, frame])

    async def serve() -> None:
        nonlocal peer
        while True:
            peer, frame = await socket.recv_multipart()
            daemon.send_frame = send_frame
            try:
                daemon.handle(decode_client_request(frame))
            except MessageError as error:
                daemon.send(ErrorReply(request=0, code=error.code, message=error.message, hint=error.hint))

    task = asyncio.create_task(serve())
    try:
        yield socket
    finally:
        task.cancel()
        await asyncio.wait({task})
        socket.close()
        context.term()
