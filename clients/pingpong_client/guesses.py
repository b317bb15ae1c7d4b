"""How guessing tokens and joining texts went, and what steps are, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pingpong_bus.messages import AgentResult, DraftCounts, SeamCounts


def tokens_a_step(drafts: DraftCounts | None) -> float | None:
    """Tokens of an answer that an engine's step gave, in the mean: 1 where no guess was right; None of none."""
    if drafts is None or not drafts.steps:
        return None
    return 1 + drafts.accepted / drafts.steps


def all_drafts(agents: Iterable[AgentResult]) -> DraftCounts | None:
    """The counts of several agents together; None where none was to be guessed for."""
    counts = [agent.drafts for agent in agents if agent.drafts is not None]
    if not counts:
        return None
    return DraftCounts(
        steps=sum(one.steps for one in counts),
        drafted=sum(one.drafted for one in counts),
        accepted=sum(one.accepted for one in counts),
    )


def guessed_words(drafts: DraftCounts) -> str:
    """Counts in words."""
    if not drafts.drafted:
        return "no token was guessed: nothing looked like coming again"
    rate = tokens_a_step(drafts)
    pace = "" if rate is None else f", {rate:.2f} tokens a step"
    return f"{drafts.accepted:,} of {drafts.drafted:,} guessed tokens were right{pace}"


def seam_words(seam: SeamCounts) -> str:
    """What was taken back where a text's ids turned out otherwise, in words; empty where nothing was."""
    if not seam.rollbacks:
        return ""
    times = "once" if seam.rollbacks == 1 else f"{seam.rollbacks:,} times"
    tokens = "1 token" if seam.tokens == 1 else f"{seam.tokens:,} tokens"
    return f"joined as text: taken back {times}, {tokens}"


def is_step(agent: AgentResult) -> bool:
    """Whether it is a step between agents, which no engine runs."""
    return agent.kind != "agent"


def model_label(agent: AgentResult) -> str:
    """The model that ran it: of one that is a folder, the folder's own name."""
    return agent.model.rstrip("/").rpartition("/")[2] if agent.model.startswith("/") else agent.model


def several_models(agents: Iterable[AgentResult]) -> bool:
    """Whether they were run by more than one model."""
    return len({agent.model for agent in agents if agent.model}) > 1
