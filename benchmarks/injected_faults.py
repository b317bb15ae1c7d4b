"""Disturbances for engines that decode: each begins, goes on, and ends without a trace of itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
import psutil

from pingpong_bus.messages import JitterCause

STOP_S = 0.3
_STOP_EVERY_S = 1.5
_HOG_STEP = 64 << 20
_HOG_LEAVES = 192 << 20
"""Bytes of the machine that the hog leaves: the kernel then takes the pages of programs and files away."""

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
_HOG = f"""
import mmap, time
open("/proc/self/oom_score_adj", "w").write("1000")  # if the kernel has to kill, it shall be this
def available():
    return next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable")) * 1024
held = []
while True:
    while available() > {_HOG_LEAVES}:
        block = mmap.mmap(-1, {_HOG_STEP})
        for at in range(0, {_HOG_STEP}, 4096):
            block[at] = 1
        held.append(block)
    for block in held:
        for at in range(0, {_HOG_STEP}, 4096):
            block[at] = 1
    time.sleep(0.01)
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


def hog_memory(target: Target) -> AbstractAsyncContextManager[None]:  # noqa: ARG001 - it is the machine's memory
    """A process that takes nearly all of the machine's memory."""
    return _processes([[sys.executable, "-c", _HOG]])


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

    task = asyncio.create_task(stop_and_go())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("cpu", ("cpu_starvation",), starve),
        Fault("stop", ("engine_stall",), stop_at_random),
        Fault("memory", ("memory_pressure",), hog_memory),
        Fault("gpu", ("foreign_process",), load_gpu),
    )
}
"""By name; appends without a budget are the load's own matter."""
