"""Run a chain in series and read ahead, and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from pingpong_bus.chain import Chain
from pingpong_bus.errors import PingpongError, UsageError
from pingpong_bus.messages import ChainResult, Mode, SessionKind, StatusReply, SubmitOptions
from pingpong_client.certificate import Certificate, RunCertificate, compare_runs
from pingpong_client.client import AsyncClient, finished


async def verify(
    client: AsyncClient,
    chain: Chain,
    inputs: Mapping[str, str] | None = None,
    *,
    runs: int = 1,
    session: SessionKind | None = None,
    on_progress: Callable[[int, Mode], None] | None = None,
) -> Certificate:
    """Run the chain `runs` times in each mode, isolated from every cache, and certify what came of it.

    Args:
        on_progress: is told the number of the run, from 1, and the mode, before each.

    Raises:
        ChainError: the chain is off.
        UsageError: the daemon has one device group, and reading ahead takes two.
        ChainFailed: a run did not finish.
        DaemonUnavailable, Overloaded: the daemon is not there, or refuses a mode.
        PingpongError: the daemon does not say which seed it gave to an agent without one.
    """
    status = await client.status()
    _check_groups(status)
    pairs: list[RunCertificate] = []
    sessions: list[str | None] = []
    for run in range(1, runs + 1):
        results: list[ChainResult] = []
        modes: tuple[Mode, Mode] = ("serial", "ping-pong")
        seeded = chain
        for mode in modes:
            if on_progress is not None:
                on_progress(run, mode)
            options = SubmitOptions(mode=mode, isolate=True, session=session)
            ended = await client.run(seeded, inputs, options)
            results.append(finished(await client.result(ended.id, prompt_ids=True)))
            seeded = with_seeds(chain, results[0])
        pairs.append(compare_runs(*results))
        sessions += [agent.session for result in results for agent in result.agents]
    return _certificate(chain, status, pairs, sessions)


def with_seeds(chain: Chain, result: ChainResult) -> Chain:
    """The chain with the seeds that the daemon gave to its agents in a run: drawn by chance, and then repeated.

    Raises:
        PingpongError: the result does not say what an agent was sampled with.
    """
    agents = []
    for agent, ran in zip(chain.agents, result.agents, strict=True):
        seed = agent.seed
        if agent.temperature > 0 and seed is None:
            seed = ran.seed
            if seed is None:
                raise PingpongError(
                    f'the daemon does not say which seed it gave to the agent "{agent.name}".',
                    hint="Give it a seed, or temperature 0.",
                )
        agents.append(msgspec.structs.replace(agent, seed=seed))
    return msgspec.structs.replace(chain, agents=agents)


def _check_groups(status: StatusReply) -> None:
    names = [worker.name for worker in status.workers]
    if len(names) < 2:
        raise UsageError(
            f"verify reads ahead on a second device group, and the daemon has {', '.join(names) or 'none'} alone.",
            hint="Configure another group.",
        )


def _certificate(
    chain: Chain, status: StatusReply, pairs: list[RunCertificate], sessions: Iterable[str | None]
) -> Certificate:
    limits = [worker.limits for worker in status.workers if worker.limits is not None]
    equal = sum(pair.equal for pair in pairs)
    verdict: Literal["equal", "different"] = "equal" if equal == len(pairs) else "different"
    return Certificate(
        chain=chain.name,
        verdict=verdict,
        pairs=len(pairs),
        equal_pairs=equal,
        daemon=status.version,
        engines=_distinct(limit.engine for limit in limits),
        models=_distinct(limit.model for limit in limits),
        dtypes=_distinct(limit.dtype for limit in limits),
        sessions=_distinct(sessions),
        runs=pairs,
        resumed_pairs=sum(pair.resumed for pair in pairs),
    )


def _distinct(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
