"""What a client of a stock server can do by itself: series, with each agent's static prefix sent ahead.

At an agent's first token the client sends the next agent's prefix with `max_tokens` 1 to the next group, so that its
prefix cache holds it when the whole prompt comes. Tokens of the upstream's output are prefilled only then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from pingpong_bus.chain import Agent, Chain, Exactness, upstreams
from pingpong_bus.errors import DataError
from pingpong_bus.messages import AgentResult, ChainResult, SubmitOptions
from pingpong_client import AsyncClient
from pingpong_client.client import finished


class PresendAgent(msgspec.Struct, frozen=True):
    """An agent as token ids around the upstream's output."""

    agent: Agent
    prefix: list[int]
    """All of the prompt for the first agent."""
    suffix: list[int]

    def request(self, upstream_ids: Sequence[int]) -> Chain:
        """The agent alone, with its whole prompt, as a chain of one."""
        return _single(self.agent, [*self.prefix, *upstream_ids, *self.suffix], self.agent.max_tokens)

    def ahead(self) -> Chain:
        """The request that only fills the prefix cache."""
        return _single(self.agent, self.prefix, 1)


def presend_agents(chain: Chain, serial: ChainResult) -> list[PresendAgent]:
    """Take a chain apart at the upstreams' outputs.

    Args:
        serial: a result of the chain with prompt ids: they show what the prompts are as ids.

    Raises:
        DataError: an agent does not read just the output of the one before, once.
    """
    agents: list[PresendAgent] = []
    for index, (agent, result) in enumerate(zip(chain.agents, serial.agents, strict=True)):
        prompt = result.prompt_ids or []
        if upstreams(chain, index) != ([index - 1] if index else []):
            raise DataError(f"presend wants a simple chain; {agent.name} reads other agents than the one before.")
        output = serial.agents[index - 1].output_ids if index else []
        at = _find(prompt, output) if index else len(prompt)
        if at is None:
            raise DataError(f"presend cannot find the upstream's output in the prompt of {agent.name} just once.")
        agents.append(PresendAgent(agent, prompt[:at], prompt[at + len(output) :]))
    return agents


def presend_ids(chain: Chain) -> list[PresendAgent]:
    """Take a chain of token ids apart at the upstreams' outputs.

    Raises:
        DataError: an agent is not given as ids, or does not read just the output of the one before, once.
    """
    agents: list[PresendAgent] = []
    for index, agent in enumerate(chain.agents):
        parts: list[list[int]] = [[]]
        for item in agent.prompt_ids or []:
            if isinstance(item, int):
                parts[-1].append(item)
            else:
                parts.append([])
        if not agent.prompt_ids or upstreams(chain, index) != ([index - 1] if index else []):
            raise DataError(f"presend wants a simple chain; {agent.name} reads other agents than the one before.")
        if len(parts) != (2 if index else 1):
            raise DataError(f"presend cannot find the upstream's output in the prompt of {agent.name} just once.")
        agents.append(PresendAgent(agent, parts[0], parts[1] if index else []))
    return agents


async def run_presend(
    client: AsyncClient, agents: Sequence[PresendAgent], groups: Sequence[str], exactness: Exactness | None = None
) -> ChainResult:
    """Run the agents in series over the groups in turn, prefixes sent ahead.

    Args:
        exactness: of every request; None: the daemon's default.

    Returns:
        One result, as if it had been a chain; times are since the first submission, by this process's clock, but for
        the ones within a request, which are the daemon's.
    """
    started = time.monotonic()
    requests: list[tuple[str, float]] = []
    sent_ahead: list[asyncio.Task[ChainResult]] = []
    output: list[int] = []
    for index, agent in enumerate(agents):
        submitted_ms = (time.monotonic() - started) * 1e3
        options = SubmitOptions(mode="serial", group=groups[index % len(groups)], exactness=exactness)
        chain_id = await client.submit(agent.request(output), None, options, follow=True)
        requests.append((chain_id, submitted_ms))
        output = []
        async with aclosing(client.follow(chain_id)) as events:
            async for event in events:
                if event.kind == "tokens":
                    output += event.data["ids"]
                elif event.kind == "writing" and index + 1 < len(agents):
                    group = groups[(index + 1) % len(groups)]
                    options = SubmitOptions(mode="serial", group=group, exactness=exactness)
                    sent_ahead.append(asyncio.create_task(client.run(agents[index + 1].ahead(), None, options)))
    ended_ms = (time.monotonic() - started) * 1e3
    await asyncio.gather(*sent_ahead)
    ended = [finished(await client.result(chain_id)) for chain_id, _ in requests]
    results = [result.agents[0] for result in ended]
    return ChainResult(
        id="presend",
        name=agents[0].agent.name,
        state="finished",
        e2e_ms=ended_ms,
        agents=chained(results, [submitted_ms for _, submitted_ms in requests]),
        why="a client's own doing",
        exactness=ended[0].exactness,
        grid=ended[0].grid,
    )


def chained(agents: Sequence[AgentResult], submitted_ms: Sequence[float]) -> list[AgentResult]:
    """Results of requests made one after the other, as those of one chain.

    TTFT and total count from the last token of the agent before, so that what the client needs to take an answer and
    submit the next prompt is in them.

    Args:
        submitted_ms: when each request was made, since the start of the first.
    """
    found: list[AgentResult] = []
    for agent, at in zip(agents, submitted_ms, strict=True):
        found.append(_in_chain(agent, at, found[-1].last_token_ms or 0.0 if found else 0.0))
    return found


def _single(agent: Agent, ids: list[int], max_tokens: int) -> Chain:
    alone = Agent(
        name=agent.name,
        prompt_ids=list(ids),
        max_tokens=max_tokens,
        temperature=agent.temperature,
        top_p=agent.top_p,
        seed=agent.seed,
        stop=agent.stop,
        stop_token_ids=agent.stop_token_ids,
        ignore_eos=agent.ignore_eos,
    )
    return Chain(name=agent.name, agents=[alone])


def _in_chain(agent: AgentResult, submitted_ms: float, ready_ms: float) -> AgentResult:
    def later(moment: float | None, by_ms: float = submitted_ms) -> float | None:
        return None if moment is None else moment + by_ms

    return msgspec.structs.replace(
        agent,
        ttft_ms=later(agent.first_token_ms, submitted_ms - ready_ms),
        total_ms=later(agent.last_token_ms, submitted_ms - ready_ms),
        opened_ms=later(agent.opened_ms),
        finalized_ms=later(agent.finalized_ms),
        first_token_ms=later(agent.first_token_ms),
        last_token_ms=later(agent.last_token_ms),
    )


def _find(prompt: Sequence[int], part: Sequence[int]) -> int | None:
    """Where `part` stands in `prompt`, if it stands there once."""
    size = len(part)
    found = [at for at in range(len(prompt) - size + 1) if list(prompt[at : at + size]) == list(part)]
    return found[0] if size and len(found) == 1 else None
