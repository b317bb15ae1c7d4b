"""A client in a process of its own, to be hit by signals: reads a chain to its end and writes down what it gets.

Started as ``python client_process.py SOCKET OUT submit CHAIN.json KEY`` or ``... attach ID``. OUT gets one JSON object
a line: the chain's id (with `attach`, its snapshot), its events as they come, and its result.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

import msgspec

from pingpong_bus.chain import Chain, parse_chain
from pingpong_bus.messages import SubmitOptions
from pingpong_client import AsyncClient

PING_PONG = SubmitOptions(mode="ping-pong")


async def read(socket: str, out: BinaryIO, *, submit: Chain | None = None, key: str = "", attach: str = "") -> None:
    def tell(kind: str, value: object) -> None:
        out.write(msgspec.json.encode({kind: value}) + b"\n")
        out.flush()

    async with AsyncClient(socket, reconnect_s=60) as client:
        if submit is not None:
            chain = await client.submit(submit, options=PING_PONG, follow=True, key=key)
            tell("chain", chain)
        else:
            snapshot = await client.attach(attach)
            chain = snapshot.id
            tell("snapshot", snapshot)
        async with aclosing(client.follow(chain)) as events:
            async for event in events:
                tell("event", event)
        tell("result", await client.wait(chain))


def main() -> None:
    socket, out, how, what, *key = sys.argv[1:]
    with Path(out).open("ab") as file:
        if how == "submit":
            asyncio.run(read(socket, file, submit=parse_chain(Path(what).read_bytes()), key=key[0]))
        else:
            asyncio.run(read(socket, file, attach=what))


if __name__ == "__main__":
    main()
