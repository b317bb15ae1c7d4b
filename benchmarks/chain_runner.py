"""Runs chains on one daemon, one at a time, each with the prefix caches in a known state."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from connecting import made_with
from pingpong_bus.chain import Chain, Exactness, upstreams
from pingpong_bus.messages import SessionKind, StatusReply, SubmitOptions
from pingpong_client import AsyncClient
from presend import PresendAgent, presend_agents, presend_ids, run_presend
from profiles import filling_chain
from runs import DeviceGaps, Run
from token_times import LogTimes, TokenTimes
from ways import Way

Cache = Literal["cold", "warm"]


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs of a measurement have in common; see the fields of `Run`."""

    cache: Cache = "cold"
    session: SessionKind | None = None
    append_tokens: int | None = None
    forced_lengths: bool = False
    seed: int | None = None
    temperature: float = 0.0
    suite: str = ""
    cell: str = ""


class ChainRunner:
    """Runs chains on one daemon, and listens to when their tokens come; an async context manager.

    Args:
        client: connected to it.
        status: of the daemon, all of it ready.
        daemon: what its rows are called, where there are several.
        origin: of the provenance, over what is known anyway.

    Attributes:
        times: when tokens come, of all groups.
    """

    def __init__(
        self,
        client: AsyncClient,
        status: StatusReply,
        *,
        daemon: str = "",
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self._client = client
        self._daemon = daemon
        self._devices = {worker.name: worker.devices for worker in status.workers}
        self._provenance = made_with(status) | dict(origin or {})
        self.times = TokenTimes(client.socket.parent)
        self._presend: tuple[Chain, list[PresendAgent]] | None = None
        """The last chain that was taken apart for presend."""

    async def __aenter__(self) -> Self:
        await self.times.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.times.__aexit__(kind, error, trace)

    @property
    def groups(self) -> list[str]:
        """The daemon's groups, in its order."""
        return list(self._devices)

    async def presend_agents(self, chain: Chain) -> list[PresendAgent]:
        """The chain taken apart for presend; one of text is run once for it.

        Raises:
            DataError: an agent does not read just the output of the one before, once.
        """
        if self._presend is None or self._presend[0] is not chain:
            if all(agent.prompt_ids for agent in chain.agents):
                found = presend_ids(chain)
            else:
                serial = await self._client.run(chain, None, SubmitOptions(mode="serial"))
                found = presend_agents(chain, await self._client.result(serial.id, prompt_ids=True))
            self._presend = chain, found
        return self._presend[1]

    async def set_caches(self, chain: Chain, cache: Cache, exactness: Exactness | None = None) -> None:
        """Empty the prefix caches, and fill every group's with the chain's static prefixes if they are to be warm."""
        await self._client.reset_caches()
        if cache == "warm":
            filling = filling_chain(chain)
            options = [SubmitOptions(mode="serial", group=group, exactness=exactness) for group in self._devices]
            await asyncio.gather(*(self._client.run(filling, None, some) for some in options))

    async def run(
        self,
        chain: Chain,
        way: Way,
        index: int,
        settings: RunSettings,
        *,
        exactness: Exactness | None = None,
        baseline: str = "",
    ) -> Run:
        """One run, with the caches set for it.

        Args:
            index: of the run; below 0 it is one to warm up.
            exactness: None: the daemon's default.
            baseline: the row that it will be compared with; empty: itself.

        Raises:
            ChainFailed: the chain failed. DataError: presend cannot run this chain.
        """
        presend = await self.presend_agents(chain) if way.mode == "presend" else []
        await self.set_caches(chain, settings.cache, exactness)
        await self.times.take()
        started = time.monotonic()
        if way.mode == "presend":
            groups = [way.group] if way.group else self.groups
            result = await run_presend(self._client, presend, groups, exactness)
            wall_ms = result.e2e_ms or 0.0
        else:
            options = SubmitOptions(
                mode=way.mode,
                group=way.group or None,
                session=settings.session,
                append_tokens=settings.append_tokens,
                exactness=exactness,
            )
            result = await self._client.run(chain, None, options)
            wall_ms = (time.monotonic() - started) * 1e3
        run = Run(
            profile=chain.name,
            mode=way.mode,
            group=way.group,
            daemon=self._daemon,
            suite=settings.suite,
            cell=settings.cell,
            cache=settings.cache,
            index=index,
            warmup=index < 0,
            e2e_ms=result.e2e_ms or 0.0,
            wall_ms=wall_ms,
            result=result,
            max_tokens=[agent.max_tokens for agent in chain.agents],
            reads=[list(upstreams(chain, at)) for at in range(len(chain.agents))],
            session=settings.session or "default",
            append_tokens=settings.append_tokens,
            exactness=result.exactness,
            forced_lengths=settings.forced_lengths,
            seed=settings.seed,
            temperature=settings.temperature,
            gaps=self._by_group(await self.times.take()),
            provenance=self._provenance,
        )
        return msgspec.structs.replace(run, baseline=baseline or run.row)

    def _by_group(self, logs: Sequence[LogTimes]) -> list[DeviceGaps]:
        by_group: dict[str, list[LogTimes]] = defaultdict(list)
        for log in logs:
            by_group[log.group].append(log)
        return [
            DeviceGaps(
                group=group,
                devices=self._devices[group],
                gaps_us=[round(gap * 1e3) for log in by_group[group] for gap in log.gaps_ms],
                missed=sum(log.missed for log in by_group[group]),
            )
            for group in self._devices
            if group in by_group
        ]
