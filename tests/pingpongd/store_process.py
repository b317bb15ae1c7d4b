"""Adds and ends chains as fast as it can, and says of each what is on the disk, until somebody kills it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import structlog

from pingpongd.config import StoreConfig
from pingpongd.store import Store
from store_samples import job, outcome, result


async def one_after_another(store: Store) -> None:
    while True:
        number = store.next_number
        chain_id = f"{number:08x}"
        await store.add(chain_id, job(number, f"text of {chain_id}" * (number % 500)))
        sys.stdout.write(f"added {chain_id}\n")
        sys.stdout.flush()
        if number % 3 == 0:
            store.started(chain_id)
            store.agent_finished(chain_id, 0, outcome())
            await store.ended(chain_id, result(chain_id, f"text of {chain_id}"), 5.0)
            sys.stdout.write(f"ended {chain_id}\n")
            sys.stdout.flush()


async def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    store = Store.open(Path(sys.argv[1]), StoreConfig())
    await asyncio.gather(*(one_after_another(store) for _ in range(8)))


asyncio.run(main())
