"""How far a chain has come, as predictions see it."""

from __future__ import annotations

from pingpongd.agent_task import Stage
from pingpongd.chain_record import ChainRecord
from pingpongd.chain_state import Phase
from pingpongd.cost_model import AgentProgress, RunningChain

_STAGES: dict[Phase, Stage] = {
    Phase.WAITING: Stage.WAITING,
    Phase.DISPATCHED: Stage.READING,
    Phase.READING: Stage.READING,
    Phase.WRITING: Stage.WRITING,
    Phase.INTERRUPTED: Stage.WAITING,
    Phase.RESUMING: Stage.READING,
    Phase.YIELDING: Stage.WAITING,
    Phase.STEPPING: Stage.WRITING,
}
"""Of the agents that have work to do; the others' have ended."""


def running(record: ChainRecord) -> RunningChain:
    """A chain that runs, as the cost model sees it."""
    assert record.state.placement is not None  # noqa: S101 - set at its start
    return RunningChain(
        record.shape,
        record.state.placement,
        tuple(
            AgentProgress("", _STAGES.get(phase, Stage.ENDED))
            if record.shape.is_step(index)
            else AgentProgress(
                agent.worker,
                _STAGES.get(phase, Stage.ENDED),
                agent.read,
                len(agent.output_ids),
            )
            for index, (agent, phase) in enumerate(zip(record.agents, record.state.phases, strict=True))
        ),
    )
