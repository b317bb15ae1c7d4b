"""Draining a worker: it finishes its hops and takes no new ones, and then ends, so that a fresh one takes its place."""

from __future__ import annotations

import asyncio

import structlog

from pingpongd.worker_handle import EndOrder, Worker

_log = structlog.get_logger()


async def finish_hops(worker: Worker, deadline_s: float) -> None:
    """Wait for the last hop of a worker that serves, not longer than that, and order its end.

    Returns as well where it ends for another reason before. Cancelled, it goes on to serve.
    """
    start = worker.number
    worker.state = "draining"
    _log.info("worker_draining", worker=worker.name, hops=len(worker.hops), seconds=deadline_s)
    try:
        async with asyncio.timeout(deadline_s):
            await worker.until(lambda: not worker.hops or worker.state != "draining")
    except TimeoutError:
        _log.info("worker_drain_deadline", worker=worker.name, hops=len(worker.hops))
    except asyncio.CancelledError:
        if worker.number == start and worker.state == "draining":
            worker.state = "ready"
        raise
    if worker.number == start:
        worker.end(EndOrder("ask", "it was drained", expected=True))
