"""A certificate against an earlier one of the same chain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pingpong_bus.chain import Chain
from pingpong_bus.errors import DataError
from pingpong_client.certificate import AgentCertificate, Certificate, Change, Comparison, chain_digest

_MADE_WITH = (
    "exactness", "grid", "mode", "models", "dtypes", "engines", "devices", "sessions", "cache", "daemon",
    "proof",
)  # fmt: skip
_TOKENS = ("prompt_tokens", "prompt_digest", "output_tokens", "output_digest", "equal")


def compare_certificates(earlier: Certificate, now: Certificate) -> Comparison:
    """Name everything in which a certificate differs from an earlier one of the same chain: see `check_same_chain`.

    Run by run; where there are more runs now, they go through the earlier ones once more.
    """
    tokens = list(_token_changes(earlier, now))
    changes = [*_made_with_changes(earlier, now), *tokens]
    return Comparison(made_at=earlier.made_at, equal=not changes, tokens_equal=not tokens, changes=changes)


def check_same_chain(earlier: Certificate, chain: Chain, inputs: Mapping[str, str] | None = None) -> None:
    """Do nothing if a certificate is of this chain with these inputs.

    Raises:
        ChainError: an input is off.
        DataError: it is of another one.
    """
    names = [agent.name for agent in chain.agents]
    same = all([agent.agent for agent in run.agents] == names for run in earlier.runs)
    if not same or earlier.chain_digest != chain_digest(chain, inputs):
        raise DataError(
            f'the certificate is of another chain, "{earlier.chain}", or of other values of its inputs.',
            field="--against",
            hint="Give the chain file and the inputs that it was made with.",
        )


def _made_with_changes(earlier: Certificate, now: Certificate) -> Iterable[Change]:
    for name in _MADE_WITH:
        before, after = getattr(earlier, name), getattr(now, name)
        if before != after:
            yield Change(what=name, earlier=_shown(before), now=_shown(after))


def _token_changes(earlier: Certificate, now: Certificate) -> Iterable[Change]:
    for at, run in enumerate(now.runs):
        before = earlier.runs[at % len(earlier.runs)]
        for old, new in zip(before.agents, run.agents, strict=True):
            yield from _agent_changes(at + 1, old, new)


def _agent_changes(run: int, old: AgentCertificate, new: AgentCertificate) -> Iterable[Change]:
    for name in _TOKENS:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield Change(what=name, run=run, agent=new.agent, earlier=_shown(before), now=_shown(after))


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "nothing" if value in (None, "") else str(value)
