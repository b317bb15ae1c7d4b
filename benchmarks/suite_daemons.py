"""The daemons of a suite: all up at the same time, each with a configuration, sockets and a store of its own."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from chain_runner import ChainRunner
from harness import check_ready
from load_rows import How
from load_sides import Side, SideSpec
from local_daemon import DaemonEnded, LogEvent, daemon_process
from pingpong_bus.errors import ConfigError, PingpongError
from pingpong_bus.messages import StatusReply
from pingpong_client import AsyncClient
from suite_plan import DaemonSpec, Suite, as_toml, merged
from token_times import TokenTimes

Say = Callable[[str], None]
WAIT_SHARE = 0.6
"""Of the time to start: so long a daemon waits for those before it, which may hang."""
RECONNECT_S = 5.0
"""A daemon that is gone is waited for so long."""
GIVE_UP_AFTER = 2
"""Ends of an engine after which a group is given up, in place of 5: a run has little time."""


class Daemon(msgspec.Struct, frozen=True):
    """One that serves."""

    name: str
    client: AsyncClient
    status: StatusReply
    runner: ChainRunner
    times: TokenTimes
    origin: dict[str, Any]
    """What its results say of it: the suite's changes of the configuration."""

    def side(self, how: How) -> Side:
        """As a load test wants it."""
        return Side(SideSpec(f"{self.name} {how}", None, how), self.client, self.status, self.times)


def daemon_config(suite: Suite, base: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a daemon of the suite is started with; the instance is named for it."""
    ours = {"instance": f"suite-{name}", "restart": {"give_up_after": GIVE_UP_AFTER}}
    return merged(merged(base, ours), suite.daemons[name].changes)


@asynccontextmanager
async def serving(
    suite: Suite, file: Path, names: Sequence[str], folder: Path, out: Path, start_s: float, say: Say
) -> AsyncIterator[dict[str, Daemon]]:
    """Start daemons, each when those that it comes after serve, and yield those that came up; stop all at the end.

    One that does not come up is told of and left out.

    Args:
        file: of the suite, for its configuration is named from there.
        names: of the daemons, each behind those that it comes after.
        folder: for configurations, sockets and stores.
        out: where their logs are written.
        start_s: how long all may take.

    Raises:
        ConfigError: the configuration cannot be read.
        DaemonEnded: none came up.
    """
    try:
        base = tomllib.loads((file.parent / suite.config).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{suite.config}: {error}.") from None
    stop = asyncio.Event()
    hosts: dict[str, _Host] = {}
    for name in names:
        config = folder / f"{name}.toml"
        config.write_text(as_toml(daemon_config(suite, base, name)), encoding="utf-8")
        before = [hosts[other].settled for other in suite.daemons[name].after if other in hosts]
        delay_s = suite.daemons[name].delay_s
        hosts[name] = _Host(name, config, folder, out, before, delay_s, WAIT_SHARE * start_s, stop, say)
    tasks = {name: asyncio.create_task(host.run()) for name, host in hosts.items()}
    try:
        await _settle(hosts, tasks, start_s, say)
        daemons: dict[str, Daemon] = {}
        async with AsyncExitStack() as stack:
            for host in hosts.values():
                if not host.serves:
                    continue
                try:
                    daemons[host.name] = await _connected(host, suite.daemons[host.name], stack)
                except PingpongError as error:
                    say(f"{host.name} is left out: {error}")
            if not daemons:
                raise DaemonEnded("no daemon of the suite came up.")
            yield daemons
    finally:
        stop.set()
        for name, ended in zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True):
            if isinstance(ended, Exception):
                say(f"{name} failed: {ended!r}")


async def _settle(
    hosts: Mapping[str, _Host], tasks: Mapping[str, asyncio.Task[None]], start_s: float, say: Say
) -> None:
    """Wait until all serve or have failed; what takes too long is stopped, for it would disturb measurements."""
    await asyncio.wait([asyncio.create_task(host.settled.wait()) for host in hosts.values()], timeout=start_s)
    late = [name for name, host in hosts.items() if not host.settled.is_set()]
    for name in late:
        say(f"{name} did not come up in time")
        tasks[name].cancel()
    await asyncio.gather(*(tasks[name] for name in late), return_exceptions=True)


class _Host:
    """Runs one daemon for as long as the suite takes; `settled` once it serves or has failed.

    Args:
        before: set once the daemons are settled that it starts after.
        delay_s: how long it then waits.
        wait_s: how long it waits for them.
        stop: set when the suite has ended.
    """

    def __init__(
        self,
        name: str,
        config: Path,
        folder: Path,
        out: Path,
        before: Sequence[asyncio.Event],
        delay_s: float,
        wait_s: float,
        stop: asyncio.Event,
        say: Say,
    ) -> None:
        self.name = name
        self.sockets = folder / name
        self.settled = asyncio.Event()
        self.serves = False
        self._config = config
        self._state = folder / f"{name}-state"
        self._log = out / f"daemon-{name}.log"
        self._before = before
        self._delay_s = delay_s
        self._wait_s = wait_s
        self._stop = stop
        self._say = say

    async def run(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s if self._before else None):
                for event in self._before:
                    await event.wait()
        except TimeoutError:
            self._say(f"{self.name} waits no longer for those before it")
        await asyncio.sleep(self._delay_s)
        self._say(f"{self.name} starts")
        with self._log.open("ab") as log:

            def keep(event: LogEvent) -> None:
                log.write(msgspec.json.encode(event) + b"\n")
                log.flush()

            try:
                async with daemon_process(self._config, self.sockets, self._state, on_event=keep):
                    self.serves = True
                    self.settled.set()
                    self._say(f"{self.name} serves")
                    await self._stop.wait()
            except PingpongError as error:
                self._say(f"{self.name} did not come up: {error}")
            finally:
                self.settled.set()


async def _connected(host: _Host, spec: DaemonSpec, stack: AsyncExitStack) -> Daemon:
    client = await stack.enter_async_context(AsyncClient(host.sockets, reconnect_s=RECONNECT_S))
    status = await client.status()
    check_ready(status)
    origin = {"configuration": spec.changes}
    runner = await stack.enter_async_context(ChainRunner(client, status, daemon=host.name, origin=origin))
    return Daemon(host.name, client, status, runner, runner.times, origin)
