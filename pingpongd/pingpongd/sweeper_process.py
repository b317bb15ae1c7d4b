"""The sweeper's process: outlives its supervisor by a moment, to end and remove what that one can no longer.

Started as ``python -m pingpongd.sweeper_process SUPERVISOR_PID RUNTIME_DIR``, in a session of its own, with a pipe on
standard input that brings one line for each worker: ``PID BORN PREFIX``; the prefix "-" is that of a process that has
no names in /dev/shm, such as the command of a call. The line ``quit`` ends it.

While a supervisor lives it cleans up after its workers itself, and the kernel ends workers whose supervisor dies. What
is left for the sweeper: engines that were stopped or too young to have asked the kernel for that, processes that left
their group, segments that no process of ours has named, and everything that a killed supervisor leaves on file systems.
Killed itself, with the supervisor, it leaves that to the next start.

Processes without names may come and go many times a second. So nobody looks for what belongs to them, but where their
group outlives them and the supervisor.

Imports little: it is there all the time, and should take no memory to speak of.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path

from pingpong_worker.shared_memory_names import unlink_segments
from pingpongd.leftovers import clear_abandoned
from pingpongd.process_group import ProcessId, group_exists, read_stat
from pingpongd.worker_remains import Segments, WorkerRemains, boot_ticks, process_table

_STDIN = 0
_LOOK_SECONDS = 1.0
_LOOK_SHARE = 0.02
"""The most of a core that looking may take: on a machine with thousands of processes it is done less often."""
_BUSY_SECONDS = 0.05
_GRACE_SECONDS = 0.3
"""What an engine has to end by itself after its worker."""
_UNDYING_SECONDS = 30.0
"""When to give up on a process that does not even die of SIGKILL, such as in a driver's uninterruptible wait."""
_FOLDER_SECONDS = 1.0
"""How long the runtime directory waits for the end of the workers that use it, once the supervisor is gone."""


