"""Runs `extract` steps, in processes that are kept warm and replaced where they hang.

They wait in three lines, so that an expression which takes for ever holds up its like alone: one for paths and fenced
blocks, whose time grows with the text alone, one for expressions, each with a process for a moment; and one for what
took longer than that moment, which begins anew there, with its whole time. An expression that did is remembered and
goes there at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
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
_MOMENT = 0.1
"""Of the time that a step may take: what is not through by then makes way for others."""
_SLOW_AT_ONCE = 2
_SLOW_KNOWN = 1000
"""Expressions that are remembered to be slow; one that is forgotten costs others a moment."""
_KEPT = 2
"""Processes that are kept for steps to come."""


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
        self._quick = {is_regex: asyncio.Semaphore(1) for is_regex in (False, True)}
        self._slow = asyncio.Semaphore(_SLOW_AT_ONCE)
        self._known: OrderedDict[str, None] = OrderedDict()
        """Expressions that were slow, the last one last."""
        self._warming: asyncio.Task[None] | None = None

    def warm(self) -> None:
        """Have a process ready for a step that is to come; harmless where there is one."""
        if self._warming is None and not self._idle and not any(room.locked() for room in self._quick.values()):
            self._warming = asyncio.create_task(self._warm(), name="extract process")

    async def _warm(self) -> None:
        try:
            self._idle.append(await self._start())
        except ChainFailed as error:  # the step will say so, where it meets the same
            _log.warning("extract_process_ended", pid=None, reason=error.message)
        finally:
            self._warming = None

    async def run(self, spec: Extract, text: str, began: Callable[[], None] = lambda: None) -> str:
        """What a step takes out of a text, `otherwise` where there is nothing.

        Args:
            spec: what it takes.
            text: its input.
            began: called when its turn has come.

        Raises:
            ChainFailed: there is nothing, and nothing to take otherwise; or it takes too long.
        """
        answer = await self._in_turn(Request(spec, text), began)
        if answer.text is not None:
            return answer.text
        if spec.otherwise is not None and not answer.failed:
            return spec.otherwise
        raise ChainFailed(
            f"{answer.why}.", hint="" if answer.failed else 'Give the step "otherwise", or mend its input.'
        )

    async def _in_turn(self, request: Request, began: Callable[[], None]) -> Answer:
        regex = request.spec.regex
        is_begun = False
        if regex not in self._known:
            async with self._quick[regex is not None]:
                if regex not in self._known:  # which it may have become meanwhile
                    began()
                    is_begun = True
                    with suppress(TimeoutError):
                        return await self._ask(request, self._limit_s * _MOMENT)
                    if regex is not None:
                        self._remember(regex)
        async with self._slow:
            if not is_begun:
                began()
            try:
                return await self._ask(request, self._limit_s)
            except TimeoutError:
                raise ChainFailed(
                    f"it takes longer than {self._limit_s:g} s.",
                    hint="Give it a shorter input."
                    if regex is None
                    else "Write the expression without nested repetitions, or give it a shorter input.",
                ) from None

    def _remember(self, regex: str) -> None:
        self._known[regex] = None
        self._known.move_to_end(regex)
        if len(self._known) > _SLOW_KNOWN:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """End the processes that wait; those that work are ended with their steps."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait({self._warming})
        idle, self._idle = self._idle, []
        for child in idle:
            await child.end()

    async def _ask(self, request: Request, limit_s: float) -> Answer:
        """Have a process answer; it is kept for the next one where it does.

        Raises:
            TimeoutError: it takes longer; its process has been ended.
            ChainFailed: no process can do it.
        """
        frame = msgspec.msgpack.encode(request)
        while True:
            if not self._idle and self._warming is not None:
                await asyncio.wait({self._warming})
            fresh = not self._idle
            child = await self._start() if fresh else self._idle.pop()
            try:
                child.write(LENGTH.pack(len(frame)) + frame)
                async with asyncio.timeout(limit_s):
                    answer = await _receive(child)
            except TimeoutError:
                await self._replace(child, f"it takes longer than {limit_s:g} s")
                raise
            except EOFError:
                await self._replace(child, "its process has ended")
                if fresh:
                    raise ChainFailed("its process has died of it.") from None
                continue  # of something else, while it waited
            except BaseException:
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(child.end())
                raise
            if len(self._idle) < _KEPT:
                self._idle.append(child)
            else:
                await asyncio.shield(child.end())
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
