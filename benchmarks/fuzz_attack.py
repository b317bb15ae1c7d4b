"""One attacker of `fuzz_sockets.py`: sends malformed frames to one socket, from a process of its own.

    python benchmarks/fuzz_attack.py SOCKET KIND FRAMES SEED

KIND is "control", "workers" or "bus". Prints a JSON object: frames sent by kind.
"""

from __future__ import annotations

import json
import socket
import sys
from collections import Counter
from pathlib import Path

import zmq

from fuzz_frames import CLIENT_FRAMES, SUBSCRIPTIONS, WORKER_FRAMES, Frames

FRAMES_PER_CONNECTION = 700
RAW_SHARE = 0.02
"""Of all frames, those that are a whole connection of bytes that are no ZeroMQ."""
_SEND_MS = 60_000
"""A daemon that takes nothing for so long hangs."""
_LONGEST_TOPIC = 2000
_WHOLE = {"control": CLIENT_FRAMES, "workers": WORKER_FRAMES, "bus": SUBSCRIPTIONS}


class Attacker:
    """Attacks one socket."""

    def __init__(self, path: Path, kind: str, seed: int) -> None:
        self.sent: Counter[str] = Counter()
        self._path = path
        self._kind = kind
        self._frames = Frames(seed)
        self._context = zmq.Context()

    def run(self, frames: int) -> None:
        """Send so many frames, over as many connections as that takes."""
        while frames > 0:
            count = min(frames, self._frames.random.randint(1, 2 * FRAMES_PER_CONNECTION))
            raw = max(1, int(count * RAW_SHARE))
            for _ in range(raw):
                self._raw()
            self._connection(count - raw)
            frames -= count
        self._context.term()

    def _connection(self, frames: int) -> None:
        """Some read what is answered, some do not; some leave at once, some first wait until all is sent."""
        random = self._frames.random
        kind = zmq.XSUB if self._kind == "bus" else zmq.DEALER
        with self._context.socket(kind) as peer:
            peer.setsockopt(zmq.SNDTIMEO, _SEND_MS)
            # A publisher cuts off whoever sends it long frames, and then nobody takes what is left.
            peer.setsockopt(zmq.LINGER, 500 if kind == zmq.XSUB else _SEND_MS)
            if kind == zmq.DEALER and random.random() < 0.5:
                peer.setsockopt(zmq.ROUTING_ID, b"\x01" + random.randbytes(random.randint(0, 200)))
            peer.connect(f"ipc://{self._path}")
            reads = random.random() < 0.5
            for _ in range(frames):
                parts = self._frames.message(_WHOLE[self._kind])
                if kind == zmq.XSUB:
                    # Our own socket keeps subscriptions too, and ends this process at a long one.
                    parts = [part[:_LONGEST_TOPIC] for part in parts]
                peer.send_multipart(parts)
                self.sent["multipart" if len(parts) > 1 else "single"] += 1
                while reads and peer.poll(0):
                    peer.recv_multipart()

    def _raw(self) -> None:
        data = self._frames.stream(b"SUB" if self._kind == "bus" else b"DEALER")
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(_SEND_MS / 1000)
            try:
                stream.connect(str(self._path))
                stream.sendall(data)
                if self._frames.random.random() < 0.5:
                    stream.settimeout(0.01)
                    stream.recv(64)
            except (BrokenPipeError, ConnectionResetError):
                self.sent["cut off"] += 1
            except TimeoutError:
                pass  # it waits for more of us
        self.sent["raw"] += 1


def main() -> None:
    path, kind, frames, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    attacker = Attacker(path, kind, seed)
    attacker.run(frames)
    print(json.dumps(attacker.sent))


if __name__ == "__main__":
    main()
