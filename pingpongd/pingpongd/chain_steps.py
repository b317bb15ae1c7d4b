"""The steps of running chains: gives them their input, writes their logs, and tells how they end.

A step's output goes into its token log at once, as code points, together with the log's end: nobody sees half of it.
What a `call` has given is on the disk before anyone reads it, so that a restart asks nobody twice for what is known;
and what it takes before it begins, so that a restart knows that it may have run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Literal, NamedTuple, Protocol

import structlog

from pingpong_bus.errors import BusError, PingpongError, StoreError
from pingpong_bus.messages import ResumeEntry
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.token_log import TokenLogWriter
from pingpongd.chain_record import ChainRecord
from pingpongd.chain_state import Checked, Ended, Event
from pingpongd.chain_teller import ChainTeller
from pingpongd.hop_record import HopRecord
from pingpongd.step_runner import StepRunner, StepWork
from pingpongd.step_text import step_text

_log = structlog.get_logger()
_REPEATED = "the daemon ended when it may have been running, so it is called again"


class StepsListener(Protocol):
    """Who keeps what steps give."""

    def agent_finished(self, record: ChainRecord, index: int) -> Future[None] | None:
        """A step has given its output.

        Returns:
            Done when that is on the disk, or failed where it cannot be written for now; None: nobody can say.
        """


class StepTools(NamedTuple):
    """What steps take beside the chains: of the daemon, or of a test."""

    runner: StepRunner
    publisher: Publisher | None = None
    """Rings for their logs; None: readers find them when they look."""


class ChainSteps:
    """Belongs to one event loop."""

    def __init__(
        self,
        tools: StepTools,
        slab: Slab,
        tell: ChainTeller,
        listener: StepsListener,
        apply: Callable[[ChainRecord, Event], None],
    ) -> None:
        """Args:
        tools: that run them and ring for them.
        slab: where their logs are.
        tell: tells followers.
        listener: keeps their outcomes.
        apply: takes a chain on by what has happened.
        """
        self._tools = tools
        self._slab = slab
        self._tell = tell
        self._listener = listener
        self._apply = apply
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._closed = False

    @property
    def runner(self) -> StepRunner:
        """That does them."""
        return self._tools.runner

    @property
    def running(self) -> int:
        """Steps that have begun and not ended."""
        return len(self._tasks)

    @property
    def bell(self) -> str:
        """The endpoint that rings for their logs; empty where none does."""
        publisher = self._tools.publisher
        return publisher.endpoint if publisher is not None else ""

    def begin(self, record: ChainRecord, index: int) -> None:
        """Start a step; its end is applied to the chain in a later turn of the event loop."""
        if self._closed:  # the daemon ends: it begins at the next start
            return
        agent, now_ns = record.agents[index], time.monotonic_ns()
        agent.hops += 1
        agent.entries.append(HopRecord("", now_ns))
        if agent.may_have_run:
            agent.may_have_run = False
            at_ms = record.since_submission_ms(now_ns)
            agent.resumed.append(ResumeEntry(at_ms=at_ms, tokens=0, worker="", why=_REPEATED))
            self._tell.step_repeated(record, index)
        spec = record.chain.agents[index]
        work = StepWork(record.id, spec, _whole(step_text(record, index)))
        task = asyncio.create_task(self._run(record, index, work), name=f"step {record.id}/{spec.name}")
        self._tasks[record.id, index] = task
        task.add_done_callback(partial(self._over, record, index))

    def abort(self, record: ChainRecord, index: int) -> None:
        """End a step; harmless where it has ended by itself."""
        if (task := self._tasks.get((record.id, index))) is not None:
            task.cancel()

    async def close(self) -> None:
        """End all steps for good: their chains learn nothing of it, and begin them anew at the next start."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.runner.close()

    async def _run(self, record: ChainRecord, index: int, work: StepWork) -> None:
        agent = record.agents[index]

        def began() -> None:
            agent.waits_for = ""
            agent.opened_ns = agent.entries[-1].opened_ns = time.monotonic_ns()
            self._tell.event(record, "opened", index, agent.opened_ns, worker="", prompt_tokens=0)

        def waits(why: str) -> None:
            agent.waits_for = why

        is_call = work.spec.call is not None
        if is_call:
            for at in record.state.upstreams[index]:
                await self._until_kept(record, at)
        text = _whole(await self.runner.run(work, began, waits))
        now_ns = time.monotonic_ns()
        agent.output_ids, agent.text = list(map(ord, text)), [text] if text else []
        agent.first_token_ns = agent.last_token_ns = now_ns
        agent.finish_reason = "stop"
        agent.entries[-1].first_token_ns = now_ns
        agent.entries[-1].end("finished", now_ns, len(text))
        agent.kept = self._listener.agent_finished(record, index)
        if is_call:
            await self._until_kept(record, index)
        self._publish(record, index)

    async def _until_kept(self, record: ChainRecord, index: int) -> None:
        """Wait until what an agent or a step has written is on the disk."""
        if (kept := record.agents[index].kept) is None:
            return
        try:
            await asyncio.wrap_future(kept)
        except StoreError as error:  # it is tried again; the chain need not wait for the disk
            name = record.chain.agents[index].name
            _log.warning("step_not_kept", chain=record.id, agent=name, error=str(error))

    def _publish(self, record: ChainRecord, index: int) -> None:
        """Let readers have the output."""
        agent = record.agents[index]
        assert agent.stream is not None  # noqa: S101 - set when the chain was started
        TokenLogWriter(self._slab, agent.stream).close("stop", ids=agent.output_ids)
        if self._tools.publisher is not None:
            self._tools.publisher.ring(agent.stream, 0, agent.output_ids, LogState.CLOSED)

    def _over(self, record: ChainRecord, index: int, task: asyncio.Task[None]) -> None:
        """Take the chain on by how its step has ended."""
        del self._tasks[record.id, index]
        agent, name = record.agents[index], record.chain.agents[index].name
        agent.waits_for = ""
        error = None if task.cancelled() else task.exception()
        if self._closed:
            return
        if not task.cancelled() and error is None:
            self._tell.step_finished(record, index)
            self._apply(record, Ended(index, "finished"))
            self._apply(record, Checked(index))
            return
        # It may have been cancelled while its outcome was written.
        agent.finish_reason, agent.output_ids, agent.text = None, [], []
        agent.first_token_ns = agent.last_token_ns = 0
        why = "" if error is None else str(error)
        if error is not None and not isinstance(error, PingpongError):
            _log.error("step_fault", chain=record.id, agent=name, error=f"{type(error).__name__}: {error}")
            why = "a fault in the daemon; its log has the event step_fault."
        elif isinstance(error, BusError):
            why = f"its output cannot be passed on: {error}"
        state: Literal["aborted", "failed"] = "aborted" if error is None else "failed"
        agent.entries[-1].end(state, time.monotonic_ns(), 0, why)
        self._tell.step_failed(record, index, state, why)
        self._apply(record, Ended(index, state, f'step "{name}": {why}' if why else ""))


def _whole(text: str) -> str:
    """A text without halves of surrogate pairs: JSON can hold them, and they cannot be sent on."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
