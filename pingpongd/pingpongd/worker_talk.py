"""What workers say: each message has its place in a worker's life, and is refused elsewhere."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import structlog

from pingpong_bus.errors import ConfigError, MessageError
from pingpong_bus.messages import (
    Calibrated,
    EngineLimits,
    Heartbeat,
    Hello,
    Loading,
    NextScored,
    PrefixCacheReset,
    Prepared,
    Ready,
    RequestFailed,
    Welcome,
    WorkerFailed,
    WorkerMessage,
)
from pingpongd import watchdog
from pingpongd.clock_join import ClockBounds, on_our_clock
from pingpongd.placement import PrefixMemory
from pingpongd.worker_handle import EndOrder, Worker
from pingpongd.worker_link import WorkerLink
from pingpongd.worker_watch import WorkerWatch

_log = structlog.get_logger()


class TalkListener(Protocol):
    """Who hears what follows from it."""

    def serves(self, worker: Worker) -> None:
        """A worker has just come to serve."""

    def cannot_start(self, worker: Worker, failure: WorkerFailed) -> None:
        """No start of a worker can work."""

    def hop_message(self, worker: Worker, message: WorkerMessage) -> None:
        """A worker reports on one of its hops."""

    def beat(self, worker: Worker, message: Heartbeat) -> None:
        """A worker's heartbeat has been taken."""


class WorkerTalk:
    """Takes the messages of all workers."""

    def __init__(self, link: WorkerLink, watch: WorkerWatch, listener: TalkListener) -> None:
        """Args:
        link: the messages' way, both ways.
        watch: hears the heartbeats.
        listener: hears of the rest.
        """
        self._link = link
        self._watch = watch
        self._listener = listener

    def handle(self, worker: Worker, message: WorkerMessage) -> None:
        """Take a message.

        Raises:
            MessageError: it has no place here.
        """
        match message:
            case WorkerFailed():
                self._failed(worker, message)
            case Hello() | Loading() | Ready():
                self._starts(worker, message)
            case Heartbeat():
                self._watch.beat(worker, message)
                _join(worker, worker.clock.received(message.at_ns, time.monotonic_ns()))
                worker.rss_bytes, worker.output_tokens = message.rss_bytes, message.output_tokens
                worker.scheduler = message.scheduler
                self._listener.beat(worker, message)
            case Prepared() | RequestFailed() | PrefixCacheReset() | NextScored() | Calibrated():
                if isinstance(message, Calibrated):
                    worker.figures = message.figures
                self._link.answer(worker, message)
            case _ if worker.served:
                self._listener.hop_message(worker, on_our_clock(message, worker.clock.offset_ns))
            case _:
                raise MessageError(f'{type(message).__name__} from worker "{worker.name}", which has not served yet.')

    def unreadable(self, worker: Worker, error: MessageError) -> None:
        """A worker has sent what is no message."""
        if worker.state == "starting":
            # Its first words are not understood: a worker of another version would be waited for in vain.
            worker.failure = WorkerFailed(
                code=ConfigError.__name__,
                message=error.message,
                hint="Install pingpongd anew, in one version.",
                permanent=True,
            )
            worker.end(EndOrder("kill", error.message.rstrip(".")))

    def _starts(self, worker: Worker, message: Hello | Loading | Ready) -> None:
        """Its steps from the first words to service; each is taken once."""
        if worker.order is not None:
            return  # it crossed the order to end
        match message, worker.state:
            case Hello(pid=pid), "starting" if worker.process is not None and pid == worker.process.pid:
                now = time.monotonic_ns()
                if message.at_ns:
                    _join(worker, worker.clock.received(message.at_ns, now))
                worker.state = "loading"
                self._link.send(worker, Welcome(at_ns=now))
            case Loading(stage=stage, progress=progress), "loading":
                if stage != worker.stage:  # how far it has come is told much more often
                    _log.info("worker_loading", worker=worker.name, stage=stage)
                worker.stage, worker.progress = stage, progress
                if message.welcome is not None:
                    crossed = message.welcome
                    _join(worker, worker.clock.answered(crossed.sent_ns, crossed.received_ns))
            case Ready(), "loading":
                self._serves(worker, message)
            case _:
                raise MessageError(f'{type(message).__name__} from worker "{worker.name}", which is {worker.state}.')

    def _serves(self, worker: Worker, message: Ready) -> None:
        limits = message.limits
        worker.limits, worker.memory = limits, _memory(limits)
        worker.figures = message.figures
        worker.watch = watchdog.serving(asyncio.get_running_loop().time())
        worker.served = True
        worker.state, worker.stage, worker.progress = "ready", "serving", None
        _log.info(
            "worker_ready",
            worker=worker.name,
            devices=worker.group.devices,
            engine=limits.engine,
            model=limits.model,
            max_model_len=limits.max_model_len,
            kv_tokens=limits.kv_tokens,
            speculation=limits.speculation,
            patches=list(limits.abilities),
        )
        self._listener.serves(worker)

    def _failed(self, worker: Worker, message: WorkerFailed) -> None:
        worker.failure = message
        _log.error("worker_failed", worker=worker.name, error=message.message, permanent=message.permanent)
        worker.end(EndOrder("wait", message.message.rstrip(".")))
        if message.permanent:
            self._listener.cannot_start(worker, message)


def _join(worker: Worker, clock: ClockBounds) -> None:
    """Enter what is known of a worker's clock by now; said where it comes out that it is not ours."""
    before, worker.clock = worker.clock, clock
    if clock.offset_ns and not before.offset_ns:
        _log.warning(
            "worker_clock_off",
            worker=worker.name,
            offset_ms=round(clock.offset_ns / 1e6, 3),
            error_ms=round(clock.error_ns / 1e6, 3),
        )


def _memory(limits: EngineLimits) -> PrefixMemory:
    return PrefixMemory(limits.kv_tokens, limits.keep_tokens, limits.host_cache_tokens)
