"""Chains on `top`'s screen: those that run with how far they have come, then what waits, then what has ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from pingpong_bus.messages import ChainState, ChainSummary
from pingpong_client.sparkline import meter
from pingpong_client.table import clean, milliseconds
from pingpong_client.top_table import Block, Column, heading, row

COLUMNS = (
    Column("chain", 8),
    Column("name", 11, wide=24),
    Column("placement", 9, from_width=76),
    Column("agents", 6, right=True),
    Column("tokens written", 15),
    Column("now at", 8, stretch=True),
    Column("age", 7, right=True),
)
_METER_CELLS = 8
_RANKS: dict[ChainState, int] = {"running": 0, "queued": 1}
_STYLES = {"failed": "red", "cancelled": "yellow", "finished": "dim"}


def chain_blocks(
    chains: Sequence[ChainSummary], width: int, *, ascii_only: bool = False
) -> tuple[Text, list[Block], int]:
    """The heading, a block for each chain, and how many of them are live: those come first, the oldest at the top."""
    live = sorted(
        (chain for chain in chains if chain.state in _RANKS), key=lambda chain: (_RANKS[chain.state], -chain.age_s)
    )
    ended = sorted((chain for chain in chains if chain.state not in _RANKS), key=lambda chain: chain.age_s)
    blocks = [Block([_line(chain, width, ascii_only=ascii_only)]) for chain in [*live, *ended]]
    return heading(COLUMNS, width), blocks, len(live)


def _line(chain: ChainSummary, width: int, *, ascii_only: bool) -> Text:
    line = row(
        COLUMNS,
        {
            "chain": chain.id,
            "name": chain.name,
            "placement": chain.placement or "-",
            "agents": f"{chain.finished_agents}/{chain.agents}",
            "tokens written": _written(chain, ascii_only=ascii_only),
            "now at": _now_at(chain),
            "age": _clock(chain.age_s),
        },
        width,
    )
    if style := _STYLES.get(chain.state):
        line.stylize(style)
    return line


def _clock(seconds: float) -> str:
    """1:40, 2:07:33, or 3 d 04 h."""
    whole = int(seconds)
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600:02} h"
    hours, minutes = whole // 3600, f"{whole % 3600 // 60}:{whole % 60:02}"
    return f"{hours}:{minutes:0>5}" if hours else minutes


def _written(chain: ChainSummary, *, ascii_only: bool) -> str:
    if chain.state not in _RANKS:
        return "" if chain.e2e_ms is None else f"E2E {milliseconds(chain.e2e_ms)} ms"
    if not chain.max_output_tokens:
        return ""
    share = chain.output_tokens / chain.max_output_tokens
    return f"{meter(share, _METER_CELLS, ascii_only=ascii_only)} {chain.output_tokens:,}"


def _now_at(chain: ChainSummary) -> str:
    if chain.state != "running":
        return f"{chain.state}: {chain.why}" if chain.why else chain.state
    if chain.why:
        return chain.why
    at = f" on {chain.worker}" if chain.worker else ""
    return clean(f"{chain.agent}{at}", lines=False) if chain.agent else "running"
