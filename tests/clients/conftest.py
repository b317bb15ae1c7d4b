"""A daemon that only talks, and what reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fake_daemon import FakeDaemon, Link, served
from pingpong_bus.chain import Agent, Chain


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def link(daemon: FakeDaemon) -> Link:
    return Link(daemon)


@pytest.fixture
def chain() -> Chain:
    return Chain(
        name="two",
        agents=[Agent(name="writer", prompt="About {{input.topic}}."), Agent(name="critic", prompt="Read {{writer}}.")],
        inputs={"topic": "tides"},
    )


@pytest.fixture
def chain_file(chain: Chain, tmp_path: Path) -> Path:
    path = tmp_path / "chain.json"
    path.write_bytes(msgspec.json.encode(chain))
    return path


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], object]:
    """Wait for a condition, 20 s at most."""
    return _until


@pytest.fixture
def serving(daemon: FakeDaemon) -> Callable[[Path], object]:
    return lambda path: served(daemon, path)
