"""What must be so in every process that vLLM starts for a worker: the `vllm.general_plugins` entry point, and earlier.

vLLM calls `register` in each of its processes before the model loads. It does nothing unless a worker is the ancestor
(the worker names itself in `PINGPONG_WORKER_PID`), so other users of the same environment never notice.

A killed parent leaves EngineCore, its device memory and its shared memory behind for good (vllm-project/vllm#55510).
The parent-death signal cures that, if it is set early. A scheduler class named in the arguments is imported after the
model. Even the plugin is late: EngineCore first waits for a handshake, five minutes long where its parent has died.
So `main.py` calls `end_with_worker` where spawn imports it, as the first thing in each of these processes; the plugin
is for engines that something else than `main.py` has started.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from pingpong_worker.garbage_watch import collections_of_this_process
from pingpong_worker.parent_death import die_with_parent
from pingpong_worker.shared_memory_names import use_own_names
from pingpong_worker.step_board import STEP_BOARD, CollectionsSlot

WORKER_PID = "PINGPONG_WORKER_PID"
"""Set by a worker to its own pid; its engine's processes inherit it."""
FAILURE_FILE = "PINGPONG_ENGINE_FAILURE"
"""Path where an engine process leaves the reason why it could not start."""


def register() -> None:
    """Set up one process of vLLM; called by vLLM, in some processes more than once."""
    if WORKER_PID not in os.environ:
        return
    end_with_worker()
    use_own_names()
    path = os.environ.get(FAILURE_FILE)
    logger = logging.getLogger("vllm")
    if path and not any(isinstance(handler, FailureHandler) for handler in logger.handlers):
        logger.addHandler(FailureHandler(Path(path)))
    from pingpong_worker.vllm_random_loader import register_loader  # imports much of vLLM: not before the signal is set

    register_loader()
    _change_vllm(in_worker=os.environ[WORKER_PID] == str(os.getpid()))


@functools.cache  # vLLM calls `register` more than once, and what is wrapped twice is remembered and traced twice
def _change_vllm(*, in_worker: bool) -> None:
    """Wrap functions of vLLM's, in the worker or in a process of its engine."""
    if not in_worker and "vllm.v1.engine.core" in sys.modules:
        from pingpong_worker.vllm_block_hashes import remember_block_hashes

        remember_block_hashes()
    if not in_worker and os.environ.get("CUDA_VISIBLE_DEVICES"):  # workers on GPUs set it: see `pinning.py`
        from pingpong_worker.vllm_staged_ids import pack_staged_ids

        pack_staged_ids()
    if not in_worker:
        from pingpong_worker.vllm_start_progress import tell_start

        tell_start()
        if board := os.environ.get(STEP_BOARD):
            with suppress(OSError):  # the board is for looking at: an engine runs without it
                collections_of_this_process().tell = CollectionsSlot(Path(board)).write
    if folder := os.environ.get("PINGPONG_TRACE"):  # see `request_trace.py`
        from pingpong_worker.vllm_trace import trace_engine, trace_worker

        trace = trace_worker if in_worker else trace_engine
        trace(Path(folder))


def end_with_worker() -> None:
    """In a process that descends from a worker: die with the parent, and at once if the worker is gone already.

    Harmless in the worker itself and in processes that have nothing to do with one.
    """
    worker = os.environ.get(WORKER_PID, "")
    if not worker.isdigit() or int(worker) == os.getpid():
        return
    parent = os.getppid()
    if not die_with_parent(parent) or int(worker) not in _ancestors(parent):
        os._exit(1)


def _ancestors(pid: int) -> list[int]:
    """`pid`, its parent, and so on up to the first process."""
    found: list[int] = []
    try:
        while pid > 0:
            found.append(pid)
            pid = psutil.Process(pid).ppid()
    except psutil.Error:  # one of them has just ended; what lies above it no longer matters
        return found
    return found


class FailureHandler(logging.Handler):
    """Keeps the first exception that vLLM logs: its root cause reaches the parent in no other way.

    The parent only learns "Engine core initialization failed. See root cause above."
    """

    def __init__(self, path: Path) -> None:
        super().__init__(level=logging.ERROR)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write the exception of `record`, if it has one and no process has written before."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {error}")
        except OSError:  # another process was first, or the folder has gone with the worker
            return
