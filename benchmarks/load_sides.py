"""The sides of a load test: which daemon, and what it is asked to do with the chains."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import get_args

import msgspec

from connecting import with_keys
from harness import check_ready
from load_rows import How
from local_daemon import local_daemon
from pingpong_bus.chain import Exactness
from pingpong_bus.errors import ConfigError, UsageError
from pingpong_bus.messages import StatusReply, SubmitOptions
from pingpong_client import AsyncClient
from progress_bar import tell_stage
from token_times import TokenTimes

HOWS: tuple[How, ...] = get_args(How)
_DECODE_FIRST = re.compile(r"^\[decode_first\].*\n(?:(?!\[).*\n?)*", re.MULTILINE)


class SideSpec(msgspec.Struct, frozen=True):
    """A side as the command line names it: ``NAME=PLACE:HOW``, or ``NAME=HOW`` for the usual daemon."""

    name: str
    place: Path | None
    """A daemon's socket or folder, or a configuration (.toml) to start one with."""
    how: How

    @classmethod
    def parse(cls, text: str) -> SideSpec:
        """Read one.

        Raises:
            UsageError: it is none.
        """
        name, equals, rest = text.partition("=")
        place, _, word = rest.rpartition(":")
        hows = [how for how in HOWS if how == word]
        if not (name and equals and hows):
            raise UsageError(
                f"--side: {text!r} is not NAME=PLACE:HOW.",
                hint=f"Such as ours=examples/cpu.toml:auto; HOW is one of {', '.join(HOWS)}.",
            )
        return cls(name, Path(place) if place else None, hows[0])

    @property
    def stock(self) -> bool:
        """Whether a daemon that is started for it is to run vLLM's own scheduler."""
        return self.how == "round-robin"


class Side(msgspec.Struct, frozen=True):
    """A side whose daemon serves."""

    spec: SideSpec
    client: AsyncClient
    status: StatusReply
    times: TokenTimes

    @property
    def groups(self) -> list[str]:
        """Names of the daemon's groups, in its order."""
        return [worker.name for worker in self.status.workers]

    @property
    def decode_first(self) -> bool:
        """Whether engines run the decode-first scheduler."""
        return any(worker.limits is not None and worker.limits.decode_first for worker in self.status.workers)

    def options(self, number: int, exactness: Exactness, patience_s: float) -> SubmitOptions:
        """How the chain of this number is submitted."""
        if self.spec.how == "round-robin":
            group = self.groups[number % len(self.groups)]
            return SubmitOptions(mode="serial", group=group, exactness=exactness, deadline_s=patience_s)
        return SubmitOptions(mode=self.spec.how, exactness=exactness, deadline_s=patience_s)


def stock_config(text: str) -> str:
    """A configuration with vLLM's own scheduler and the default level that it allows."""
    return f"{with_keys(_DECODE_FIRST.sub('', text), {'exactness': 'fast'})}\n[decode_first]\nenabled = false\n"


@asynccontextmanager
async def opened(specs: Sequence[SideSpec], usual: Path | None, folder: Path) -> AsyncIterator[list[Side]]:
    """The sides, once all their daemons serve; those started here are stopped at the end.

    Sides that name the same running daemon, or configuration and scheduler, share it.

    Args:
        usual: what sides without a place mean: like a place; None: the daemon's usual folder.
        folder: for changed configurations.

    Raises:
        ConfigError: a configuration cannot be read. DaemonUnavailable: a daemon does not serve.
    """
    sides: list[Side] = []
    known: dict[tuple[Path | None, bool], Side] = {}
    async with AsyncExitStack() as stack:
        for spec in specs:
            place = spec.place or usual
            started = place is not None and place.suffix == ".toml"
            key = (place, started and spec.stock)
            if key in known:
                sides.append(msgspec.structs.replace(known[key], spec=spec))
                continue
            if place is not None and started:
                config = _config(place, folder, stock=spec.stock)
                where: Path | None = await stack.enter_async_context(local_daemon(config, on_event=tell_stage))
            else:
                where = place
            client = await stack.enter_async_context(AsyncClient(where))
            status = await client.status()
            check_ready(status)
            times = await stack.enter_async_context(TokenTimes(client.socket.parent))
            known[key] = Side(spec, client, status, times)
            sides.append(known[key])
        yield sides


def _config(path: Path, folder: Path, *, stock: bool) -> Path:
    if not stock:
        return path
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    changed = folder / f"stock-{path.name}"
    changed.write_text(stock_config(text), encoding="utf-8")
    return changed
