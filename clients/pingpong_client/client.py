"""The asynchronous client."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from pingpong_bus.chain import Chain, parse_chain, resolve_inputs
from pingpong_bus.errors import ChainFailed, DataError, Overloaded
from pingpong_bus.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    ChainEvent,
    ChainList,
    ChainResult,
    ChainSummary,
    ClientRequest,
    DaemonMessage,
    Done,
    Drain,
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
    StatusReply,
    Submit,
    SubmitOptions,
)
from pingpong_client.address import socket_path
from pingpong_client.connection import Connection
from pingpong_client.following import ENDED_STATES, Following
from pingpong_client.link import DaemonLink
from pingpong_client.reading import attach_hint, read_events
from pingpong_client.transport import Transport, ZmqTransport

TIMEOUT_S = 10.0
PING_S = 2.0
RECONNECT_S = 60.0
STARTING_POLL_S = 0.5
MAX_KEY_CHARACTERS = 128
"""Of `Submit.key`."""

Reply = TypeVar("Reply", bound=DaemonMessage)
# Inside the classes, `list` is the method.
Summaries = list[ChainSummary]
LogProbabilities = list[float | None]


class AsyncClient:
    """Talks to one daemon; an async context manager.

    ::

        async with AsyncClient() as client:
            result = await client.run(chain, {"topic": "tides"})

    It connects on entry. Where the connection is lost or the daemon is restarted, `submit`, `follow`, `wait` and `run`
    wait for it to come back and go on, so that each token is given once; whatever else waits raises
    `DaemonUnavailable`, and the next call connects anew. One event loop, any number of tasks.

    Args:
        socket: the daemon's control socket or its folder; None: see `address.py`.
        instance: the daemon's instance name, instead of `socket`.
        timeout_s: how long the daemon may take to answer. A chain may take as long as it likes.
        ping_s: how long a chain may be silent before the daemon is asked whether it is still there.
        reconnect_s: how long a daemon that has gone is waited for, from when it was last heard; 0: not at all.
        on_away: called with True when it is being waited for, and with False when it is back; may be set later.
        transport: makes the connection; for tests.

    Raises:
        UsageError: `socket` and `instance` are both given, or cannot be right.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        instance: str | None = None,
        timeout_s: float = TIMEOUT_S,
        ping_s: float = PING_S,
        reconnect_s: float = RECONNECT_S,
        on_away: Callable[[bool], None] | None = None,
        transport: Callable[[Path], Transport] = ZmqTransport,
    ) -> None:
        self.socket = socket_path(socket, instance=instance)
        self.on_away = on_away
        self._link = DaemonLink(
            lambda: transport(self.socket),
            str(self.socket),
            timeout_s=timeout_s,
            ping_s=ping_s,
            reconnect_s=reconnect_s,
            on_away=self._tell_away,
        )
        self._following: dict[str, Following] = {}

    async def __aenter__(self) -> Self:
        await self._link.connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def away_s(self) -> float | None:
        """Seconds since the daemon was last heard, while it is waited for to come back; otherwise None."""
        return self._link.away_s

    async def close(self) -> None:
        """Drop the connection; chains go on."""
        await self._link.close()

    async def submit(
        self,
        chain: Chain,
        inputs: Mapping[str, str] | None = None,
        options: SubmitOptions | None = None,
        *,
        follow: bool = False,
        key: str | None = None,
    ) -> str:
        """Hand a chain to the daemon and return its id once it is accepted.

        Args:
            inputs: values of the chain's inputs, over its defaults.
            follow: keep its events for `follow`.
            key: at most 128 characters; a chain that was submitted with the same key before is not submitted again,
                and its id is returned. None: a random one, so that nothing runs twice where the connection is lost.

        Raises:
            ChainError: the chain or an input is off; found before the daemon is asked.
            DataError: chain and inputs together are larger than a message may be, or the key is too long.
            Overloaded: the daemon takes no work now.
            DaemonUnavailable: there is none.
        """
        checked, given = _checked(chain, inputs)
        if key is not None and len(key) > MAX_KEY_CHARACTERS:
            raise DataError(f"the key has {len(key)} characters, the limit is {MAX_KEY_CHARACTERS}.", field="key")
        chosen = secrets.token_hex(16) if key is None else key
        tries = 0

        def build(number: int) -> Submit:
            return Submit(
                request=number,
                version=PROTOCOL_VERSION,
                chain=checked,
                inputs=given,
                options=options or SubmitOptions(),
                follow=follow,
                key=chosen,
            )

        async def work(connection: Connection) -> str:
            nonlocal tries
            tries += 1
            accepted = await self._hand_in(connection, build, follow=follow, again=tries > 1)
            if follow:
                known_before = tries > 1 or key is not None  # it may have begun, or ended: a snapshot tells
                names = [agent.name for agent in checked.agents]
                following = Following(accepted.chain, names, stale=known_before)
                self._following.setdefault(accepted.chain, following)
                if known_before:
                    await connection.attach(accepted.chain)
            return accepted.chain

        return await self._link.persist(work)

    async def explain(
        self, chain: Chain, inputs: Mapping[str, str] | None = None, options: SubmitOptions | None = None
    ) -> Explained:
        """What each placement of a chain should take now, which would be taken, and what would make it faster.

        The daemon checks and tokenizes the chain as at `submit`, and neither keeps nor runs it.

        Args:
            inputs: values of the chain's inputs, over its defaults.
            options: as of `submit`; mode, group and level decide what is taken, the others change nothing.

        Returns:
            Predictions in ms, the least first, for the load and the prefix caches of the moment. There are none where
            the engines were not measured.

        Raises:
            ChainError: the chain or an input is off; found before the daemon is asked.
            UsageError: the daemon's groups cannot do what the options ask for.
            Overloaded: the daemon takes no work now.
            DaemonUnavailable: there is none.
        """
        checked, given = _checked(chain, inputs)
        return await self._ask(
            lambda number: Explain(
                request=number,
                version=PROTOCOL_VERSION,
                chain=checked,
                inputs=given,
                options=options or SubmitOptions(),
            ),
            Explained,
            patient=True,
        )

    async def run(
        self,
        chain: Chain,
        inputs: Mapping[str, str] | None = None,
        options: SubmitOptions | None = None,
        *,
        key: str | None = None,
    ) -> ChainResult:
        """Submit a chain, wait for its end and return the result.

        Raises:
            ChainFailed: it failed or was cancelled; `result` has what there is.
            ChainError, Overloaded, DaemonUnavailable: as `submit`.
        """
        return finished(await self.wait(await self.submit(chain, inputs, options, follow=True, key=key)))

    async def wait(self, chain: str) -> ChainResult:
        """Wait for a chain's end and return its result, whatever its state.

        Raises:
            ChainNotFound: there is none of that id.
            DaemonUnavailable: the daemon has gone, and did not come back in time.
        """
        while True:
            async with aclosing(self.follow(chain)) as events:
                async for _ in events:
                    pass
            result = await self._link.persist(lambda connection: _result(connection, chain), hint=attach_hint(chain))
            if result.state in ENDED_STATES:  # else a restarted daemon runs the end once more
                return result

    async def follow(self, chain: str) -> AsyncGenerator[ChainEvent, None]:
        """The events of a chain, up to and with ``ended``.

        From its beginning after ``submit(..., follow=True)``, from the snapshot on after `attach`; otherwise from now.
        Without any for a chain that has ended. Applied in order they are the chain, whatever happens to the
        connection and the daemon: each token comes once, and an agent that had to begin again has an
        ``agent_restarted``, which voids what it had given. Where events were lost, others take their place: several
        ``tokens`` may become one.

        Raises:
            ChainNotFound: there is none of that id, or no more.
            DaemonUnavailable: the daemon has gone, and did not come back in time.
        """
        if chain not in self._following:
            asked, hint = chain, attach_hint(chain)
            chain = (await self._link.persist(lambda connection: self._attach(connection, asked), hint=hint)).id
        following = self._following.get(chain)
        if following is None:
            return
        try:
            async with aclosing(read_events(self._link, following)) as events:
                async for event in events:
                    yield event
        finally:
            if self._following.get(chain) is following:
                del self._following[chain]

    async def attach(self, chain: str) -> ChainResult:
        """Where a chain stands; `follow` goes on from there.

        Raises:
            ChainNotFound: there is none of that id.
        """
        return await self._attach(await self._link.connected(), chain)

    async def _attach(self, connection: Connection, chain: str) -> ChainResult:
        result = await connection.attach(chain)
        if connection.follows(result.id):
            self._following.setdefault(result.id, Following.of_result(result))
        return result

    async def list(self, limit: int = 100) -> Summaries:
        """The latest chains that the daemon remembers, at most `limit` (1 to 10,000), the latest last."""
        reply = await self._ask(
            lambda number: ListChains(request=number, version=PROTOCOL_VERSION, limit=limit), ChainList
        )
        return reply.chains

    async def status(self) -> StatusReply:
        """The daemon, its workers and slots."""
        return await self._ask(lambda number: GetStatus(request=number, version=PROTOCOL_VERSION), StatusReply)

    async def result(self, chain: str, *, prompt_ids: bool = False) -> ChainResult:
        """What a chain has given, so far if it still runs.

        Args:
            prompt_ids: with the ids of every agent's prompt.

        Raises:
            ChainNotFound: there is none of that id.
        """
        return await _result(await self._link.connected(), chain, prompt_ids=prompt_ids)

    async def cancel(self, chain: str) -> None:
        """End a chain; one that has ended stays as it is.

        Raises:
            ChainNotFound: there is none of that id.
        """
        await self._ask(lambda number: Cancel(request=number, version=PROTOCOL_VERSION, chain=chain), Done)

    async def reset_caches(self) -> None:
        """Empty the prefix cache of every group.

        Raises:
            Overloaded: a chain runs.
        """
        await self._ask(lambda number: ResetCaches(request=number, version=PROTOCOL_VERSION), Done)

    async def forget(self, chain: str) -> None:
        """Erase an ended chain with its prompts and outputs, at once.

        Raises:
            ChainNotFound: there is none of that id.
            UsageError: it has not ended.
        """
        await self._ask(lambda number: Forget(request=number, version=PROTOCOL_VERSION, chain=chain), Done)

    async def drain(self, group: str | None = None, *, deadline_s: float | None = None) -> None:
        """Let the daemon finish what runs and end, or replace a group's worker.

        Without a group it returns once the daemon takes no more, with one when the new worker serves.

        Args:
            group: a device group, see `status`.
            deadline_s: how long running work may take; None: the daemon's `drain_seconds`.

        Raises:
            UsageError: there is no such group.
            Overloaded: the daemon is draining already.
        """
        await self._ask(
            lambda number: Drain(request=number, version=PROTOCOL_VERSION, group=group, deadline_s=deadline_s),
            Done,
            patient=True,
        )

    async def score(
        self, ids: Sequence[int], tokens: Sequence[int], *, grid: int | None = None, model: str = ""
    ) -> LogProbabilities:
        """How likely tokens are to follow a prompt, by a model of the daemon's.

        Args:
            ids: the prompt, at least one token.
            tokens: 1 to 8 of them.
            grid: cut the prompt as a chain of exactness "grid" was cut: `ChainResult.grid`.
            model: a name of the daemon's `[models]`, or `AgentResult.model`; empty: the default model.

        Returns:
            The natural logarithm of each token's probability, in order; None where it is too unlikely for the engine
            to say.

        Raises:
            UsageError: the prompt or a token is none for this model, or the engine cannot be held to a grid.
            EngineError: the engine failed or refused.
            Overloaded: no engine serves.
        """
        reply = await self._ask(
            lambda number: Score(
                request=number, version=PROTOCOL_VERSION, ids=list(ids), tokens=list(tokens), grid=grid, model=model
            ),
            Scored,
            patient=True,
        )
        return reply.logprobs

    async def _ask(self, build: Callable[[int], ClientRequest], expect: type[Reply], *, patient: bool = False) -> Reply:
        connection = await self._link.connected()
        return await connection.request(build, expect, patient=patient)

    async def _hand_in(
        self, connection: Connection, build: Callable[[int], Submit], *, follow: bool, again: bool
    ) -> Accepted:
        """Submit, and where a daemon was restarted in the middle of that, once its engines serve."""
        while True:
            try:
                # Patient, for a worker tokenizes the prompts first, those of chains before this one too.
                return await connection.request(build, Accepted, follow=follow, patient=True)
            except Overloaded:
                if not again or not await _is_starting(connection):
                    raise
            await asyncio.sleep(STARTING_POLL_S)

    def _tell_away(self, away: bool) -> None:
        if self.on_away is not None:
            self.on_away(away)


