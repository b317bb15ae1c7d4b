"""What the daemon knows of a chain beside its state: prompts, logs, times and texts; and the result made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import msgspec

from pingpong_bus.chain import Agent, Chain
from pingpong_bus.messages import (
    AgentResult,
    AppendEntry,
    ChainResult,
    ChainSummary,
    Literals,
    OutputRead,
    PreparedAgent,
    SubmitOptions,
)
from pingpong_bus.messages import ChainState as ChainStateName
from pingpongd.agent_record import AgentRecord
from pingpongd.chain_state import ChainState, Phase, Stage, new_chain
from pingpongd.placement import Plan
from pingpongd.shapes import ChainShape, submitted_shape
from pingpongd.stored import AgentOutcome, Job, LiveChain

AgentStateName = Literal["waiting", "reading", "writing", "finished", "failed", "cancelled"]

_AGENT_STATES: dict[Phase, AgentStateName] = {
    Phase.WAITING: "waiting",
    Phase.DISPATCHED: "waiting",
    Phase.READING: "reading",
    Phase.WRITING: "writing",
    Phase.STEPPING: "writing",
    Phase.INTERRUPTED: "writing",
    Phase.RESUMING: "writing",
    Phase.YIELDING: "waiting",
    Phase.WRITTEN: "finished",
    Phase.DONE: "finished",
    Phase.FAILED: "failed",
    Phase.CANCELLED: "cancelled",
}
_CHAIN_STATES: dict[Stage, ChainStateName] = {
    Stage.QUEUED: "queued",
    Stage.RUNNING: "running",
    Stage.FAILING: "running",
    Stage.CANCELLING: "running",
    Stage.FINISHED: "finished",
    Stage.FAILED: "failed",
    Stage.CANCELLED: "cancelled",
}


def kind_of(agent: Agent) -> Literal["agent", "extract", "call"]:
    """What users see an entry of `agents` as."""
    if agent.extract is not None:
        return "extract"
    return "call" if agent.call is not None else "agent"


def steps_of(chain: Chain) -> list[int]:
    """Which of a chain's agents are steps between agents."""
    return [index for index, agent in enumerate(chain.agents) if agent.is_step]


