"""What the machine and its GPUs say about each group, looked at every second by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from pingpong_bus.errors import ConfigError
from pingpong_bus.messages import DeviceState, HostState
from pingpong_worker.pinning import parse_device
from pingpongd.config import JitterConfig
from pingpongd.gpu_probe import GpuProbe
from pingpongd.host_probe import HostProbe
from pingpongd.nvml import Nvml, NvmlRefused, load_nvml
from pingpongd.pace import Budget
from pingpongd.proc_files import descends, first_pid_namespace

_log = structlog.get_logger(__name__)

_SHARE: Final = 0.003
"""Of a core: where looks take more, for many groups, they become rarer."""
_STOP_S: Final = 2.0
_ODD: Final = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What comes of a kernel or a driver that answers as none did that was tried: the group goes without, not the rest."""


class ProbeSample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a group."""

    at_s: float
    """When, by the monotonic clock; its rates are over the time since the look before."""
    host: HostState
    gpus: list[DeviceState] = []
    """In the order of the group's devices; empty where it runs on cores, or NVML cannot be asked."""


class _Watched(msgspec.Struct, frozen=True, eq=False):
    pids: tuple[int, ...]
    devices: tuple[str, ...]


class Probes:
    """Looks at groups' processes and devices, every `probe_s`, in a thread of its own.

    All methods but `stop` return at once, and all may be called from any thread; nothing is read or asked on the
    caller's time.
    """

    def __init__(
        self,
        config: JitterConfig,
        *,
        proc: Path = Path("/proc"),
        nvml: Callable[[], Nvml] = load_nvml,
        share: float = _SHARE,
    ) -> None:
        """Args:
        config: how often to look.
        proc: where the kernel's files are.
        nvml: connects to NVML; called in the thread, once a group with GPUs is watched. Raises NvmlRefused.
        share: of a core, what looks may take; they become rarer where they would take more.
        """
        self._config = config
        self._proc = proc
        self._load_nvml = nvml
        self._share = share
        self._host = HostProbe(proc)
        self._gpu: GpuProbe | None = None
        self._tried_nvml = False
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._forgotten: set[str] = set()
        self._latest: dict[str, ProbeSample] = {}
        self._suspected = frozenset[str]()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.cpu_s = 0.0
        """CPU time that the thread has used for looks."""

    def start(self) -> None:
        """Begin to look; harmless where it has begun."""
        if self._thread is None:
            # Its own: a thread that hangs in a driver, and was given up, shall not go on beside its successor.
            self._stopping = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stopping,), name="probes", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Look no more; waits for the look under way, at most two seconds."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            self._wake.set()
            thread.join(_STOP_S)

    def configure(self, config: JitterConfig) -> None:
        """Go on by another configuration."""
        self._config = config
        self._wake.set()

    def watch(self, name: str, pids: Sequence[int], devices: Sequence[str]) -> None:
        """Look at this group from now on; cheap where nothing has changed, so call it at every heartbeat.

        Args:
            name: the group's.
            pids: its worker's process and its engine's. Call it once with none before the engine starts: what is on
                the devices then is not the group's, also where NVML's pids are those of another namespace.
            devices: as configured.
        """
        with self._lock:
            known = self._watched.get(name)
            if known is not None and known.pids == tuple(pids) and known.devices == tuple(devices):
                return
            self._watched[name] = _Watched(tuple(pids), tuple(devices))
        if known is None:
            self._wake.set()

    def suspect(self, name: str, suspected: bool) -> None:
        """Say whether a group's tokens come late: who else is on its devices is then asked at every look.

        Cheap where nothing has changed.
        """
        if suspected != (name in self._suspected):
            with self._lock:
                self._suspected = self._suspected | {name} if suspected else self._suspected - {name}

    def forget(self, name: str) -> None:
        """Look at it no more: its processes have ended. `latest` then has nothing of it."""
        with self._lock:
            self._watched.pop(name, None)
            self._latest.pop(name, None)
            self._suspected -= {name}
            self._forgotten.add(name)

    def latest(self, name: str) -> ProbeSample | None:
        """The latest look at a group; None before the first with two readings to compare."""
        return self._latest.get(name)

    def _run(self, stopping: threading.Event) -> None:
        due, budget = time.monotonic(), Budget(self._share)
        while True:
            self._wake.wait(max(0.0, due - time.monotonic()))
            if stopping.is_set():
                return
            self._wake.clear()
            began, at, connected = time.thread_time(), time.monotonic(), self._gpu is not None
            watched = self._take()
            self._remember_tenants(watched)
            if at >= due:
                self._look(watched)
                # Connecting to the driver takes some hundred milliseconds, once, and says nothing about the next look.
                charged = connected or self._gpu is None
                wait = budget.spent(at, time.thread_time() - began if charged else 0.0)
                due = at + max(self._config.probe_s, wait)
            else:
                due = min(due, at + self._config.probe_s)
            self.cpu_s += time.thread_time() - began

    def _take(self) -> dict[str, _Watched]:
        """What is to be looked at; what is not any more is forgotten first."""
        with self._lock:
            watched = dict(self._watched)
            forgotten, self._forgotten = self._forgotten, set()
        for name in forgotten:
            self._host.forget(name)
            if self._gpu is not None:
                self._gpu.forget(name)
        return watched

    def _remember_tenants(self, watched: dict[str, _Watched]) -> None:
        """Of groups whose engines start: who is on their devices."""
        for name, group in watched.items():
            try:
                if not group.pids and (gpu := self._gpu_probe(group.devices)) is not None:
                    gpu.starting(name, gpu.resolve(group.devices))
            except _ODD as error:
                _log.warning("probe_failed", worker=name, error=repr(error))

    def _look(self, watched: dict[str, _Watched]) -> None:
        self._host.begin()
        if self._gpu is not None:
            self._gpu.begin()
        for name, group in watched.items():
            if group.pids and (sample := self._sample(name, group)) is not None:
                with self._lock:
                    # Not where it was forgotten meanwhile: its successor shall not begin with the last one's figures.
                    if self._watched.get(name) is group:
                        self._latest[name] = sample

    def _sample(self, name: str, group: _Watched) -> ProbeSample | None:
        try:
            host = self._host.look(name, group.pids)
            gpu = self._gpu_probe(group.devices)
            suspected = name in self._suspected
            gpus = [] if gpu is None else gpu.look(name, gpu.resolve(group.devices), group.pids, suspected=suspected)
        except _ODD as error:
            _log.warning("probe_failed", worker=name, error=repr(error))
            return None
        return None if host is None else ProbeSample(at_s=time.monotonic(), host=host, gpus=gpus)

    def _gpu_probe(self, devices: Sequence[str]) -> GpuProbe | None:
        """NVML is asked for only where a group has GPUs, and once: a driver that is not there will not come."""
        if not any(_is_gpu(device) for device in devices):
            return None
        if not self._tried_nvml:
            self._tried_nvml = True
            try:
                nvml = self._load_nvml()
            except NvmlRefused as refusal:
                _log.warning("nvml_unavailable", why=str(refusal))
            else:
                self._gpu = GpuProbe(
                    nvml,
                    same_pids=first_pid_namespace(self._proc),
                    descends=lambda pid, family: descends(self._proc, pid, family),
                )
        return self._gpu


def _is_gpu(device: str) -> bool:
    try:
        return not isinstance(parse_device(device), list)
    except ConfigError:  # a simulated engine's, which may be called anything
        return False