def _checked(chain: Chain, inputs: Mapping[str, str] | None) -> tuple[Chain, dict[str, str]]:
    """A struct built in Python has not been checked; as JSON it is, like a file."""
    checked = parse_chain(msgspec.json.encode(chain))
    given = dict(inputs or {})
    resolve_inputs(checked, given)
    return checked, given


async def _result(connection: Connection, chain: str, *, prompt_ids: bool = False) -> ChainResult:
    reply = await connection.request(
        lambda number: GetResult(request=number, version=PROTOCOL_VERSION, chain=chain, prompt_ids=prompt_ids),
        ResultReply,
    )
    return reply.result


async def _is_starting(connection: Connection) -> bool:
    status = await connection.request(lambda number: GetStatus(request=number, version=PROTOCOL_VERSION), StatusReply)
    return status.state == "starting"


def finished(result: ChainResult) -> ChainResult:
    """The result of a chain that has finished.

    Raises:
        ChainFailed: it ended any other way.
    """
    if result.state == "finished":
        return result
    if result.state == "cancelled":
        why = "" if result.error in ("", "cancelled") else f": {result.error.removesuffix('.')}"
        raise ChainFailed(f"the chain {result.id} was cancelled{why}.")
    why = result.error.removesuffix(".") or "no reason was given"
    raise ChainFailed(
        f"the chain {result.id} {result.state}: {why}.",
        hint=f"`pingpong-client result {result.id}` shows what there is.",
    )
