"""Runs steps between agents: `extract` in a process that can be killed, `call` as the configuration allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import msgspec
import structlog

from pingpong_bus.chain import Agent
from pingpong_bus.errors import ChainFailed
from pingpongd.call_command import environment_of, run_command
from pingpongd.call_http import post
from pingpongd.calls import call_secrets, resolve_calls
from pingpongd.config import CallConfig
from pingpongd.extract_pool import ExtractPool
from pingpongd.process import Guard
from pingpongd.redaction import Redactor

_log = structlog.get_logger()
_BYTES_A_CHARACTER = 4
"""In UTF-8, at most."""
_PAUSE_S = 0.2
"""Before the second attempt; before each other one twice as long as before the last."""
_MOST_PAUSE_S = 5.0


class StepWork(msgspec.Struct, frozen=True):
    """A step whose input is there."""

    chain: str
    """The chain's id."""
    spec: Agent
    text: str
    """Its input."""


class _Place(NamedTuple):
    """In the line for a call."""

    turn: asyncio.Future[None]
    work: StepWork
    waits: Callable[[str], None]


def _untold(why: str) -> None:
    """Nobody wants to know."""


class StepRunner:
    """Belongs to one event loop."""

    def __init__(
        self,
        calls: Mapping[str, CallConfig],
        environment: Mapping[str, str],
        guard: Guard | None = None,
    ) -> None:
        """Args:
        calls: of the configuration.
        environment: the daemon's.
        guard: ends what is started where this process cannot.

        Raises:
            ConfigError: a call names a variable that is not there.
        """
        self._environment = environment
        self._guard = guard
        self._pool = ExtractPool(environment, guard)
        self._secrets: set[str] = set()
        self._running: dict[str, int] = {}
        self._waiting: dict[str, deque[_Place]] = {}
        self.configure(calls)

    def configure(self, calls: Mapping[str, CallConfig]) -> None:
        """Take other calls; those that run go on as they began, and those whose call is gone wait for it.

        Raises:
            ConfigError: a call names a variable that is not there; nothing was changed.
        """
        self._calls = resolve_calls(calls, self._environment)
        self._secrets |= call_secrets(calls, self._environment)  # of those that run, too
        self._redactor = Redactor(prompts=True, secrets=self._secrets)
        for name, line in self._waiting.items():
            for place in line:
                place.waits(f'its turn at the call "{name}"')
            self._let_in(name)

    def expect(self, steps: Iterable[Agent]) -> None:
        """Steps of a chain that has just begun: have ready what they take."""
        if any(step.extract is not None for step in steps):
            self._pool.warm()

    async def run(self, work: StepWork, began: Callable[[], None], waits: Callable[[str], None] = _untold) -> str:
        """Do a step, and return its output.

        Args:
            work: the step.
            began: called when its turn has come.
            waits: called with what it waits for, which can change.

        Raises:
            ChainFailed: it cannot be done, in as many attempts as are allowed.
        """
        spec = work.spec
        try:
            if spec.extract is not None:
                waits("its turn behind other extract steps")
                output = await self._pool.run(spec.extract, work.text, began)
            else:
                output = await self._call(spec.call or "", work, began, waits)
        except ChainFailed as error:  # a command may have printed what it was given
            raise ChainFailed(self._redactor.text(error.message), hint=error.hint) from None
        if len(output) > spec.max_chars:
            raise ChainFailed(
                f"its output has {len(output)} characters, and max_chars is {spec.max_chars}.",
                hint="Raise max_chars of the step.",
            )
        return output

    async def close(self) -> None:
        """End the processes that wait for work; what runs is ended with the tasks that run it."""
        await self._pool.close()

    async def _call(self, name: str, work: StepWork, began: Callable[[], None], waits: Callable[[str], None]) -> str:
        attempt, pause_s = 1, _PAUSE_S
        while True:
            async with self._turn(_Place(asyncio.get_running_loop().create_future(), work, waits), name):
                began()
                while (call := self._calls.get(name)) is not None:  # else it waits until it is configured again
                    try:
                        return await self._once(call, work)
                    except ChainFailed as error:
                        if attempt >= call.attempts:
                            tried = f" (attempt {attempt} of {call.attempts})" if call.attempts > 1 else ""
                            raise ChainFailed(f'call "{name}"{tried}: {error.message}', hint=error.hint) from None
                        _log.warning(
                            "call_tried_again",
                            chain=work.chain,
                            agent=work.spec.name,
                            call=name,
                            attempt=attempt,
                            error=self._redactor.text(str(error)),
                        )
                    await asyncio.sleep(pause_s)
                    attempt, pause_s = attempt + 1, min(2 * pause_s, _MOST_PAUSE_S)

    async def _once(self, call: CallConfig, work: StepWork) -> str:
        most_bytes = _BYTES_A_CHARACTER * (work.spec.max_chars + 1)
        # The same in every attempt, of every start of the daemon: so that the other side can know a repetition.
        key = f"{work.chain}/{work.spec.name}"
        if call.url is not None:
            own = any(name.lower() == "idempotency-key" for name in call.headers)
            headers = call.headers if own else {"Idempotency-Key": f'"{key}"'} | call.headers
            return await post(call.url, headers, work.text, timeout_s=call.timeout_s, most_bytes=most_bytes)
        return await run_command(
            call.command or [],
            environment_of(self._environment, {"PINGPONG_STEP": key} | call.environment),
            work.text,
            timeout_s=call.timeout_s,
            most_bytes=most_bytes,
            guard=self._guard,
        )

    @asynccontextmanager
    async def _turn(self, place: _Place, name: str) -> AsyncIterator[None]:
        """One of the places that a call has, in the order of asking."""
        line = self._waiting.setdefault(name, deque())
        line.append(place)
        place.waits(f'its turn at the call "{name}"')
        self._let_in(name)
        try:
            await place.turn
        except BaseException:
            if place.turn.done() and not place.turn.cancelled():  # it was let in, and cancelled in the same breath
                self._leave(name)
            else:
                with suppress(ValueError):  # passed over meanwhile
                    line.remove(place)
            raise
        try:
            yield
        finally:
            self._leave(name)

    def _let_in(self, name: str) -> None:
        line, call = self._waiting[name], self._calls.get(name)
        if call is None:  # as after a restart: an accepted chain is kept, and its owner can cancel it
            for place in line:
                place.waits(f'the call "{name}", which the daemon\'s configuration does not have any more')
            return
        while line and self._running.get(name, 0) < call.at_once:
            place = line.popleft()
            if not place.turn.done():
                self._running[name] = self._running.get(name, 0) + 1
                place.turn.set_result(None)

    def _leave(self, name: str) -> None:
        self._running[name] -= 1
        self._let_in(name)
