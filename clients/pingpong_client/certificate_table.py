"""A certificate as a readable table."""

from __future__ import annotations

from collections.abc import Iterable

from pingpong_bus.chain import Exactness
from pingpong_client.certificate import (
    AgentCertificate,
    Certificate,
    Comparison,
    Difference,
    RunCertificate,
    describe,
    describe_change,
)
from pingpong_client.guesses import guessed_words
from pingpong_client.table import clean, format_table, milliseconds, number


def certificate_lines(certificate: Certificate, width: int | None = None) -> list[str]:
    """The certificate as lines.

    Args:
        width: cells of a table's line at most; None: as many as it needs.
    """
    lines = [
        f"chain      {clean(certificate.chain, lines=False)} ({certificate.chain_digest[:12]})",
        f"made       {clean(certificate.made_at, lines=False)}",
        f"exactness  {level_words(certificate.exactness, certificate.grid)}",
        f"compared   serial with {certificate.mode}",
        f"daemon     pingpongd {certificate.daemon}, Python {certificate.python}",
        f"engine     {_listed(certificate.engines)}",
        f"model      {_listed(certificate.models)}",
        f"dtype      {_listed(certificate.dtypes)}",
        f"device     {_listed(certificate.devices)}",
        f"session    {_listed(certificate.sessions)}",
        f"cache      {certificate.cache}",
    ]
    if certificate.guessed is not None:
        lines += [
            f"guessed    read ahead: {guessed_words(certificate.guessed)}; in series none",
            "           the runs in series were known by then: a new input has fewer right guesses, and gains less",
        ]
    for at, run in enumerate(certificate.runs, 1):
        lines += ["", _run_headline(at, run), *_run_lines(run, width)]
    if certificate.against is not None:
        lines += ["", *_against_lines(certificate.against)]
    lines += ["", f"verdict    {certificate.verdict}: {certificate.equal_pairs} of {certificate.pairs} runs equal"]
    lines.append(f"proof      {'yes' if certificate.proof else 'no: ' + '; '.join(certificate.no_proof)}")
    return lines


def level_words(level: Exactness, grid: int | None) -> str:
    """A level of exactness, and the cell where it has one."""
    return f"{level}, cells of {number(grid)} tokens" if grid is not None else level


def _run_headline(at: int, run: RunCertificate) -> str:
    line = f"run {at}: series {milliseconds(run.serial_ms)} ms, read ahead {milliseconds(run.read_ahead_ms)} ms"
    if run.serial_ms and run.read_ahead_ms:
        line += f" ({(run.read_ahead_ms / run.serial_ms - 1) * 100:+.1f} %)"
    return line


def _run_lines(run: RunCertificate, width: int | None) -> list[str]:
    rows = [
        [
            agent.agent,
            "-" if agent.step else number(agent.prompt_tokens),
            agent.prompt_digest[:12] or "-",
            f"{number(agent.output_tokens)}{' chars' if agent.step else ''}",
            agent.output_digest[:12],
            "equal" if agent.equal else "DIFFERENT",
        ]
        for agent in run.agents
    ]
    headers = ["agent", "prompt", "prompt sha256", "output", "output sha256", "verdict"]
    lines = format_table(headers, rows, right=(1, 3), width=width)
    if run.resumed:
        lines.append("a run was cut off and went on: no proof")
    return [*lines, *_difference_lines(run.agents)]


def _difference_lines(agents: Iterable[AgentCertificate]) -> Iterable[str]:
    for agent in agents:
        if agent.difference is not None:
            yield f"{agent.agent}: {describe(agent.difference)}"
            if (gap := _gap(agent.difference)) is not None:
                yield f"{' ' * len(agent.agent)}  {gap}"


def _gap(difference: Difference) -> str | None:
    if difference.logit_gap is not None:
        return f"logit gap, rescored: {difference.logit_gap:+.6f} (the serial token's minus the other's)"
    return clean(f"no logit gap: {difference.no_gap}", lines=False) if difference.no_gap else None


def _against_lines(found: Comparison) -> list[str]:
    tokens = "equal" if found.tokens_equal else "DIFFERENT"
    made = clean(found.made_at, lines=False)
    lines = [f"against    the certificate of {made}: tokens {tokens}, {len(found.changes)} changes in all"]
    return lines + [f"  {clean(describe_change(change), lines=False)}" for change in found.changes]


def _listed(values: list[str]) -> str:
    return clean(", ".join(values), lines=False) or "-"
