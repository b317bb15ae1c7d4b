"""Runs `extract` steps, in processes that are kept warm and replaced where they hang."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

import msgspec
import structlog

from pingpong_bus.chain import Extract
from pingpong_bus.errors import ChainFailed
from pingpongd.child_process import ChildProcess
from pingpongd.extract_process import LENGTH, Answer, Request
from pingpongd.process import Guard

_log = structlog.get_logger()
EXTRACT_S = 5.0
"""How long a step may take: thousands of times what a usual one takes, on a machine whose cores engines keep busy."""
_START_S = 60.0
_PROCESSES = 2
"""So that one that hangs does not keep all others waiting."""


class ExtractPool:
    """Belongs to one event loop; starts no process before the first step.

    Args:
        environment: of its processes; None: this process's.
        guard: ends the processes where this process cannot.
        limit_s: how long a step may take.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        guard: Guard | None = None,
        limit_s: float = EXTRACT_S,
    ) -> None:
        self._environment = os.environ if environment is None else environment
        self._guard = guard
        self._limit_s = limit_s
        self._idle: list[ChildProcess] = []
        self._room = asyncio.Semaphore(_PROCESSES)
        self._warming: asyncio.Task[None] | None = None

    def warm(self) -> None:
        """Have a process ready for a step that is to come; harmless where there is one."""
        if self._warming is None and not self._idle and not self._room.locked():
            self._warming = asyncio.create_task(self._warm(), name="extract process")

    async def _warm(self) -> None:
        try:
            async with self._room:
                if not self._idle:
                    self._idle.append(await self._start())
        except ChainFailed as error:  # the step will say so, where it meets the same
            _log.warning("extract_process_ended", pid=None, reason=error.message)
        finally:
            self._warming = None

    async def run(self, spec: Extract, text: str) -> str:
        """What a step takes out of a text, `otherwise` where there is nothing.

        Raises:
            ChainFailed: there is nothing, and nothing to take otherwise; or it takes too long.
        """
        async with self._room:
            answer = await self._ask(Request(spec, text))
        if answer.text is not None:
            return answer.text
        if spec.otherwise is not None and not answer.failed:
            return spec.otherwise
        raise ChainFailed(f"{answer.why}.")

    async def close(self) -> None:
        """End the processes that wait; those that work are ended with their steps."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait({self._warming})
        idle, self._idle = self._idle, []
        for child in idle:
            await child.end()

    async def _ask(self, request: Request) -> Answer:
        """Have a process answer; it is kept for the next one where it does."""
        frame = msgspec.msgpack.encode(request)
        while True:
            fresh = not self._idle
            child = await self._start() if fresh else self._idle.pop()
            try:
                child.write(LENGTH.pack(len(frame)) + frame)
                async with asyncio.timeout(self._limit_s):
                    answer = await _receive(child)
            except TimeoutError:
                await self._replace(child, f"it takes longer than {self._limit_s:g} s")
                raise ChainFailed(
                    f"it takes longer than {self._limit_s:g} s.",
                    hint="Write the expression without nested repetitions." if request.spec.regex is not None else "",
                ) from None
            except EOFError:
                await self._replace(child, "its process has ended")
                if fresh:
                    raise ChainFailed("its process has died of it.") from None
                continue  # of something else, while it waited
            except BaseException:
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(child.end())
                raise
            self._idle.append(child)
            return answer

    async def _start(self) -> ChildProcess:
        command = [sys.executable, "-m", "pingpongd.extract_process", str(os.getpid())]
        try:
            child = await ChildProcess.start(command, self._environment, guard=self._guard, errors=False)
        except OSError as error:
            raise ChainFailed(f"no process can be started for it: {error.strerror}.") from None
        try:
            async with asyncio.timeout(_START_S):
                await _receive(child)
        except (TimeoutError, EOFError):
            await child.end()
            raise ChainFailed("its process does not start; see the daemon's standard error.") from None
        except BaseException:
            await asyncio.shield(child.end())
            raise
        return child

    async def _replace(self, child: ChildProcess, why: str) -> None:
        _log.warning("extract_process_ended", pid=child.pid, reason=why)
        await asyncio.shield(child.end())


async def _receive(child: ChildProcess) -> Answer:
    """The next answer; asyncio.IncompleteReadError, an EOFError, where the process has ended."""
    (size,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await child.stdout.readexactly(size), type=Answer)
