"""Disturbances for engines that decode: each begins, goes on, and ends without a trace of itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from pingpong_bus.messages import JitterCause

STOP_S = 0.3
_STOP_EVERY_S = 1.5
_CGROUPS = Path("/sys/fs/cgroup/memory")
_LEFT_BYTES = 1 << 20
"""For pages of programs and files, of what needs some hundred MiB of them."""

_SQUEEZE_EVERY_S = 0.3

_BUSY = "while True: pass"
_ON_GPU = """
import sys, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
b = a @ a
torch.cuda.synchronize()
print("begins", flush=True)
while True:
    for _ in range(20):
        b = a @ a
    torch.cuda.synchronize()
"""


class Target(msgspec.Struct, frozen=True):
    """An engine that is to be disturbed."""

    worker: str
    pids: list[int]
    """The worker's and its engine's."""
    cores: list[int]
    """That the engine's threads run on."""
    gpu: str = ""
    """UUID; empty: none."""

    def computing(self) -> psutil.Process:
        """The process that computes most."""
        return max(map(psutil.Process, self.pids), key=lambda process: sum(process.cpu_times()[:2]))


class Fault(msgspec.Struct, frozen=True):
    """A disturbance, and what it should be recognised as."""

    name: str
    causes: tuple[JitterCause, ...]
    during: Callable[[Target], AbstractAsyncContextManager[None]]
    """Disturbs for as long as it is entered."""


@asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do something for as long as it is entered; what of it has failed by the end is raised."""
    tasks = [asyncio.create_task(it) for it in work]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _processes(
    commands: Sequence[Sequence[str]], environment: dict[str, str] | None = None, *, announced: bool = False
) -> AsyncIterator[None]:
    """Run processes; where it is `announced`, they say when they begin to disturb, and until then they only load."""
    started = [
        # In a session of its own: where the kernel shares a core out among sessions first, all of ours get one share.
        subprocess.Popen(  # noqa: ASYNC220
            command,
            env=os.environ | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if announced else None,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        for process in started:
            if process.stdout is not None:
                await asyncio.to_thread(process.stdout.readline)
        yield
        dead = [process.returncode for process in started if process.poll() is not None]
        if dead:
            raise RuntimeError(f"what should have disturbed has ended by itself: {dead}")
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def starve(target: Target) -> AbstractAsyncContextManager[None]:
    """Busy loops, three on each core of the engine."""
    cores = ",".join(map(str, target.cores))
    count = 3 * len(target.cores)
    return _processes([["taskset", "-c", cores, sys.executable, "-c", _BUSY]] * count)


def load_gpu(target: Target) -> AbstractAsyncContextManager[None]:
    """Another process that multiplies matrices on the engine's GPU."""
    return _processes([[sys.executable, "-c", _ON_GPU]], {"CUDA_VISIBLE_DEVICES": target.gpu}, announced=True)


@contextmanager
def own_memory_cgroup() -> Iterator[None]:
    """Put this process, and what it starts from now on, into a memory cgroup (v1) of its own; takes root.

    The page cache is dropped before: pages count for the cgroup that reads them first.
    """
    line = next(it for it in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in it)
    before, own = _CGROUPS / line.split(":", 2)[2].lstrip("/"), _CGROUPS / f"pingpong-{os.getpid()}"
    own.mkdir()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        (own / "cgroup.procs").write_text(str(os.getpid()))
        (own / "memory.oom_control").write_text("1")  # whoever gets no memory waits until the limit is lifted
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        own.rmdir()


@asynccontextmanager
async def squeeze_memory(target: Target) -> AsyncIterator[None]:  # noqa: ARG001 - all that we have started
    """The limit of `own_memory_cgroup` is lowered again and again until hardly any room is left for pages of programs
    and files: they are dropped, and read from the disk anew."""
    folder = _CGROUPS / f"pingpong-{os.getpid()}"
    limit = folder / "memory.limit_in_bytes"

    async def squeeze() -> None:
        while True:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            least = int((folder / "memory.usage_in_bytes").read_text()) - int(stat["total_cache"]) + _LEFT_BYTES
            with suppress(OSError):  # it could not be brought so far down; what could be dropped was
                await asyncio.to_thread(limit.write_text, str(least))
            await asyncio.sleep(_SQUEEZE_EVERY_S)
            limit.write_text("-1")

    async with beside(squeeze()):
        try:
            yield
        finally:
            limit.write_text("-1")


@asynccontextmanager
async def stop_at_random(target: Target) -> AsyncIterator[None]:
    """The engine's process is stopped for 300 ms, at random times."""
    process, draw = target.computing(), random.Random(0)

    async def stop_and_go() -> None:
        while True:
            process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(STOP_S)
            finally:
                process.send_signal(signal.SIGCONT)
            await asyncio.sleep(draw.expovariate(1 / _STOP_EVERY_S))

    async with beside(stop_and_go()):
        yield


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("cpu", ("cpu_starvation",), starve),
        Fault("stop", ("engine_stall",), stop_at_random),
        Fault("memory", ("memory_pressure",), squeeze_memory),
        Fault("gpu", ("foreign_process",), load_gpu),
    )
}
"""By name; appends without a budget are the load's own matter."""