@dataclass(eq=False)
class ChainRecord:
    """A chain from its acceptance until its result is dropped."""

    id: str
    job: Job
    shape: ChainShape
    submitted_ns: int
    """CLOCK_MONOTONIC; of a chain from before the daemon's start, what it would have been."""
    state: ChainState
    agents: list[AgentRecord]
    plan: Plan | None = None
    waits_for: str = ""
    """What keeps a chain from running that was accepted, in words: another model than the engines have, for one."""
    recovered: bool = False
    """It was accepted before the daemon's start, and had begun to run."""
    rerouted: bool = False
    """An agent of it runs elsewhere than planned, for its group's tokens came late."""
    started_ns: int = 0
    """When it left the queue; 0 while it waits."""
    devices: dict[str, list[str]] = field(default_factory=dict)
    """Of the workers that its hops ran on: GPUs by UUID, cores as "cpu:0"."""

    @classmethod
    def accepted(
        cls, chain_id: str, job: Job, upstreams: tuple[tuple[int, ...], ...], submitted_ns: int
    ) -> ChainRecord:
        """A chain that has just been accepted."""
        shape = submitted_shape(job.chain, job.options, upstreams, job.prepared, job.exact.grid)
        state = new_chain(upstreams, job.chain.start, steps=steps_of(job.chain))
        return cls(chain_id, job, shape, submitted_ns, state, [AgentRecord() for _ in job.chain.agents])

    @classmethod
    def restored(cls, live: LiveChain, upstreams: tuple[tuple[int, ...], ...], submitted_ns: int) -> ChainRecord:
        """A chain that an earlier life of the daemon has accepted; it goes on from its finished agents."""
        record = cls.accepted(live.id, live.job, upstreams, submitted_ns)
        kept: list[int] = []
        for index, reads in enumerate(upstreams):
            outcome = live.outcomes.get(index)
            # What it was made from may have been lost: then it is void as well.
            if outcome is not None and all(at in kept for at in reads):
                kept.append(index)
                record.agents[index] = agent = AgentRecord.restored(outcome, submitted_ns)
                if record.is_step(index):
                    agent.output_ids = list(map(ord, outcome.text))
                record.devices |= outcome.devices
            else:
                agent = record.agents[index]
                agent.attempt = live.attempt
                if live.started and live.job.chain.agents[index].call is not None and all(at in kept for at in reads):
                    agent.may_have_run = True
        record.state = new_chain(upstreams, live.job.chain.start, kept, steps_of(live.job.chain))
        record.recovered = live.started
        record.started_ns = min((hop.started_ns for agent in record.agents for hop in agent.entries), default=0)
        return record

    @property
    def chain(self) -> Chain:
        """As submitted, with a seed for every agent that samples."""
        return self.job.chain

    @property
    def inputs(self) -> dict[str, str]:
        """Values of the chain's inputs."""
        return self.job.inputs

    @property
    def options(self) -> SubmitOptions:
        """How it is run."""
        return self.job.options

    @property
    def prepared(self) -> list[PreparedAgent]:
        """Its prompts, per agent."""
        return self.job.prepared

    @property
    def number(self) -> int:
        """Its place in the order of acceptance, from 0."""
        return self.job.number - 1

    @property
    def deadline_ns(self) -> int | None:
        """When it is of no use any more."""
        seconds = self.options.deadline_s
        return None if seconds is None else self.submitted_ns + int(seconds * 1e9)

    def is_step(self, index: int) -> bool:
        """Whether it is a step between agents."""
        return self.chain.agents[index].is_step

    def outcome(self, index: int) -> AgentOutcome:
        """What the store keeps of an agent that has finished."""
        outcome = self.agents[index].outcome(self.submitted_ns, self.devices)
        # A step's code points are its text, once more.
        return msgspec.structs.replace(outcome, output_ids=[]) if self.is_step(index) else outcome

    @property
    def state_name(self) -> ChainStateName:
        """The chain's state as users see it."""
        return _CHAIN_STATES[self.state.stage]

    @property
    def e2e_ms(self) -> float | None:
        """Submission to last token; None unless the chain has finished."""
        if self.state.stage is not Stage.FINISHED:
            return None
        return self.since_submission_ms(max(agent.last_token_ns for agent in self.agents))

    def since_submission_ms(self, at_ns: int) -> float:
        """Milliseconds from the chain's submission to `at_ns`."""
        return round((at_ns - self.submitted_ns) / 1e6, 3)

    def ready_ns(self, index: int) -> int:
        """When nothing but the agent's own work was left to wait for: its submission or its last upstream token."""
        return max([self.submitted_ns, *(self.agents[at].last_token_ns for at in self.state.upstreams[index])])

    def ttft_ms(self, index: int) -> float | None:
        """First token minus the later of submission and the last upstream token; None until both are known."""
        return self._since_ready_ms(index, self.agents[index].first_token_ns)

    def total_ms(self, index: int) -> float | None:
        """Last token minus the same; None until both are known."""
        return self._since_ready_ms(index, self.agents[index].last_token_ns)

    def _since_ready_ms(self, index: int, at_ns: int) -> float | None:
        # A downstream's report can come before its upstream's last: they are from different workers.
        known = at_ns and all(self.agents[at].last_token_ns for at in self.state.upstreams[index])
        return round((at_ns - self.ready_ns(index)) / 1e6, 3) if known else None

    def prompt_ids(self, index: int) -> list[int] | None:
        """The prompt's ids, put together from its segments and the outputs.

        None where they are not known: a prompt joined as text, or one that an upstream is still writing; and of a step.
        """
        prompt = self.prepared[index]
        if (
            prompt.joined
            or prompt.text
            or self.is_step(index)
            or any(self.agents[at].finish_reason is None for at in self.state.upstreams[index])
        ):
            return None
        ids: list[int] = []
        for segment in prompt.segments:
            ids += segment.ids if isinstance(segment, Literals) else self.agents[segment.agent].output_ids
        return ids

    def result(self, *, prompt_ids: bool = False) -> ChainResult:
        """Everything a user may know of the chain now."""
        return ChainResult(
            id=self.id,
            name=self.chain.name,
            state=self.state_name,
            placement=self.plan.placement if self.plan else None,
            e2e_ms=self.e2e_ms,
            agents=[self._agent_result(index, prompt_ids=prompt_ids) for index in range(len(self.agents))],
            error=self.state.error,
            why=self._why(),
            resumed=self.recovered or any(agent.resumed for agent in self.agents),
            exactness=self.job.exact.level,
            grid=self.job.exact.grid,
            predictions=list(self.plan.predictions) if self.plan else [],
            predicted_ms=self.plan.predicted.e2e_ms if self.plan and self.plan.predicted else None,
            submitted_at=datetime.fromtimestamp(self.job.submitted_at, UTC).isoformat(timespec="milliseconds"),
            started_ms=self.since_submission_ms(self.started_ns) if self.started_ns else None,
            devices=dict(self.devices),
        )

    def summary(self, now_ns: int) -> ChainSummary:
        """A line of `pingpong-client list`."""
        models = [(at, spec) for at, spec in enumerate(self.chain.agents) if not spec.is_step]
        written = [len(self.agents[at].output_ids) for at, _ in models]
        most = [
            tokens if self.agents[at].finish_reason is not None else spec.max_tokens
            for tokens, (at, spec) in zip(written, models, strict=True)
        ]
        active = self._active()
        return ChainSummary(
            id=self.id,
            name=self.chain.name,
            state=self.state_name,
            placement=self.plan.placement if self.plan else None,
            agents=len(self.agents),
            finished_agents=sum(_AGENT_STATES[phase] == "finished" for phase in self.state.phases),
            age_s=round((now_ns - self.submitted_ns) / 1e9, 1),
            e2e_ms=self.e2e_ms,
            exactness=self.job.exact.level,
            why=self.waits_for if self.state.stage is Stage.QUEUED else self._held_for(),
            output_tokens=sum(written),
            max_output_tokens=sum(most),
            agent=self.chain.agents[active].name if active is not None else "",
            worker=self.agents[active].worker if active is not None else "",
        )

    def _active(self) -> int | None:
        """The agent that people would say the chain is at: the first that writes, else the first that reads."""
        states = [_AGENT_STATES[phase] for phase in self.state.phases]
        return next((states.index(state) for state in ("writing", "reading") if state in states), None)

    def _why(self) -> str:
        """Of a chain that runs, why it was placed as it is, and what keeps an agent of it waiting."""
        if self.plan is None:
            return self.waits_for
        held = self._held_for()
        return f"{self.plan.why}; {held}" if held else self.plan.why

    def _held_for(self) -> str:
        """What the first of the agents that are held waits for."""
        for spec, agent in zip(self.chain.agents, self.agents, strict=True):
            if agent.waits_for:
                return f'agent "{spec.name}" waits for {agent.waits_for}'
        return ""

    def _agent_result(self, index: int, *, prompt_ids: bool) -> AgentResult:
        agent, spec = self.agents[index], self.chain.agents[index]

        def moment(at_ns: int) -> float | None:
            return self.since_submission_ms(at_ns) if at_ns else None

        return AgentResult(
            name=spec.name,
            kind=kind_of(spec),
            model="" if spec.is_step else spec.model or self.job.engine_model(index),
            state=_AGENT_STATES[self.state.phases[index]],
            text="".join(agent.text),
            output_ids=[] if spec.is_step else agent.output_ids,
            prompt_tokens=agent.prompt_tokens,
            cached_tokens=agent.cached_tokens,
            output_tokens=len(agent.output_ids),
            finish_reason=agent.finish_reason,
            stop_token=agent.stop_token,
            ttft_ms=self.ttft_ms(index),
            total_ms=self.total_ms(index),
            worker=agent.worker,
            session=agent.session,
            appends=[
                AppendEntry(
                    at_ms=self.since_submission_ms(entry.at_ns),
                    tokens=entry.tokens,
                    sent=entry.sent,
                    done_ms=moment(entry.done_ns),
                )
                for entry in agent.appends
            ],
            opened_ms=moment(agent.opened_ns),
            finalized_ms=moment(agent.finalized_ns),
            first_token_ms=moment(agent.first_token_ns),
            last_token_ms=moment(agent.last_token_ns),
            prompt_token_match=agent.prompt_token_match,
            prompt_digest=agent.prompt_digest,
            prompt_ids=self.prompt_ids(index) if prompt_ids else None,
            note=self.prepared[index].note,
            attempt=agent.attempt,
            resumed=agent.resumed,
            seed=spec.seed,
            hops=[hop.entry(self.submitted_ns, len(agent.output_ids)) for hop in agent.entries],
            reads=self._reads(index),
            drafts=agent.drafts,
            seam=agent.seam,
        )

    def _reads(self, index: int) -> list[OutputRead]:
        """Where the outputs stand in an agent's prompt, as far as they are written."""
        found: list[OutputRead] = []
        prompt, at = self.prepared[index], 0
        for segment in prompt.segments:
            if isinstance(segment, Literals):
                at += len(segment.ids)
                continue
            tokens = len(self.agents[segment.agent].output_ids)
            name = self.chain.agents[segment.agent].name
            unknown = prompt.joined or prompt.text or self.is_step(index)
            found.append(OutputRead(agent=name, at=None if unknown else at, tokens=tokens))
            at += tokens
        return found
