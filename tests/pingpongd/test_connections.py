"""How many connections there may be, and that the daemon outlives more."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pingpongd.connections import MAX_CONNECTIONS, connection_limit

_SERVER = """
import asyncio, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (250, 4096))
sys.path.insert(0, {tests!r})
from control_desk import open_desk
from pingpongd.connections import raise_descriptor_limit
from pingpongd.logs import set_up_logging

set_up_logging("info", "json")  # which limits it: a line for each connection would fill the pipe that nobody reads

async def serve():
    async with open_desk(Path({folder!r})) as desk:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(desk.control.refused_frames, flush=True)

asyncio.run(serve())
assert raise_descriptor_limit() == 4096
assert raise_descriptor_limit() == 4096
"""


@pytest.mark.parametrize(
    ("descriptors", "connections"),
    [(10, 16), (1024, 512), (65_536, MAX_CONNECTIONS), (resource.RLIM_INFINITY, MAX_CONNECTIONS)],
)
def test_connections_leave_descriptors_for_the_rest(descriptors: int, connections: int) -> None:
    assert connection_limit(descriptors) == connections


def test_more_connections_than_descriptors_are_cut_off_one_by_one() -> None:
    """Without the limit ZeroMQ aborts the process: "Too many open files (src/ipc_listener.cpp)"."""
    with tempfile.TemporaryDirectory(prefix="pp-") as folder:
        script = _SERVER.format(tests=str(Path(__file__).parents[1]), folder=folder)
        with subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            streams = []
            one_users = connection_limit(250) // 2
            try:
                for count in range(500):
                    streams.append(socket.socket(socket.AF_UNIX))
                    streams[-1].settimeout(60)
                    streams[-1].connect(f"{folder}/r/control.sock")
                    streams[-1].recv(1)  # of its greeting
                    if count >= one_users:  # at any load no more are open than the daemon has had time to shut
                        while streams[-1].recv(1000):
                            pass
                process.stdin.write("\n")
                process.stdin.flush()
                assert int(process.stdout.readlines()[-1]) >= 400
            finally:
                for stream in streams:
                    stream.close()
            assert process.wait(60) == 0
