"""A worker without an engine, but with all that an engine leaves behind: ``family_process.py [KIND...]``.

It has a segment, and a child by `multiprocessing` that has another and heeds nobody's end. Kinds: ``loyal`` lets the
child end with its parent, ``escaped`` adds a process in a session of its own, ``foreign`` lets the child map a file in
/dev/shm that has a name not of ours. Prints one JSON object, then waits; SIGTERM ends it cleanly.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from multiprocessing.connection import Connection
from pathlib import Path

from pingpong_worker.parent_death import die_with_parent
from pingpong_worker.shared_memory_names import use_own_names


def child(pipe: Connection, kinds: list[str]) -> None:
    """Make a segment, and more."""
    if "loyal" in kinds:
        die_with_parent(os.getppid())
    use_own_names()
    segment = shared_memory.SharedMemory(create=True, size=4096)
    names = [segment.name]
    if "foreign" in kinds:
        path = Path(f"/dev/shm/foreign-{os.getpid()}")
        path.write_bytes(bytes(4096))
        names.append(path.name)
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 4096)
        mapped[0] = 1
    pipe.send(names)
    while True:
        time.sleep(60)


def main(kinds: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if "loyal" in kinds:
        die_with_parent(os.getppid())
    use_own_names()
    context = multiprocessing.get_context("spawn")
    segment = shared_memory.SharedMemory(create=True, size=4096)
    near, far = context.Pipe()
    other = context.Process(target=child, args=(far, kinds), daemon=True)
    other.start()
    lock = context.Lock()
    family = {"leader": os.getpid(), "child": other.pid, "tracker": resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    if "escaped" in kinds:
        family["escaped"] = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL).pid
    names = [segment.name, *near.recv()]
    sys.stdout.write(json.dumps({"pids": family, "names": names}) + "\n")
    sys.stdout.flush()
    try:
        while True:
            time.sleep(60)
    finally:
        other.kill()
        other.join()
        del lock
        segment.close()
        segment.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
