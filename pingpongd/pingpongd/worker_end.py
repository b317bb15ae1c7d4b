"""Ending a worker's process in bounded time, whatever state it is in."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil

from pingpongd.process import WorkerProcess
from pingpongd.worker_handle import EndOrder

_ASKED_SECONDS = 10.0  # vLLM's own shutdown takes 3.5 s on an idle machine
_LOOK_SECONDS = 0.25


async def end_process(process: WorkerProcess, order: EndOrder, stop_s: float) -> int:
    """Carry out an order, after its message was sent if it has one; returns the exit code once it is reaped.

    Args:
        process: a worker.
        order: how it shall end.
        stop_s: from SIGTERM to SIGKILL.
    """
    patience_s = {"ask": _ASKED_SECONDS, "wait": _ASKED_SECONDS, "terminate": stop_s, "kill": 0.0}[order.how]
    if patience_s and await asyncio.to_thread(stands_stopped, process.pid):
        patience_s = 0.0  # nothing that is stopped hears SIGTERM, and an engine that is stopped does not shut down
    if patience_s and order.how == "terminate" and process.exit_code is None:
        os.kill(process.pid, signal.SIGTERM)
    await _exits_within(process, patience_s)
    if process.exit_code is None:
        process.kill()
    return await process.exited()


def kill_group(process: WorkerProcess) -> None:
    """SIGKILL a worker that has not been reaped, and what is in its process group, at once."""
    if process.exit_code is None:
        os.killpg(process.pid, signal.SIGKILL)


def stands_stopped(pid: int) -> bool:
    """Whether a process, or one under it, is stopped, as after SIGSTOP. Reads all of /proc: some milliseconds."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return False
    return any(_is_stopped(number) for number in [pid, *(process.pid for process in below)])


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


async def _exits_within(process: WorkerProcess, seconds: float) -> None:
    """Wait for its end, but not longer than that, nor once it stands stopped."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while process.exit_code is None and (left := deadline - loop.time()) > 0:
        try:
            async with asyncio.timeout(min(left, _LOOK_SECONDS)):
                await process.exited()
        except TimeoutError:
            if _is_stopped(process.pid):
                return
