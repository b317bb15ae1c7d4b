"""How much memory this process can still take: the machine's, and that of every cgroup around it."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(cgroup_root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can be taken without swapping and without waking an out-of-memory killer.

    A container's limit counts as well as the machine's memory (cgroup v2; v1 hosts are judged by the machine alone).
    """
    available = _machine_available()
    group = _own_group(cgroup_root, membership)
    while group is not None:
        available = min(available, _headroom(group, available))
        group = group.parent if group != cgroup_root else None
    return max(available, 0)


def _machine_available() -> int:
    """The kernel's own estimate of what can be had without swapping."""
    with Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _own_group(root: Path, membership: Path) -> Path | None:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::/"):
            return root / line.removeprefix("0::/")
    return None


def _headroom(group: Path, unlimited: int) -> int:
    """What a cgroup has left; file pages that nobody used lately are given back under pressure and do not count."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return unlimited
    if limit == "max":
        return unlimited
    return int(limit) - used + int(statistics.get("inactive_file", 0))
