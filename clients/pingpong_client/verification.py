"""Run a chain in series and read ahead, and compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import get_args

import msgspec

from pingpong_bus.chain import Chain, Exactness
from pingpong_bus.errors import PingpongError, UsageError
from pingpong_bus.messages import ChainResult, Mode, SessionKind, StatusReply, SubmitOptions
from pingpong_bus.references import upstreams
from pingpong_client.against import check_same_chain, compare_certificates
from pingpong_client.certificate import Certificate, ReadAheadMode, RunCertificate, chain_digest, compare_runs
from pingpong_client.client import AsyncClient, finished
from pingpong_client.guesses import all_drafts
from pingpong_client.rescoring import with_gaps


async def verify(
    client: AsyncClient,
    chain: Chain,
    inputs: Mapping[str, str] | None = None,
    *,
    runs: int | None = None,
    mode: ReadAheadMode | None = None,
    exactness: Exactness | None = None,
    session: SessionKind | None = None,
    speculate: bool | None = None,
    earlier: Certificate | None = None,
    on_progress: Callable[[int, Mode], None] | None = None,
) -> Certificate:
    """Run the chain in series and read ahead, isolated from every cache, and certify what came of it.

    Args:
        runs: pairs of runs; None: as many as `earlier` has, else one.
        mode: what is compared with the serial runs; None: that of `earlier`, else "ping-pong" where an agent and the
            one that it reads have two device groups, and "overlap" where they have one whose engine can.
        exactness: None: that of `earlier`, else what the chain names, else "grid", or with "overlap", which a grid
            rules out, "invariant", and where tokens are to be guessed, which both rule out, "fast".
        session: None: that of `earlier`, else the daemon's choice.
        speculate: whether tokens are guessed in the runs that read ahead, of agents and chains that do not say; None:
            as it was for `earlier`, else the daemon's choice. The serial runs never guess.
        earlier: a certificate to check against; sampled agents get its seeds.
        on_progress: is told the number of the run, from 1, and the mode, before each.

    Raises:
        ChainError: the chain is off.
        DataError: `earlier` is of another chain.
        UsageError: the daemon cannot read ahead in this mode, or cannot keep to this level, and why.
        ChainFailed: a run did not finish.
        DaemonUnavailable, Overloaded: the daemon is not there, or refuses a mode.
        PingpongError: the daemon does not say which seed it gave to an agent without one.
    """
    digest = chain_digest(chain, inputs)
    if earlier is not None:
        check_same_chain(earlier, chain, inputs)
        mode = mode or earlier.mode
        exactness = exactness or earlier.exactness
        runs = runs or earlier.pairs
        session = session or _session_of(earlier)
        if speculate is None and earlier.guessed is not None:
            speculate = True
    status = await client.status()
    mode = choose_mode(status, mode, chain)
    asked = asks_to_guess(chain, speculate)
    level = exactness or chain.exactness or default_level(status, mode, guesses=asked)
    pairs: list[RunCertificate] = []
    results: list[ChainResult] = []
    for run in range(1, (runs or 1) + 1):
        seeded = chain if earlier is None else _seeded_like(chain, earlier.runs[(run - 1) % len(earlier.runs)])
        pair: list[ChainResult] = []
        modes: tuple[Mode, Mode] = ("serial", mode)
        for each in modes:
            if on_progress is not None:
                on_progress(run, each)
            guess = None if each == "serial" else speculate
            options = SubmitOptions(mode=each, isolate=True, session=session, exactness=level, speculate=guess)
            ended = await client.run(without_guesses(seeded) if each == "serial" else seeded, inputs, options)
            pair.append(finished(await client.result(ended.id, prompt_ids=True)))
            seeded = with_seeds(seeded, pair[0])
        serial, read_ahead = pair
        pairs.append(await with_gaps(client, compare_runs(serial, read_ahead), serial, read_ahead))
        results += pair
    certificate = _certificate(chain, digest, mode, await client.status(), pairs, results)
    if earlier is None:
        return certificate
    return msgspec.structs.replace(certificate, against=compare_certificates(earlier, certificate))


def choose_mode(status: StatusReply, asked: ReadAheadMode | None, chain: Chain) -> ReadAheadMode:
    """The mode to compare with series: where nobody names one, ping-pong if the chain's models have the groups for it.

    Raises:
        UsageError: the daemon's groups do not allow it.
    """
    names = [worker.name for worker in status.workers]
    limits = [worker.limits for worker in status.workers if worker.limits is not None]
    overlaps = any(limit.overlap for limit in limits)
    if asked == "overlap" or (asked is None and overlaps and (len(names) == 1 or _neighbours_share(status, chain))):
        if limits and not overlaps:
            raise UsageError(
                "no engine of the daemon holds appends to a budget beside decodes, which overlap takes.",
                field="mode",
                hint="Leave `[decode_first]` enabled, and vLLM's `scheduler_cls` to pingpongd; or set vLLM's "
                "`long_prefill_token_threshold`.",
            )
        return "overlap"
    if len(names) < 2:
        cannot = "" if asked else ", whose engine cannot overlap either"
        raise UsageError(
            "verify reads ahead on a second device group, and the daemon has "
            f"{', '.join(names) or 'none'} alone{cannot}.",
            field="mode",
            hint="Configure another group.",
        )
    return "ping-pong"


def _neighbours_share(status: StatusReply, chain: Chain) -> bool:
    """Whether an agent and the one that it reads last are of one model, and one group alone serves that."""
    groups = Counter(worker.model for worker in status.workers)
    models = [agent.model if agent.model in groups else "" for agent in chain.agents]  # the default one has a name, too
    sources: list[set[int]] = []
    for index, agent in enumerate(chain.agents):
        found = set[int]()
        for at in upstreams(chain, index):
            found |= sources[at] if chain.agents[at].is_step else {at}
        sources.append(found)
        if found and not agent.is_step and models[index] == models[max(found)] and groups[models[index] or ""] < 2:
            return True
    return False


def asks_to_guess(chain: Chain, speculate: bool | None) -> bool:
    """Whether anybody asks that tokens of some agent be guessed, whatever the daemon does of its own accord."""
    said = [
        next((one for one in (agent.speculate, chain.speculate, speculate) if one is not None), False)
        for agent in chain.agents
        if not agent.is_step
    ]
    return any(said)


def without_guesses(chain: Chain) -> Chain:
    """The chain with no token guessed."""
    agents = [
        agent if agent.speculate is None else msgspec.structs.replace(agent, speculate=None) for agent in chain.agents
    ]
    return msgspec.structs.replace(chain, agents=agents, speculate=False)


def default_level(status: StatusReply, mode: ReadAheadMode, *, guesses: bool = False) -> Exactness:
    """The level that is to be proved where nobody names one.

    Args:
        status: the daemon's.
        mode: that is compared with series.
        guesses: tokens are to be guessed.

    Raises:
        UsageError: there is none for this mode.
    """
    limits = [worker.limits for worker in status.workers if worker.limits is not None]
    if guesses:  # at "fast" nothing is promised, and the runs are compared all the same
        return "fast"
    if mode == "ping-pong":
        return "grid"
    if not limits or all(limit.batch_invariant for limit in limits):
        return "invariant"
    raise UsageError(
        'agents that overlap share a device, where only "invariant" promises equal tokens, and the engines do not run '
        "batch-invariant kernels.",
        field="exactness",
        hint="Compare with --mode ping-pong on two device groups, configure `batch_invariant = true`, or take "
        "--exactness fast.",
    )


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


def _session_of(earlier: Certificate) -> SessionKind | None:
    """The kind that gives an earlier certificate's kinds again: with streaming input sampled agents have the other."""
    kinds: tuple[SessionKind, ...] = ("streaming-input", "prefix-cache")
    return next((kind for kind in kinds if kind in earlier.sessions), None)


