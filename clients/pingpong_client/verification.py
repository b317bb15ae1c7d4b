"""Run a chain in series and read ahead, and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from pingpong_bus.chain import Chain
from pingpong_bus.errors import ChainError
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
        ChainError: the chain is off, or samples without a seed, so that no two runs are alike.
        ChainFailed: a run did not finish.
        DaemonUnavailable, Overloaded: the daemon is not there, or refuses a mode.
    """
    check_repeatable(chain)
    status = await client.status()
    pairs: list[RunCertificate] = []
    sessions: list[str | None] = []
    for run in range(1, runs + 1):
        results: list[ChainResult] = []
        modes: tuple[Mode, Mode] = ("serial", "ping-pong")
        for mode in modes:
            if on_progress is not None:
                on_progress(run, mode)
            options = SubmitOptions(mode=mode, isolate=True, session=session)
            ended = await client.run(chain, inputs, options)
            results.append(finished(await client.result(ended.id, prompt_ids=True)))
        pairs.append(compare_runs(*results))
        sessions += [agent.session for result in results for agent in result.agents]
    return _certificate(chain, status, pairs, sessions)


def check_repeatable(chain: Chain) -> None:
    """Refuse a chain whose runs differ by chance.

    Raises:
        ChainError: an agent samples without a seed.
    """
    for index, agent in enumerate(chain.agents):
        if agent.temperature > 0 and agent.seed is None:
            raise ChainError(
                f'the agent "{agent.name}" samples without a seed, so no two runs are alike.',
                field=f"agents[{index}].seed",
                hint="Give it a seed, or temperature 0.",
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
    )


def _distinct(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
