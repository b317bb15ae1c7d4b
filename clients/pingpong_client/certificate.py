"""The proof that reading ahead changed nothing, or where it did: a struct, and the table that shows it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

import msgspec

from pingpong_bus.errors import NotEqual
from pingpong_bus.messages import AgentResult, ChainResult
from pingpong_client.table import clean, format_table, milliseconds, number


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing in which two runs of an agent differ."""

    where: Literal["prompt", "output", "stop token", "finish reason", "prompt digest"]
    index: int | None = None
    """Of the first token that differs, from 0."""
    serial: int | str | None
    """The token there, None past the end."""
    read_ahead: int | str | None


class AgentCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """One agent in one serial and one read-ahead run."""

    agent: str
    prompt_tokens: int
    """Of the serial run, like the digests and `output_tokens`."""
    output_tokens: int
    prompt_digest: str
    """SHA-256 over the ids as little-endian uint32."""
    output_digest: str
    equal: bool
    difference: Difference | None = None


class RunCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of runs."""

    serial_id: str
    read_ahead_id: str
    serial_ms: float | None
    """End to end."""
    read_ahead_ms: float | None
    equal: bool
    agents: list[AgentCertificate]
    resumed: bool = False
    """One of the two was cut off and went on, so the pair is compared like others, and is no proof."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found, and what the runs were made with."""

    chain: str
    verdict: Literal["equal", "different"]
    pairs: int
    equal_pairs: int
    daemon: str
    """Version of pingpongd."""
    engines: list[str]
    """Name and version, such as "vllm 0.32.0"; one entry unless groups differ."""
    models: list[str]
    dtypes: list[str]
    sessions: list[str]
    """Kinds of session that the agents ran with."""
    cache: Literal["isolated"] = "isolated"
    """Every hop had a cache salt of its own: no run found anything of another in a prefix cache."""
    runs: list[RunCertificate]
    resumed_pairs: int = 0
    """Pairs that are no proof, whatever the verdict: a worker or the daemon was lost under a run, which went on."""

    def check(self) -> None:
        """Do nothing if all runs are equal.

        Raises:
            NotEqual: naming the first difference.
        """
        for number_of_run, run in enumerate(self.runs, 1):
            for agent in run.agents:
                if agent.difference is not None:
                    raise NotEqual(
                        f"run {number_of_run}, agent {agent.agent}: {describe(agent.difference)}.",
                        hint=f"{self.equal_pairs} of {self.pairs} runs were equal.",
                    )


def digest(ids: Sequence[int]) -> str:
    """SHA-256 over ids as little-endian uint32, in hex: as workers report prompts."""
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in ids)).hexdigest()


def compare_runs(serial: ChainResult, read_ahead: ChainResult) -> RunCertificate:
    """Compare two finished runs of one chain, agent by agent; both asked for with prompt ids."""
    agents = [compare_agents(one, other) for one, other in zip(serial.agents, read_ahead.agents, strict=True)]
    return RunCertificate(
        serial_id=serial.id,
        read_ahead_id=read_ahead.id,
        serial_ms=serial.e2e_ms,
        read_ahead_ms=read_ahead.e2e_ms,
        equal=all(agent.equal for agent in agents),
        agents=agents,
        resumed=any(
            result.resumed or any(agent.resumed or agent.attempt > 1 for agent in result.agents)
            for result in (serial, read_ahead)
        ),
    )


def compare_agents(serial: AgentResult, read_ahead: AgentResult) -> AgentCertificate:
    """Compare an agent's prompt ids, output ids, stop token and finish reason.

    Where the daemon does not know the ids, since a worker tokenized the joined text, the digests of what the two
    engines were given take their place.
    """
    difference = _first_difference(serial, read_ahead)
    prompt = serial.prompt_ids
    return AgentCertificate(
        agent=serial.name,
        prompt_tokens=serial.prompt_tokens if prompt is None else len(prompt),
        output_tokens=len(serial.output_ids),
        prompt_digest=serial.prompt_digest if prompt is None else digest(prompt),
        output_digest=digest(serial.output_ids),
        equal=difference is None,
        difference=difference,
    )