class SweeperProcess:
    """Watches one supervisor and its workers."""

    def __init__(self, supervisor: int, runtime_dir: Path) -> None:
        self._supervisor = supervisor
        self._runtime_dir = runtime_dir
        self._poll = select.poll()
        self._poll.register(_STDIN, select.POLLIN)
        self._heard_all = False
        self._pending = b""
        self._workers: dict[int, WorkerRemains] = {}
        """By the pidfd of each worker that lives."""
        self._ended: list[WorkerRemains] = []
        self._just_ended: list[WorkerRemains] = []
        """Those without names: the supervisor is about to end their groups."""
        self._segments = Segments()
        self._next_look = 0.0

    def run(self) -> None:
        """Watch until told to quit or until the supervisor has died; then sweep."""
        os.set_blocking(_STDIN, False)
        with suppress(ProcessLookupError):  # it has died already: then another is the parent
            self._poll.register(os.pidfd_open(self._supervisor), select.POLLIN)
        while os.getppid() == self._supervisor:
            ready = {descriptor for descriptor, _ in self._poll.poll(self._patience() * 1e3)}
            if _STDIN in ready and not self._read():
                return
            for descriptor in ready & self._workers.keys():
                self._worker_ended(descriptor)
            if time.monotonic() >= self._next_look:
                self._look()
        if self._read():  # what it could still tell
            self._sweep()

    def _patience(self) -> float:
        """Seconds until there is something to do."""
        if not self._workers and not self._ended and not self._just_ended:
            return 3600.0
        return max(0.0, self._next_look - time.monotonic())

    def _read(self) -> bool:
        """Take what the supervisor tells; False if that is to quit."""
        while not self._heard_all:
            try:
                data = os.read(_STDIN, 1 << 16)
            except BlockingIOError:
                break
            self._pending += data
            if not data:  # the supervisor is dead, or about to die: its pid will tell
                self._heard_all = True
                self._poll.unregister(_STDIN)
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            if line == b"quit":
                return False
            pid, born, prefix = line.decode("ascii").split()
            self._watch(WorkerRemains(ProcessId(int(pid), int(born)), "" if prefix == "-" else prefix))
        return True

    def _watch(self, worker: WorkerRemains) -> None:
        if worker.prefix:
            self._segments.look(list(self._workers.values()))
            self._segments.pass_over_present()
            self._next_look = 0.0
        try:
            descriptor = os.pidfd_open(worker.leader.pid)
        except ProcessLookupError:
            self._has_ended(worker)
            return
        stat = read_stat(worker.leader.pid)
        if stat is None or stat.id != worker.leader:  # its number is another's by now, so its group is gone as well
            os.close(descriptor)
            if worker.prefix:
                worker.ended = worker.leader.born
                self._ended.append(worker)
            return
        self._workers[descriptor] = worker
        self._poll.register(descriptor, select.POLLIN)

    def _worker_ended(self, descriptor: int) -> None:
        worker = self._workers.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        self._has_ended(worker)

    def _has_ended(self, worker: WorkerRemains) -> None:
        worker.ended = boot_ticks()
        if worker.prefix:
            self._ended.append(worker)
            self._next_look = 0.0
        else:
            self._just_ended.append(worker)

    def _look(self) -> None:
        """See what belongs to whom, and end what is left of workers that have ended."""
        start = time.monotonic()
        self._ended += [worker for worker in self._just_ended if group_exists(worker.leader.pid)]
        self._just_ended.clear()
        table = process_table()
        now = boot_ticks()
        for worker in (*self._workers.values(), *self._ended):
            if worker.prefix or worker.ended is not None:
                worker.look(table)
        self._segments.look([*self._workers.values(), *self._ended])
        for worker in list(self._ended):
            left = worker.living(table)
            waited = worker.seconds_since_end(now)
            if left and waited >= _GRACE_SECONDS:
                worker.kill(left)
            if not left or waited >= _UNDYING_SECONDS:
                self._segments.remove_of(worker)
                self._ended.remove(worker)
        took = time.monotonic() - start
        pause = _BUSY_SECONDS if self._ended else max(_LOOK_SECONDS, took / _LOOK_SHARE)
        self._next_look = start + pause

    def _sweep(self) -> None:
        """End and remove everything; the supervisor is dead."""
        start = time.monotonic()
        ended = boot_ticks()
        workers = [*self._workers.values(), *self._ended, *self._just_ended]
        for worker in workers:
            worker.ended = worker.ended or ended
        killed: set[ProcessId] = set()
        removed: list[str] = []
        folder = ""
        left = True
        while left and time.monotonic() - start < _UNDYING_SECONDS:
            table = process_table()
            left = False
            for worker in workers:
                worker.look(table)
            self._segments.look(workers)  # before they are killed: what those that still run use
            for worker in workers:
                living = worker.living(table)
                worker.kill(living)
                killed |= living
                left |= bool(living)
            if not folder and (not left or time.monotonic() - start >= _FOLDER_SECONDS):
                for worker in workers:
                    removed += self._segments.remove_of(worker)
                folder = self._clear_folder()
            if left:
                time.sleep(_BUSY_SECONDS)
        for worker in workers:  # what the last of them made before it died
            removed += unlink_segments(worker.prefix) if worker.prefix else []
        pids = sorted(process.pid for process in killed)
        _log(supervisor=self._supervisor, killed=pids, removed=removed, runtime_dir=folder)

    def _clear_folder(self) -> str:
        try:
            return "cleared" if clear_abandoned(self._runtime_dir) else "not ours"
        except OSError as error:  # the next start meets the same, and says so to somebody
            return str(error)


def _log(**fields: object) -> None:
    seconds, rest = divmod(time.time_ns(), 10**9)
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06d}Z"  # as in `logs.py`
    line = {"event": "supervisor_swept", "level": "warning", "timestamp": stamp, **fields}
    with suppress(OSError):  # nobody reads the log any more
        sys.stderr.write(json.dumps(line) + "\n")
        sys.stderr.flush()


def main() -> None:
    """Run a sweeper; its signals were blocked by who started it, so that no stop of all processes ends it early."""
    os.chdir("/")  # hold no file system
    supervisor, runtime_dir = int(sys.argv[1]), Path(sys.argv[2])
    SweeperProcess(supervisor, runtime_dir).run()


if __name__ == "__main__":
    main()
