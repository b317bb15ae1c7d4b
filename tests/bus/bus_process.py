"""Runs beside the tests, in a process of its own: `python bus_process.py ROLE FD SLOT GENERATION [ARGUMENT…]`.

kill      write a log and die by SIGKILL before the store of the given number; ids count one by one
publish   write a log as fast as can be, with doorbells and a high-water mark of 1
hammer    read a slot that is written and reused all the time, until a log in it is aborted; says when it has
          seen enough, and in the end how many logs it saw whole, gone and torn
hold      map the slab, say so, and wait to be killed
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import zmq

from pingpong_bus.errors import StreamGone
from pingpong_bus.messages import StreamRef
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import LogState, Slab, unpack_word
from pingpong_bus.token_log import LogView, TokenLogReader, TokenLogWriter

BATCHES = [[10], [11, 12, 13], [14, 15], [16]]


class Deadly:
    """The slab's memory, where the store after `last` others kills the process instead."""

    def __init__(self, memory: memoryview, stores: list[int]) -> None:
        self._memory = memory
        self._stores = stores

    def __getitem__(self, where: int) -> int:
        return self._memory[where]  # type: ignore[no-any-return]

    def __setitem__(self, where: Any, value: Any) -> None:
        if isinstance(where, slice):
            for offset, single in enumerate(value):
                self[where.start + offset] = single
            return
        if self._stores[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._stores[0] -= 1
        self._memory[where] = value


def kill(slab: Slab, stream: StreamRef, last: str) -> None:
    words, ids, stores = slab.words, slab.ids, [int(last)]
    slab.words, slab.ids = Deadly(words, stores), Deadly(ids, stores)  # type: ignore[assignment]
    writer = TokenLogWriter(slab, stream)
    for batch in BATCHES:
        writer.append(batch)
    writer.close("stop", 17)
    slab.words, slab.ids = words, ids


def publish(slab: Slab, stream: StreamRef, endpoint: str, tokens: str) -> None:
    with zmq.Context() as context:
        publisher = Publisher(context, endpoint, high_water_mark=1)
        writer = TokenLogWriter(slab, stream)
        for token in range(int(tokens)):
            publisher.ring(stream, writer.append([token]), [token], LogState.OPEN)
        writer.close("length")
        publisher.close()


def hammer(slab: Slab, stream: StreamRef) -> None:
    at = slab.word_index(stream.slot)
    whole = gone = torn = 0
    said = False
    print("ready", flush=True)  # noqa: T201
    while True:
        generation, state, _ = unpack_word(slab.words[at])
        if state is LogState.ABORTED:
            break
        if not said and (torn or (whole > 10_000 and gone > 10)):
            said = True
            print("enough", flush=True)  # noqa: T201
        try:
            view = TokenLogReader(slab, StreamRef(slot=stream.slot, generation=generation)).read()
        except StreamGone:
            gone += 1
            continue
        if is_whole(view, generation):
            whole += 1
        else:
            torn += 1
    print(whole, gone, torn, flush=True)  # noqa: T201


def is_whole(view: LogView, generation: int) -> bool:
    """Whether each id is what the writer put there: generation and index."""
    if view.ids != list(range(generation * 1000, generation * 1000 + view.count)):
        return False
    return view.state is not LogState.CLOSED or (view.stop_token, view.finish_reason) == (generation, "stop")


def hold(slab: Slab, stream: StreamRef) -> None:
    TokenLogWriter(slab, stream).append([1, 2, 3])
    print("ready", flush=True)  # noqa: T201
    sys.stdin.read()


if __name__ == "__main__":
    role, fd, slot, generation, *arguments = sys.argv[1:]
    with Slab.attach(int(fd)) as attached:
        target = StreamRef(slot=int(slot), generation=int(generation))
        {"kill": kill, "publish": publish, "hammer": hammer, "hold": hold}[role](attached, target, *arguments)
