"""Ties a process's life to its parent's: when the parent dies, however it dies, the kernel kills the child."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int) -> bool:
    """Ask the kernel for SIGKILL when the parent dies; call it from the main thread, as early as possible.

    The signal follows the *thread* that started the process, so the parent must start it from one that lives as long
    as the parent does.

    Args:
        expected_parent: pid of the process that should be the parent.

    Returns:
        False where the parent is another one already: it died before this call, and the caller should end. Comparing
        with 1 would miss orphans that a user manager or a container's init adopts.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == expected_parent
