"""The `vllm.general_plugins` entry point: what must be so in every process that vLLM starts for a worker.

vLLM calls `register` in each of its processes before the model loads. It does nothing unless a worker is the ancestor
(the worker names itself in `PINGPONG_WORKER_PID`), so other users of the same environment never notice.

A killed parent leaves EngineCore, its device memory and its shared memory behind for good
(vllm-project/vllm#55510). The parent-death signal cures that, if it is set early: a scheduler class named in the
arguments is imported after the model, too late for a parent that dies while loading.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
from pathlib import Path

WORKER_PID = "PINGPONG_WORKER_PID"
"""Set by a worker to its own pid; its engine's processes inherit it."""
FAILURE_FILE = "PINGPONG_ENGINE_FAILURE"
"""Path where an engine process leaves the reason why it could not start."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Set up one process of vLLM; called by vLLM, in some processes more than once."""
    if WORKER_PID not in os.environ:
        return
    parent = multiprocessing.parent_process()
    if parent is not None:  # None in the worker itself, whose own parent is the supervisor's business
        die_with_parent(parent.pid)
        path = os.environ.get(FAILURE_FILE)
        logger = logging.getLogger("vllm")
        if path and not any(isinstance(handler, FailureHandler) for handler in logger.handlers):
            logger.addHandler(FailureHandler(Path(path)))
    from pingpong_worker.vllm_random_loader import register_loader  # imports much of vLLM: not before the signal is set

    register_loader()


def die_with_parent(expected: int | None) -> None:
    """Have the kernel kill this process when its parent ends; end at once if the parent is gone already.

    The parent is compared with the one that started us, not with 1: orphans of a session go to its user manager.
    The signal follows the *thread* that started us, which must live as long as the parent does.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != expected:
        os._exit(1)


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
