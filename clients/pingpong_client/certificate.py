"""The proof that reading ahead changed nothing, or where it did: what `verify` writes, and the comparison behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Literal

import msgspec

from pingpong_bus.chain import Chain, Exactness, resolve_inputs
from pingpong_bus.errors import NotEqual
from pingpong_bus.messages import AgentResult, ChainResult, DraftCounts
from pingpong_client.guesses import is_step

CERTIFICATE_VERSION: Literal[2] = 2
"""Of the JSON form; raised by every change that an older reader could misread."""

ReadAheadMode = Literal["ping-pong", "overlap"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing in which two runs of an agent differ."""

    where: Literal["prompt", "output", "stop token", "finish reason", "prompt digest", "text"]
    """"text" of a step: its tokens are code points."""
    index: int | None = None
    """Of the first token that differs, from 0."""
    serial: int | str | None
    """The token there, None past the end."""
    read_ahead: int | str | None
    logit_gap: float | None = None
    """How much higher the engine puts the serial token's logit than the other's, when it is asked anew what follows
    the common prefix; near 0 is a near tie. None: see `no_gap`."""
    no_gap: str = ""
    """Why there is no gap."""


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
    seed: int | None = None
    """That it was sampled with; None where it was not."""
    difference: Difference | None = None
    step: bool = False
    """A step between agents: it has no prompt, and its output is the code points of its text."""


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


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Something in which a certificate differs from an earlier one."""

    what: str
    """A field of `Certificate` or `AgentCertificate`."""
    run: int | None = None
    """From 1; None where it is the same for all."""
    agent: str | None = None
    earlier: str
    now: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify --against` found."""

    made_at: str
    """When the earlier certificate was made."""
    equal: bool
    """Whether nothing has changed."""
    tokens_equal: bool
    """Whether every agent was given and has written the same ids, whatever they were made with."""
    changes: list[Change]


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found, and what the runs were made with: its JSON form, which stays readable.

    Fields may be added within a version.
    """

    certificate: Literal[2] = CERTIFICATE_VERSION
    """The version of this form."""
    made_at: str
    """When the last run had ended, such as 2026-05-04T09:30:00+00:00."""
    chain: str
    """Its name."""
    chain_digest: str
    """Of its agents and inputs: see `chain_digest`."""
    verdict: Literal["equal", "different"]
    proof: bool
    """Whether the runs are equal, at a level that promises it, and none was cut off."""
    no_proof: list[str]
    """Why it is none."""
    exactness: Exactness
    grid: int | None
    """The cell in tokens, at exactness "grid"."""
    mode: ReadAheadMode
    """What was compared with the serial runs."""
    pairs: int
    equal_pairs: int
    daemon: str
    """Version of pingpongd."""
    python: str
    """Its version of Python."""
    engines: list[str]
    """Name and version, such as "vllm 0.32.0"; one entry unless groups differ."""
    models: list[str]
    dtypes: list[str]
    devices: list[str]
    """Kinds of device, such as "NVIDIA H200"."""
    sessions: list[str]
    """Kinds of session that the agents ran with."""
    cache: Literal["isolated"] = "isolated"
    """Every hop had a cache salt of its own: no run found anything of another in a prefix cache."""
    runs: Annotated[list[RunCertificate], msgspec.Meta(min_length=1)]
    guessed: DraftCounts | None = None
    """Tokens that were guessed in the runs that read ahead, all together; None where none were to be. The serial runs
    guess nothing, so that equal runs show that guessing changes nothing either."""
    resumed_pairs: int = 0
    """Pairs that are no proof, whatever the verdict: a worker or the daemon was lost under a run, which went on."""
    against: Comparison | None = None
    """With an earlier certificate, where there was one."""

    def check(self) -> None:
        """Do nothing if all runs are equal, and equal to those of the earlier certificate where there was one.

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
        if self.against is not None and self.against.changes:
            more = len(self.against.changes) - 1
            tokens = "All tokens are equal." if self.against.tokens_equal else "Tokens differ."
            raise NotEqual(
                f"against the certificate of {self.against.made_at}: {describe_change(self.against.changes[0])}"
                f"{f', and {more} more' if more else ''}.",
                hint=tokens,
            )


def digest(ids: Sequence[int]) -> str:
    """SHA-256 over ids as little-endian uint32, in hex: as workers report prompts."""
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in ids)).hexdigest()


def chain_digest(chain: Chain, inputs: Mapping[str, str] | None = None) -> str:
    """SHA-256, in hex, over what decides what the agents are asked: themselves, and the values of the inputs.

    Names, descriptions and levels of chains may change and leave it as it is.

    Raises:
        ChainError: an input is off.
    """
    asked = [chain.agents, resolve_inputs(chain, inputs or {})]
    return hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).hexdigest()


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
    if is_step(serial):
        return _compare_steps(serial, read_ahead)
    difference = _first_difference(serial, read_ahead)
    prompt = serial.prompt_ids
    return AgentCertificate(
        agent=serial.name,
        prompt_tokens=serial.prompt_tokens if prompt is None else len(prompt),
        output_tokens=len(serial.output_ids),
        prompt_digest=serial.prompt_digest if prompt is None else digest(prompt),
        output_digest=digest(serial.output_ids),
        equal=difference is None,
        seed=serial.seed,
        difference=difference,
    )


def _compare_steps(serial: AgentResult, read_ahead: AgentResult) -> AgentCertificate:
    """Of a step there is its text alone."""
    ours, theirs = ([ord(character) for character in result.text] for result in (serial, read_ahead))
    parts = (at for at, (one, other) in enumerate(zip_longest(ours, theirs)) if one != other)
    at = next(parts, None)
    difference = None
    if at is not None:
        one, other = (text[at] if at < len(text) else None for text in (ours, theirs))
        difference = Difference(
            where="text", index=at, serial=one, read_ahead=other, no_gap="no engine wrote it: it is a step's"
        )
    return AgentCertificate(
        agent=serial.name,
        prompt_tokens=0,
        output_tokens=len(ours),
        prompt_digest="",
        output_digest=digest(ours),
        equal=difference is None,
        difference=difference,
        step=True,
    )


def describe(difference: Difference) -> str:
    """A difference in words."""
    if difference.where == "text":
        one, other = (
            "nothing" if point is None else repr(chr(int(point)))
            for point in (difference.serial, difference.read_ahead)
        )
        return f"character {difference.index} of its text is {one} in series and {other} read ahead"
    where = difference.where if difference.index is None else f"{difference.where} token {difference.index}"
    return f"{where} is {_shown(difference.serial)} in series and {_shown(difference.read_ahead)} read ahead"


def describe_change(change: Change) -> str:
    """A change in words."""
    run = "" if change.run is None else f"run {change.run}, "
    agent = "" if change.agent is None else f"agent {change.agent}, "
    what = change.what.replace("_", " ")
    earlier, now = (value[:12] if change.what.endswith("digest") else value for value in (change.earlier, change.now))
    return f"{run}{agent}{what}: {earlier} then, {now} now"


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