def _seeded_like(chain: Chain, run: RunCertificate) -> Chain:
    """The chain with the seeds of an earlier run of it."""
    agents = [
        msgspec.structs.replace(agent, seed=ran.seed) if agent.temperature > 0 and ran.seed is not None else agent
        for agent, ran in zip(chain.agents, run.agents, strict=True)
    ]
    return msgspec.structs.replace(chain, agents=agents)


def _certificate(
    chain: Chain,
    digest: str,
    mode: ReadAheadMode,
    status: StatusReply,
    pairs: list[RunCertificate],
    results: Sequence[ChainResult],
) -> Certificate:
    limits = [worker.limits for worker in status.workers if worker.limits is not None]
    equal = sum(pair.equal for pair in pairs)
    resumed = sum(pair.resumed for pair in pairs)
    level = min((result.exactness for result in results), key=get_args(Exactness).index)
    no_proof = list(_doubts(level, len(pairs), equal, resumed))
    return Certificate(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        chain=chain.name,
        chain_digest=digest,
        verdict="equal" if equal == len(pairs) else "different",
        proof=not no_proof,
        no_proof=no_proof,
        exactness=level,
        grid=results[0].grid,
        mode=mode,
        pairs=len(pairs),
        equal_pairs=equal,
        daemon=status.version,
        python=status.python,
        engines=_distinct(limit.engine for limit in limits),
        models=_distinct(limit.model for limit in limits),
        dtypes=_distinct(limit.dtype for limit in limits),
        devices=_distinct(limit.device for limit in limits),
        sessions=_distinct(agent.session for result in results for agent in result.agents),
        runs=pairs,
        guessed=all_drafts(agent for result in results for agent in result.agents),
        resumed_pairs=resumed,
    )


def _doubts(level: Exactness, pairs: int, equal: int, resumed: int) -> Iterable[str]:
    """Why runs prove nothing."""
    if equal < pairs:
        yield f"{pairs - equal} of {pairs} runs differ"
    if level == "fast":
        yield 'exactness "fast" promises nothing'
    if resumed:
        yield f"{resumed} of {pairs} runs were cut off and went on"


def _distinct(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
