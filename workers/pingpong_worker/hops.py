"""The hops that run on a worker: each in a task of its own, so that none can take another or the worker down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pingpong_bus.errors import ChainError, EngineError, EngineLost, PingpongError
from pingpong_bus.messages import HopChecked, HopEnded, HopSpec
from pingpong_worker.feed import LET_GO_S, Ending, Feed
from pingpong_worker.surroundings import Surroundings

_log = logging.getLogger("pingpong_worker")


@dataclass
class _Hop:
    feed: Feed
    task: asyncio.Task[HopEnded]
    over: asyncio.Future[None]
    """Done once its end is reported."""
    reason: EngineError | None = None
    """Why it is ended, where nobody has asked for that."""
    limit: asyncio.TimerHandle | None = None


class Hops:
    """Starts and ends hops and reports how they end.

    Args:
        surroundings: what the feeds share.
        on_engine_error: called when a hop failed because of the engine.
    """

    def __init__(self, surroundings: Surroundings, on_engine_error: Callable[[], None]) -> None:
        self._around = surroundings
        self._on_engine_error = on_engine_error
        self._hops: dict[str, _Hop] = {}
        self._stuck: set[asyncio.Task[HopEnded]] = set()
        """Of hops that are reported as over, and whose engine has not let go of them."""
        self._checks: set[asyncio.Task[HopChecked]] = set()
        self._ended_tokens = 0

    def load(self) -> tuple[int, int]:
        """Open hops, and the tokens written since the worker started."""
        return len(self._hops), self._ended_tokens + sum(hop.feed.new_tokens for hop in self._hops.values())

    def start(self, spec: HopSpec) -> None:
        """Begin a hop; it is never waited for."""
        if spec.hop in self._hops:
            _log.error("hop %s is running already", spec.hop)
            return
        feed = Feed(spec, self._around)
        task = asyncio.create_task(feed.run(), name=f"hop {spec.hop}")
        hop = self._hops[spec.hop] = _Hop(feed, task, asyncio.get_running_loop().create_future())
        task.add_done_callback(lambda _: self._task_done(hop))

    def abort(self, hop_id: str) -> None:
        """End a hop for good; reported once it is over, or at once where there is no such hop."""
        hop = self._hops.get(hop_id)
        if hop is None:
            self._around.report(HopEnded(hop=hop_id, state="aborted", at_ns=time.monotonic_ns()))
        else:
            self._end(hop, "aborted")

    def release(self, hop_id: str) -> None:
        """End a hop where it stands, for another worker to go on in its log; reported as `abort` does."""
        hop = self._hops.get(hop_id)
        if hop is None:
            self._around.report(HopEnded(hop=hop_id, state="aborted", at_ns=time.monotonic_ns()))
        else:
            self._end(hop, "released")

    async def close(self, reason: EngineError | None = None) -> None:
        """End everything, for the worker ends; returns when all is over and reported.

        Hops leave their logs open and are reported as lost, but for those that were being aborted or released.

        Args:
            reason: why; None where the worker was told to.
        """
        for hop in self._hops.values():
            if hop.feed.ending is None:
                hop.reason = reason or EngineLost("the worker was stopped.")
                self._end(hop, "lost")
        while self._hops or self._checks:
            for check in self._checks:
                check.cancel()
            over: list[asyncio.Future[Any]] = [hop.over for hop in self._hops.values()]
            await asyncio.wait(over + list(self._checks))
        if self._stuck:
            for task in self._stuck:
                task.cancel()  # the first was swallowed by what waits for the engine; maybe this one gets through
            await asyncio.wait(self._stuck, timeout=LET_GO_S)

    def _end(self, hop: _Hop, how: Ending) -> None:
        if hop.feed.ending is not None:  # a second cancellation would only interrupt the first one's cleaning up
            if how == "aborted" and hop.feed.ending == "released":
                hop.feed.ending = how  # nobody will go on with it
            return
        hop.feed.ending = how
        loop = asyncio.get_running_loop()
        # Not at once: a task cancelled before its first step never runs, and its log would not be ended.
        loop.call_soon(hop.task.cancel)
        hop.limit = loop.call_later(LET_GO_S, self._give_up, hop)

    def _give_up(self, hop: _Hop) -> None:
        _log.error("the engine does not let go of hop %s", hop.feed.spec.hop)
        hop.feed.abandon()
        self._stuck.add(hop.task)
        self._ended(hop, self._cut_off(hop))

    def _task_done(self, hop: _Hop) -> None:
        if not hop.over.done():
            self._ended(hop, self._outcome(hop))
            return
        self._stuck.discard(hop.task)
        if not hop.task.cancelled():
            hop.task.exception()  # seen, and moot

    def _ended(self, hop: _Hop, ended: HopEnded) -> None:
        """Report a hop's end, and check its prompt where that is wanted."""
        spec = hop.feed.spec
        if hop.limit is not None:
            hop.limit.cancel()
        del self._hops[spec.hop]
        hop.over.set_result(None)
        self._ended_tokens += hop.feed.new_tokens
        self._around.report(ended)
        if ended.code in (EngineError.__name__, EngineLost.__name__):
            self._on_engine_error()
        if ended.state == "finished" and spec.match is not None:
            check = asyncio.create_task(hop.feed.check(), name=f"check {spec.hop}")
            self._checks.add(check)
            check.add_done_callback(lambda check: self._checked(spec.hop, check))

    def _outcome(self, hop: _Hop) -> HopEnded:
        if hop.task.cancelled() or hop.feed.ending == "aborted":
            return self._cut_off(hop)
        error = hop.task.exception()
        if error is None:
            return hop.task.result()
        # Feeds turn every error of ours into an outcome, so this is a fault of the program: it costs this hop only.
        _log.error("hop %s failed", hop.feed.spec.hop, exc_info=error)
        fault = PingpongError(f"the worker failed: {type(error).__name__}: {error}")
        return hop.feed.ended("lost" if hop.feed.left_open else "failed", fault)

    def _cut_off(self, hop: _Hop) -> HopEnded:
        """How a hop ended that was cancelled."""
        match hop.feed.ending:
            case "lost":
                return hop.feed.ended("lost", hop.reason)
            case "released":  # unless its answer was there already, and only its session had not ended
                return hop.feed.finished() or hop.feed.ended("released")
            case _:
                return hop.feed.ended("aborted")

    def _checked(self, hop_id: str, check: asyncio.Task[HopChecked]) -> None:
        """Report a check, whatever became of it: its chain waits for that."""
        self._checks.discard(check)
        checked = HopChecked(hop=hop_id, prompt_token_match=None)
        if not check.cancelled():
            error = check.exception()
            if error is None:
                checked = check.result()
            elif isinstance(error, ChainError):
                _log.warning("the prompt of hop %s cannot be checked: %s", hop_id, error)
            else:
                _log.error("the check of hop %s failed", hop_id, exc_info=error)
        self._around.report(checked)