def describe(difference: Difference) -> str:
    """A difference in words."""
    where = difference.where if difference.index is None else f"{difference.where} token {difference.index}"
    return f"{where} is {_shown(difference.serial)} in series and {_shown(difference.read_ahead)} read ahead"


def certificate_lines(certificate: Certificate, width: int | None = None) -> list[str]:
    """The certificate as a readable table."""
    lines = [
        f"chain      {clean(certificate.chain, lines=False)}",
        f"daemon     pingpongd {certificate.daemon}",
        f"engine     {', '.join(certificate.engines) or '-'}",
        f"model      {', '.join(certificate.models) or '-'}",
        f"dtype      {', '.join(certificate.dtypes) or '-'}",
        f"session    {', '.join(certificate.sessions) or '-'}",
        f"cache      {certificate.cache}",
    ]
    for at, run in enumerate(certificate.runs, 1):
        lines += ["", _run_headline(at, run)]
        rows = [
            [
                agent.agent,
                number(agent.prompt_tokens),
                agent.prompt_digest[:12],
                number(agent.output_tokens),
                agent.output_digest[:12],
                "equal" if agent.equal else "DIFFERENT",
            ]
            for agent in run.agents
        ]
        headers = ["agent", "prompt", "prompt sha256", "output", "output sha256", "verdict"]
        lines += format_table(headers, rows, right=(1, 3), width=width)
        if run.resumed:
            lines.append("a run was cut off and went on: no proof")
        lines += [f"{agent.agent}: {describe(agent.difference)}" for agent in run.agents if agent.difference]
    lines += ["", f"verdict    {certificate.verdict}: {certificate.equal_pairs} of {certificate.pairs} runs equal"]
    if certificate.resumed_pairs:
        lines.append(f"no proof   {certificate.resumed_pairs} of {certificate.pairs} runs were cut off and went on")
    return lines


def _first_difference(serial: AgentResult, read_ahead: AgentResult) -> Difference | None:
    if not _same_digests(serial, read_ahead):
        return Difference(
            where="prompt digest", serial=serial.prompt_digest or None, read_ahead=read_ahead.prompt_digest or None
        )
    pairs: list[tuple[Literal["prompt", "output"], Sequence[int], Sequence[int]]] = [
        ("prompt", serial.prompt_ids or [], read_ahead.prompt_ids or []),
        ("output", serial.output_ids, read_ahead.output_ids),
    ]
    for where, ours, theirs in pairs:
        for index, (one, other) in enumerate(zip_longest(ours, theirs)):
            if one != other:
                return Difference(where=where, index=index, serial=one, read_ahead=other)
    if serial.stop_token != read_ahead.stop_token:
        return Difference(where="stop token", serial=serial.stop_token, read_ahead=read_ahead.stop_token)
    if serial.finish_reason != read_ahead.finish_reason:
        return Difference(where="finish reason", serial=serial.finish_reason, read_ahead=read_ahead.finish_reason)
    return None


def _same_digests(serial: AgentResult, read_ahead: AgentResult) -> bool:
    """Whether what the engines were really given is what the daemon says, or the same where it cannot say."""
    if serial.prompt_ids is None and read_ahead.prompt_ids is None:
        return bool(serial.prompt_digest) and serial.prompt_digest == read_ahead.prompt_digest
    return all(result.prompt_digest == digest(result.prompt_ids or []) for result in (serial, read_ahead))


def _shown(value: int | str | None) -> str:
    return "nothing" if value is None else str(value)


def _run_headline(at: int, run: RunCertificate) -> str:
    line = f"run {at}: series {milliseconds(run.serial_ms)} ms, read ahead {milliseconds(run.read_ahead_ms)} ms"
    if run.serial_ms and run.read_ahead_ms:
        line += f" ({(run.read_ahead_ms / run.serial_ms - 1) * 100:+.1f} %)"
    return line
