"""Runs pingpongd with workers that are forked, not executed: hundreds of simulated groups on one small machine.

    python benchmarks/forked_workers.py --config many.toml        (flags as those of pingpongd)

The supervisor is the product's, unchanged. So is the worker, but for this:

- It is forked from a process that has imported everything, so that workers share most of their memory.
- The simulated engine's model runs in the worker's event loop (`inline_model.py`) and not in a child process.
- Where `simulated.time_scale` makes model time longer than real time, the worker's own intervals (of text, and of looks
  at logs whose doorbell was lost) are as many times as long: the supervisor gets as many messages as in real time.
- It leaves the cores to the supervisor where both want one, and does not look through /proc for processes of its
  engine, of which there are none: with hundreds of workers on one machine, that look would take most of it.

How a forked worker becomes a child of the supervisor, whose pid the supervisor checks: the fork server forks twice, and
the supervisor is a subreaper, so that the kernel gives it the orphan.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from inline_model import InlineModel
from pingpong_bus import subscriber
from pingpong_worker import answer, heartbeat
from pingpong_worker.config import WorkerConfig
from pingpong_worker.main import read_config
from pingpong_worker.parent_death import die_with_parent
from pingpong_worker.simulated_engine import SimulatedEngine
from pingpong_worker.simulated_prompts import SimulatedPrompts
from pingpong_worker.worker import Parts, Worker
from pingpongd.__main__ import main as pingpongd
from pingpongd.process import WorkerProcess
from pingpongd.worker_spawn import WorkerSpawn

_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 1 << 17
_ADOPTION_S = 10.0
_NICE = 5


class Order(msgspec.Struct):
    """What the supervisor asks of the fork server; the descriptors for input, output and slab come with it."""

    environment: dict[str, str]
    slab_fd: int
    """The number that the worker knows the slab's descriptor by."""


class ForkedProcess(subprocess.Popen[bytes]):
    """A process that somebody else has forked and that is our child all the same."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = os.fdopen(stdin, "wb", 0)
        self.stdout = os.fdopen(stdout, "rb", 0)
        self.stderr = None

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002  it has ended when this is called
        """Reap it."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL it."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The supervisor's end; made before the supervisor has threads or an event loop."""

    def __init__(self) -> None:
        supervisor = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        gc.collect()
        gc.freeze()  # what is never looked at by the collector stays shared
        if os.fork() == 0:
            self._socket.close()
            _serve_forks(theirs, supervisor)
        theirs.close()
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")

    def fork(self, environment: dict[str, str], slab_fd: int) -> ForkedProcess:
        """A worker that waits for its configuration on its standard input."""
        input_theirs, input_ours = os.pipe()
        output_ours, output_theirs = os.pipe()
        order = msgspec.msgpack.encode(Order(environment, slab_fd))
        socket.send_fds(self._socket, [order], [input_theirs, output_theirs, slab_fd])
        os.close(input_theirs)
        os.close(output_theirs)
        pid = int.from_bytes(self._socket.recv(8), "little")
        return ForkedProcess(pid, input_ours, output_ours)


def _serve_forks(orders: socket.socket, supervisor: int) -> None:
    """The fork server's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lives = die_with_parent(supervisor)
    while lives:
        data, descriptors, _, _ = socket.recv_fds(orders, _MOST_BYTES, 3)
        if not data:
            break
        order = msgspec.msgpack.decode(data, type=Order)
        between = os.fork()
        if between == 0:
            if (worker := os.fork()) == 0:
                orders.close()
                _become_worker(order, descriptors, supervisor)
            orders.send(worker.to_bytes(8, "little"))
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def _become_worker(order: Order, descriptors: Sequence[int], supervisor: int) -> None:
    """What an executed worker finds when it starts, and then what it does."""
    os.setpgid(0, 0)
    standard_input, output, slab = descriptors
    for theirs, usual in ((standard_input, 0), (output, 1), (output, 2), (slab, order.slab_fd)):
        os.dup2(theirs, usual)
    for descriptor in set(descriptors) - {order.slab_fd}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order.environment)
    code = 1
    try:
        code = _run_worker(supervisor)
    finally:
        logging.shutdown()
        os._exit(code)


def _run_worker(supervisor: int) -> int:
    with os.fdopen(0, "rb", closefd=False) as told:
        config = read_config(told.read())
    limit = time.monotonic() + _ADOPTION_S
    while os.getppid() != supervisor and time.monotonic() < limit:
        time.sleep(0.001)
    if not die_with_parent(supervisor):
        return 1
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    os.nice(_NICE)
    heartbeat._FAMILY_BEATS = sys.maxsize
    answer.TEXT_INTERVAL_S *= config.simulated.time_scale
    subscriber.SWEEP_SECONDS *= config.simulated.time_scale
    return asyncio.run(_work(config))


async def _work(config: WorkerConfig) -> int:
    worker = Worker(config, parts(config))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    return await worker.run()


def parts(config: WorkerConfig) -> Parts[Any]:
    """A simulated engine with its model in the event loop."""
    return Parts(lambda: None, lambda _: SimulatedEngine(config, InlineModel.start), lambda _: SimulatedPrompts())


def _tell_collections() -> None:
    """Have the log say how long each full collection of garbage held the supervisor up: one event "collected" each."""
    begun = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal begun
        if info["generation"] < 2:
            return
        if phase == "start":
            begun = time.perf_counter()
        else:
            line = {"event": "collected", "ms": round((time.perf_counter() - begun) * 1e3, 3)}
            sys.stderr.write(msgspec.json.encode(line).decode() + "\n")

    gc.callbacks.append(note)


def main() -> int:
    """Run pingpongd; returns its exit code."""
    server = ForkServer()
    _tell_collections()

    class ForkedWorker(WorkerProcess):
        """A worker from the fork server."""

        @staticmethod
        def launch(command: Sequence[str], environment: dict[str, str], fds: Sequence[int]) -> subprocess.Popen[bytes]:  # noqa: ARG004
            return server.fork(environment, fds[0])

    WorkerSpawn.process = ForkedWorker
    return pingpongd()


if __name__ == "__main__":
    sys.exit(main())
