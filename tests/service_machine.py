"""A real systemd, booted in namespaces on a throw-away copy of this machine's root; `service/boot.sh` says how."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HANG_SECONDS = 120.0
_CGROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
_TOOLS = ("unshare", "nsenter", "setpriv", "systemctl", "journalctl", "mount", "pivot_root")


def why_not() -> str | None:
    """Why no systemd can be booted here; None where it can."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces and mounts"
    project = Path(__file__).resolve().parents[1]
    if any(project.is_relative_to(folder) for folder in ("/tmp", "/var/tmp", "/run", "/dev", "/home")):
        return f"cannot run what is in {project}: these folders are private there"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or not Path("/lib/systemd/systemd").exists():
        return f"needs {missing[0] if missing else 'systemd'}"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "needs overlayfs"
    if _cgroup_root() is None:
        return "needs a writable cgroup v2 hierarchy"
    probe = ["unshare", "--pid", "--mount", "--cgroup", "--uts", "--ipc", "--net", "--fork", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"namespaces are not to be had: {done.stderr.strip()}"


def _cgroup_root() -> Path | None:
    for root in _CGROUPS:
        if (root / "cgroup.controllers").exists() and os.access(root, os.W_OK):
            return root
    return None


class Machine:
    """The booted systemd; a context manager that ends everything in it.

    Args:
        folder: where its root is mounted; on this side it stays empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        root = _cgroup_root()
        assert root is not None
        self._cgroup = root / f"pingpong-test-{os.getpid()}-{time.monotonic_ns()}"
        self._log = folder.with_name(folder.name + ".log")

    def __enter__(self) -> Machine:
        self.folder.mkdir()
        self._cgroup.mkdir()
        namespaces = ["--pid", "--mount", "--cgroup", "--uts", "--ipc", "--net", "--fork", "--kill-child"]
        script = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
        boot = ["unshare", *namespaces, "sh", str(Path(__file__).with_name("service") / "boot.sh"), str(self.folder)]
        with self._log.open("wb") as log:
            self._outside = subprocess.Popen(
                ["sh", "-c", script, "sh", str(self._cgroup), *boot], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._enter = ["nsenter", "--target", str(self._init()), "--all"]
            self.until(lambda: self.run("systemctl", "is-system-running").stdout.strip() == "running", "the boot")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(
        self, *command: str, user: str | None = None, check: bool = False, data: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root or as another user."""
        words = [
            "/usr/bin/env",
            "-i",
            "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME=/root",
            "LC_ALL=C.UTF-8",
        ]
        if user is not None:
            found = self.run("id", "-u", user, check=True)
            groups = self.run("id", "-g", user, check=True)
            uid, gid = found.stdout.strip(), groups.stdout.strip()
            words = [
                *("setpriv", f"--reuid={uid}", f"--regid={gid}", "--init-groups", *words),
                *(f"HOME=/home/{user}", f"XDG_RUNTIME_DIR=/run/user/{uid}"),
            ]
        done = subprocess.run(
            [*self._enter, *words, *command],
            input=data,
            stdin=subprocess.DEVNULL if data is None else None,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
        if check and done.returncode != 0:
            pytest.fail(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}\n{self.journal()}"
            )
        return done

    def write(self, path: str, text: str) -> None:
        """Write a file inside."""
        self.run("mkdir", "-p", str(Path(path).parent), check=True)
        self.run("sh", "-c", f"cat > {path}", data=text, check=True)

    def properties(self, unit: str, *names: str) -> dict[str, str]:
        """What `systemctl show` says of a unit."""
        shown = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names)).stdout
        return dict(line.partition("=")[::2] for line in shown.splitlines())

    def property(self, unit: str, name: str) -> str:
        return self.properties(unit, name)[name]

    def processes(self, unit: str) -> list[str]:
        """Process ids in the unit's cgroup, as they are inside."""
        group = self.property(unit, "ControlGroup")
        listed = self.run("sh", "-c", f"cat /sys/fs/cgroup{group}/cgroup.procs") if group else None
        return listed.stdout.split() if listed is not None and listed.returncode == 0 else []

    def journal(self, *arguments: str) -> str:
        """What the journal has, by default of the service."""
        return self.run("journalctl", "--no-pager", *(arguments or ("-u", "pingpongd*", "-n", "60"))).stdout

    def events(self, event: str, unit: str = "pingpongd") -> list[dict[str, object]]:
        """The daemon's log objects of one event name."""
        lines = self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit).stdout.splitlines()
        objects = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in objects if line["event"] == event]

    def until(self, condition: Callable[[], bool], what: str, seconds: float = HANG_SECONDS) -> None:
        """Wait for a condition; fail if it does not come."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self._outside.poll() is not None:
                pytest.fail(f"the machine ended while waiting for {what}:\n{self._log.read_text()}")
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds:g} s: {what}\n{self.journal()}")
            time.sleep(0.1)

    def _init(self) -> int:
        """The pid that systemd has on this side, once it has its own root."""
        deadline = time.monotonic() + HANG_SECONDS
        children = Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children")
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                for child in children.read_text().split():
                    if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                        return int(child)
            if self._outside.poll() is not None:
                break
            time.sleep(0.05)
        pytest.fail(f"systemd did not boot:\n{self._log.read_text()}")

    def _end(self) -> None:
        self._outside.send_signal(signal.SIGKILL)  # its child goes with it, and with that the namespace's every process
        self._outside.wait()
        deadline = time.monotonic() + HANG_SECONDS
        while self._cgroup.exists() and time.monotonic() < deadline:
            for group in sorted(self._cgroup.glob("**/"), key=lambda path: -len(path.parts)):
                with contextlib.suppress(OSError):
                    group.rmdir()
            time.sleep(0.05)
        assert not self._cgroup.exists()


def pingpongd(*arguments: str) -> Sequence[str]:
    """This checkout's daemon, as a command line inside: the checkout is part of the root."""
    return (str(Path(sys.prefix) / "bin" / "pingpongd"), *arguments)


def pingpong_client(*arguments: str) -> Sequence[str]:
    """The same of the client."""
    return (str(Path(sys.prefix) / "bin" / "pingpong-client"), *arguments)
