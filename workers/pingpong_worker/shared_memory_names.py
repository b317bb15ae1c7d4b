"""Names of what a worker's processes put into /dev/shm, so that whoever clears up after them knows it for theirs.

Python calls its segments ``psm_`` and eight random digits, and its semaphores ``sem.mp-`` and eight; vLLM's message
queues are such segments. Who made one cannot be told from that, and it is Python's resource tracker alone that removes
it: killed together with the engine, the tracker leaves it for good, and enough of them keep every engine from starting
(vllm-project/vllm#54002). So a worker and each process of its engine name them by a prefix that the supervisor hands
down::

    pingpong-4c0ffee1-9a3b77d0-5fd03c1e86ab2d10
             instance worker   segment

Standard library only, and little of it: this is imported before anything else in many processes.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

PREFIX_VARIABLE = "PINGPONG_SHM_PREFIX"
"""Environment variable: the prefix for the names, without the dash that follows."""
FOLDER = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is
_RANDOM_CHARACTERS = 16


def instance_prefix(runtime_dir: Path) -> str:
    """The prefix of a daemon's names: the same at each of its starts, and nobody else's.

    The path tells instances and users apart. The process namespace tells containers apart, which can share /dev/shm
    and have the same paths.
    """
    identity = f"{os.getuid()} {Path('/proc/self/ns/pid').stat().st_ino} {runtime_dir}"
    return f"pingpong-{zlib.crc32(identity.encode(errors='surrogateescape')):08x}"


def worker_prefix(instance: str) -> str:
    """A prefix for one start of one worker of an instance."""
    return f"{instance}-{os.urandom(4).hex()}"


def use_own_names() -> bool:
    """Let this process name its segments and semaphores by the prefix in its environment.

    Children that `multiprocessing` spawns inherit the semaphores' prefix only: each has to call this.

    Returns:
        False where there is no prefix, or where this Python makes its names in another way than 3.11 to 3.13 do: the
        supervisor's sweeper then knows the segments by who maps them.
    """
    import multiprocessing  # here: the sweeper, which is to stay small, has no use for it
    from multiprocessing import shared_memory

    prefix = os.environ.get(PREFIX_VARIABLE)
    if not prefix or not hasattr(shared_memory, "_make_filename"):
        return False
    start = f"/{prefix}-"
    names = {"_SHM_NAME_PREFIX": start, "_SHM_SAFE_NAME_LENGTH": len(start) + _RANDOM_CHARACTERS}
    before = {name: getattr(shared_memory, name, None) for name in names}
    if None in before.values():
        return False
    for name, value in names.items():
        setattr(shared_memory, name, value)
    if not shared_memory._make_filename().startswith(start):
        for name, value in before.items():
            setattr(shared_memory, name, value)
        return False
    configuration = getattr(multiprocessing.current_process(), "_config", {})
    if "semprefix" in configuration:
        configuration["semprefix"] = f"/{prefix}"
    return True


def segments(prefix: str) -> list[str]:
    """Names in /dev/shm, of this user's, that have the prefix; semaphores begin with "sem.", too."""
    found = []
    with os.scandir(FOLDER) as entries:
        for entry in entries:
            if entry.name.removeprefix("sem.").startswith(f"{prefix}-"):
                try:
                    if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                        found.append(entry.name)
                except FileNotFoundError:  # removed in the meantime
                    continue
    return found


def unlink_segments(prefix: str) -> list[str]:
    """Remove the names that have the prefix; returns them. Whoever still maps one keeps its memory."""
    removed = []
    for name in segments(prefix):
        try:
            (FOLDER / name).unlink()
        except FileNotFoundError:
            continue
        removed.append(name)
    return removed
