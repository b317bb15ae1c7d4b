"""The hops that run on a worker: each in a task of its own, so that none can take another or the worker down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pingpong_bus.errors import ChainError, EngineError, PingpongError
from pingpong_bus.messages import HopChecked, HopEnded, HopSpec
from pingpong_worker.feed import Feed, Surroundings

_log = logging.getLogger("pingpong_worker")


@dataclass
class _Hop:
    feed: Feed
    task: asyncio.Task[HopEnded]
    aborting: bool = False
    reason: EngineError | None = None
    """Why it is ended, where nobody has asked for that."""


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
        self._checks: set[asyncio.Task[HopChecked]] = set()
        self._ended_tokens = 0

    def load(self) -> tuple[int, int]:
        """Open hops, and the tokens written since the worker started."""
        return len(self._hops), self._ended_tokens + sum(hop.feed.output_tokens for hop in self._hops.values())

    def start(self, spec: HopSpec) -> None:
        """Begin a hop; it is never waited for."""
        if spec.hop in self._hops:
            _log.error("hop %s is running already", spec.hop)
            return
        feed = Feed(spec, self._around)
        task = asyncio.create_task(feed.run(), name=f"hop {spec.hop}")
        self._hops[spec.hop] = _Hop(feed, task)
        task.add_done_callback(lambda _: self._ended(spec.hop))

    def abort(self, hop_id: str) -> None:
        """End a hop; reported once it is over, or at once where there is no such hop."""
        hop = self._hops.get(hop_id)
        if hop is None:
            self._around.report(HopEnded(hop=hop_id, state="aborted", at_ns=time.monotonic_ns()))
            return
        if hop.aborting:
            return  # a second cancellation would only interrupt the first one's cleaning up
        hop.aborting = True
        # Not at once: a task cancelled before its first step never runs, and its log would stay open.
        asyncio.get_running_loop().call_soon(hop.task.cancel)

    async def close(self, reason: EngineError | None = None) -> None:
        """Abort everything; returns when all is over and reported.

        Args:
            reason: where set, hops that end by this are reported as failed, and why.
        """
        for hop_id, hop in list(self._hops.items()):
            if not hop.aborting:
                hop.reason = reason
            self.abort(hop_id)
        while tasks := [hop.task for hop in self._hops.values()] + list(self._checks):
            for check in self._checks:
                check.cancel()
            await asyncio.wait(tasks)

    def _ended(self, hop_id: str) -> None:
        hop = self._hops.pop(hop_id)
        self._ended_tokens += hop.feed.output_tokens
        ended = self._outcome(hop)
        self._around.report(ended)
        if ended.code == EngineError.__name__:
            self._on_engine_error()
        if ended.state == "finished" and hop.feed.spec.match is not None:
            check = asyncio.create_task(hop.feed.check(), name=f"check {hop_id}")
            self._checks.add(check)
            check.add_done_callback(lambda check: self._checked(hop_id, check))

    def _outcome(self, hop: _Hop) -> HopEnded:
        spec = hop.feed.spec
        if hop.reason is not None and hop.task.cancelled():
            return HopEnded(
                hop=spec.hop,
                state="failed",
                at_ns=time.monotonic_ns(),
                output_tokens=hop.feed.output_tokens,
                code=hop.reason.code,
                message=str(hop.reason),
            )
        if (hop.aborting and hop.reason is None) or hop.task.cancelled():
            return HopEnded(
                hop=spec.hop, state="aborted", at_ns=time.monotonic_ns(), output_tokens=hop.feed.output_tokens
            )
        error = hop.task.exception()
        if error is None:
            return hop.task.result()
        # Feeds turn every error of ours into an outcome, so this is a fault of the program: it costs this hop only.
        _log.error("hop %s failed", spec.hop, exc_info=error)
        return HopEnded(
            hop=spec.hop,
            state="failed",
            at_ns=time.monotonic_ns(),
            output_tokens=hop.feed.output_tokens,
            code=PingpongError.__name__,
            message=f"the worker failed: {type(error).__name__}: {error}",
        )

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
