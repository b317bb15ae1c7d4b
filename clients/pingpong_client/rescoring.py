"""How near two tokens were to each other where two runs part: the engine is asked anew."""

from __future__ import annotations

import msgspec

from pingpong_bus.errors import DaemonUnavailable, Overloaded, PingpongError
from pingpong_bus.messages import AgentResult, ChainResult
from pingpong_client.certificate import Difference, RunCertificate
from pingpong_client.client import AsyncClient


async def with_gaps(
    client: AsyncClient, run: RunCertificate, serial: ChainResult, read_ahead: ChainResult
) -> RunCertificate:
    """The certificate of a pair of runs, with the logit gap at the first difference of every agent.

    Args:
        serial: what was compared, with prompt ids.
        read_ahead: likewise.

    Raises:
        DaemonUnavailable: the daemon has gone.
    """
    agents = []
    for certificate, one, other in zip(run.agents, serial.agents, read_ahead.agents, strict=True):
        if certificate.difference is not None:
            found = await _with_gap(client, certificate.difference, one, other, serial.grid)
            certificate = msgspec.structs.replace(certificate, difference=found)
        agents.append(certificate)
    return msgspec.structs.replace(run, agents=agents)


async def _with_gap(
    client: AsyncClient, difference: Difference, serial: AgentResult, read_ahead: AgentResult, grid: int | None
) -> Difference:
    asked = question(difference, serial, read_ahead)
    if isinstance(asked, str):
        return msgspec.structs.replace(difference, no_gap=asked)
    ids, tokens = asked
    try:
        ours, theirs = await client.score(ids, tokens, grid=grid, model=serial.model)
    except PingpongError as error:
        if isinstance(error, DaemonUnavailable) and not isinstance(error, Overloaded):
            raise
        return msgspec.structs.replace(difference, no_gap=error.message.rstrip("."))
    if ours is None or theirs is None:
        return msgspec.structs.replace(difference, no_gap="the engine finds a token too unlikely to say how much")
    return msgspec.structs.replace(difference, logit_gap=ours - theirs)


def question(difference: Difference, serial: AgentResult, read_ahead: AgentResult) -> tuple[list[int], list[int]] | str:
    """The ids up to where two outputs part and the two tokens that may follow, or why there is nothing to ask.

    An output that ends there has its stop token for one, which stands behind it and not in it.
    """
    if difference.where == "text":
        return "no engine wrote it: it is a step's"
    if difference.where in ("prompt", "prompt digest"):
        return "the prompts differ, so the outputs have no common prefix"
    if difference.where == "finish reason":
        return "the tokens are equal"
    if serial.prompt_ids is None:
        return "the daemon does not know the ids of this prompt, which was joined as text"
    at = len(serial.output_ids) if difference.index is None else difference.index
    tokens = [_token(result, at) for result in (serial, read_ahead)]
    known = [token for token in tokens if token is not None]
    if len(known) < 2:
        return "an output ends there without a token of its own"
    return serial.prompt_ids + serial.output_ids[:at], known


def _token(result: AgentResult, at: int) -> int | None:
    return result.output_ids[at] if at < len(result.output_ids) else result.stop_token
