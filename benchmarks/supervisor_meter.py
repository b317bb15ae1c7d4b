"""What a daemon's processes use, read from /proc: CPU time by thread, memory, connections of doorbells."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

_NS = 1e-9
_KIB = 1024


class CpuReading(msgspec.Struct, frozen=True):
    """CPU seconds up to a moment."""

    at_s: float
    """By the monotonic clock."""
    supervisor: dict[str, float]
    """By thread: "loop" is the main one, with Python's event loop."""
    loop_waited: float
    """Not CPU time: for how long the main thread could have run and had no core."""
    workers: float
    others: dict[str, float]
    """Of the processes that were named, such as the sweeper's."""

    def since(self, before: CpuReading) -> CpuReading:
        """What was used between two readings; `at_s` is then the time between them."""
        return CpuReading(
            at_s=self.at_s - before.at_s,
            supervisor={name: used - before.supervisor.get(name, 0.0) for name, used in self.supervisor.items()},
            loop_waited=self.loop_waited - before.loop_waited,
            workers=self.workers - before.workers,
            others={name: used - before.others.get(name, 0.0) for name, used in self.others.items()},
        )


def read_cpu(supervisor: int, workers: Iterable[int], others: dict[str, int]) -> CpuReading:
    """CPU time of the daemon's processes.

    Args:
        supervisor: its pid.
        workers: their pids.
        others: further pids by name.
    """
    threads: dict[str, float] = defaultdict(float)
    loop_waited = 0.0
    for task in Path(f"/proc/{supervisor}/task").iterdir():
        name = (task / "comm").read_text().strip()
        used, waited = _seconds(task)
        if int(task.name) == supervisor:
            name, loop_waited = "loop", waited
        elif name.startswith("ZMQbg"):
            name = "ZeroMQ"
        else:
            name = "store and other threads"
        threads[name] += used
    return CpuReading(
        at_s=time.monotonic(),
        supervisor=dict(threads),
        loop_waited=loop_waited,
        workers=sum(_of_process(pid) for pid in workers),
        others={name: _of_process(pid) for name, pid in others.items()},
    )


def _of_process(pid: int) -> float:
    """CPU seconds of all its threads."""
    return sum(_seconds(task)[0] for task in Path(f"/proc/{pid}/task").iterdir())


def _seconds(task: Path) -> tuple[float, float]:
    """Seconds that a thread ran, and that it waited for a core."""
    ran, waited, _ = (task / "schedstat").read_text().split()
    return int(ran) * _NS, int(waited) * _NS


def sweeper_pid(supervisor: int) -> int | None:
    """The sweeper of a daemon; None where none is found."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"pingpongd.sweeper_process" in command and str(supervisor).encode() in command:
                return int(entry.name)
    return None


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident memory of a process, and its proportional share where memory is shared with others; MiB."""
    rolled = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    rss, pss = (int(rolled[key].split()[0]) / _KIB for key in ("Rss", "Pss"))
    return round(rss, 1), round(pss, 1)


def descriptors(pid: int) -> int:
    """How many a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def bell_connections(folder: Path) -> dict[str, int]:
    """Connections to each worker's doorbell, by the name of its socket; those who listen to it have one each."""
    found: Counter[str] = Counter()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        # Flags 00010000 are of the listening socket itself; connected ones at its end carry its path, too.
        if len(fields) == 8 and fields[7].startswith(f"{folder}/bus-") and fields[3] != "00010000":
            found[Path(fields[7]).name] += 1
    return dict(found)
