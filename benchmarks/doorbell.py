"""How long a token takes to another process: our doorbell against a bare `zmq.asyncio` PUB/SUB hop.

    python benchmarks/doorbell.py [--blocks 6] [--samples 1000] [--pace-ms 2]

Two processes, one machine. Doorbell: from before the writer's `append` until the other process holds the view that
`follow()` yields. Bare: from before `await pub.send(frame)` until `await sub.recv()` returns the same frame. Blocks
alternate, so that both see the same noise; the first samples of each block are thrown away. One record is appended to
`benchmarks/results/doorbell.jsonl`. On a machine that does other work the tails are that work's: `chrt -f 10 python …`
keeps it out, and the record says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from pingpong_bus.codec import encode_bell
from pingpong_bus.messages import PROTOCOL_VERSION, StreamRef, TokenChunk
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import LogState, Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_bus.token_log import TokenLogWriter
from provenance import provenance

WARMUP = 50
"""Samples at the start of a block that do not count: subscriptions settle, caches fill."""
RESULTS = Path(__file__).parent / "results" / "doorbell.jsonl"


class Writer:
    """This process: appends and rings, or publishes bare frames, and keeps the times."""

    def __init__(self, folder: str, samples: int, pace_s: float) -> None:
        self.total = WARMUP + samples
        self.pace_s = pace_s
        self.context = zmq.asyncio.Context()
        self.slab = Slab.create(slots=1, capacity=self.total)
        self.publisher = Publisher(self.context, f"ipc://{folder}/bell.sock")
        self.bare = self.context.socket(zmq.PUB)
        self.bare.bind(f"ipc://{folder}/bare.sock")

    async def doorbell_block(self, stream: StreamRef) -> list[int]:
        log, sent = TokenLogWriter(self.slab, stream), []
        for token in range(self.total):
            await self._pause()
            sent.append(time.monotonic_ns())
            self.publisher.ring(stream, log.append([token]), [token], LogState.OPEN)
        log.close("length")
        self.publisher.ring(stream, log.count, [], LogState.CLOSED)
        return sent

    async def bare_block(self) -> list[int]:
        sent = []
        frame = encode_bell(TokenChunk(PROTOCOL_VERSION, 0, 1, 1000, [1000], 1))
        for _ in range(self.total):
            await self._pause()
            sent.append(time.monotonic_ns())
            await self.bare.send(frame)
        return sent

    async def _pause(self) -> None:
        # Uneven, so that it never falls into step with a timer of the other side.
        await asyncio.sleep(self.pace_s * random.uniform(0.5, 1.5))

    def close(self) -> None:
        self.publisher.close()
        self.bare.close(linger=0)
        self.slab.close()
        self.context.term()


async def follower(fd: int, folder: str) -> None:
    """The other process: a block for each line on stdin, answered by the times at which tokens arrived."""
    with zmq.asyncio.Context() as context, Slab.attach(fd) as slab:
        subscriber = Subscriber(context, slab)
        subscriber.connect(f"ipc://{folder}/bell.sock")
        bare = context.socket(zmq.SUB)
        bare.connect(f"ipc://{folder}/bare.sock")
        bare.subscribe(b"")
        await bare.recv()
        _say("connected")
        while line := await asyncio.to_thread(sys.stdin.readline):
            block = json.loads(line)
            if block["kind"] == "bare":
                while await bare.poll(0):  # what the handshake left
                    await bare.recv()
                _say("listening")
                times = []
                for _ in range(block["total"]):
                    await bare.recv()
                    times.append(time.monotonic_ns())
            else:
                _say("listening")
                times = await _follow(subscriber, StreamRef(slot=block["slot"], generation=block["generation"]))
            _say(times)
        await subscriber.close()
        bare.close(linger=0)


async def _follow(subscriber: Subscriber, stream: StreamRef) -> list[int]:
    times: list[int] = []
    async for view in subscriber.follow(stream):
        times += [time.monotonic_ns()] * len(view.ids)
    return times


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


async def measure(blocks: int, samples: int, pace_s: float) -> dict[str, list[list[float]]]:
    """Latencies in µs: for "bare" and "doorbell", a list for each block."""
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(folder, samples, pace_s)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--follower", str(writer.slab.fd), folder),
            pass_fds=[writer.slab.fd],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**26,
        )
        orders, answers = child.stdin, child.stdout
        if orders is None or answers is None:
            raise RuntimeError("the follower has no pipes")
        hello = asyncio.ensure_future(answers.readline())
        while not hello.done():
            await writer.bare.send(b"hello")
            await asyncio.sleep(0.02)
        found: dict[str, list[list[float]]] = {"bare": [], "doorbell": []}
        for kind in ("bare", "doorbell") * blocks:
            stream = writer.slab.allocate()
            order = {"kind": kind, "total": writer.total, "slot": stream.slot, "generation": stream.generation}
            orders.write(json.dumps(order).encode() + b"\n")
            await answers.readline()
            sent = await (writer.bare_block() if kind == "bare" else writer.doorbell_block(stream))
            arrived = json.loads(await answers.readline())
            found[kind].append([(b - a) / 1000 for a, b in zip(sent, arrived, strict=True)][WARMUP:])
            writer.slab.free(stream)
        orders.close()
        await child.wait()
        writer.close()
    return found


def percentiles(samples: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in µs."""
    return {
        "median_us": round(statistics.median(samples), 2),
        "p99_us": round(sorted(samples)[len(samples) * 99 // 100], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=6, help="blocks of either kind")
    parser.add_argument("--samples", type=int, default=1000, help="counted tokens a block")
    parser.add_argument("--pace-ms", type=float, default=2.0, help="mean time between tokens")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--follower", nargs=2, metavar=("FD", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.follower:
        asyncio.run(follower(int(arguments.follower[0]), arguments.follower[1]))
        return
    found = asyncio.run(measure(arguments.blocks, arguments.samples, arguments.pace_ms / 1000))
    whole = {kind: percentiles([sample for block in blocks for sample in block]) for kind, blocks in found.items()}
    ratio = {name: round(whole["doorbell"][name] / whole["bare"][name], 3) for name in ("median_us", "p99_us")}
    record = {
        "benchmark": "doorbell",
        **provenance(),
        "settings": {
            "blocks": arguments.blocks,
            "samples": arguments.samples,
            "pace_ms": arguments.pace_ms,
            "realtime": os.sched_getscheduler(0) != os.SCHED_OTHER,
        },
        **whole,
        "doorbell_over_bare": ratio,
        "blocks": {kind: [percentiles(block) for block in blocks] for kind, blocks in found.items()},
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    for kind in ("bare", "doorbell"):
        print(f"{kind:9} median {whole[kind]['median_us']:7.1f} µs   p99 {whole[kind]['p99_us']:7.1f} µs")
    print(f"doorbell ÷ bare: median {ratio['median_us']:.2f}, p99 {ratio['p99_us']:.2f}")


if __name__ == "__main__":
    main()
