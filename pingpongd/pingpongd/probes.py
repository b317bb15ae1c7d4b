"""What the machine and its GPUs say about each group, looked at every second by a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pingpong_bus.messages import DeviceState, HostState
from pingpongd.config import JitterConfig


class ProbeSample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a group."""

    at_s: float
    """When, by the monotonic clock; its rates are over the time since the look before."""
    host: HostState
    gpus: list[DeviceState] = []
    """In the order of the group's devices; empty where it runs on cores, or nothing can be asked."""


class Probes:
    """Looks at groups' processes and devices, every `probe_s`, in a thread of its own.

    All methods return at once and may be called from any thread; nothing is read or asked on the caller's time.
    """

    def __init__(self, config: JitterConfig) -> None:
        self._config = config

    def start(self) -> None:
        """Begin to look; harmless where it has begun."""

    def stop(self) -> None:
        """Look no more; waits for the look under way, at most two seconds."""

    def configure(self, config: JitterConfig) -> None:
        """Go on by another configuration."""
        self._config = config

    def watch(self, name: str, pids: Sequence[int], devices: Sequence[str]) -> None:
        """Look at this group from now on; cheap where nothing has changed, so call it at every heartbeat.

        Args:
            name: the group's.
            pids: its worker's process and its engine's. Call it once with none before the engine starts: what is on
                the devices then is not the group's, also where NVML's pids are those of another namespace.
            devices: as configured.
        """

    def forget(self, name: str) -> None:
        """Look at it no more: its processes have ended. `latest` then has nothing of it."""

    def latest(self, name: str) -> ProbeSample | None:
        """The latest look at a group; None before the first with two readings to compare."""
