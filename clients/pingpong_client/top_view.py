"""`top`'s screen: what is drawn where, and what gives way on a small one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from pingpong_bus.messages import ChainSummary, StatusReply
from pingpong_client.sparkline import meter
from pingpong_client.start_bars import amount
from pingpong_client.table import clean, duration, number
from pingpong_client.top_chains import chain_blocks
from pingpong_client.top_devices import gpu_blocks, host_blocks
from pingpong_client.top_groups import group_blocks, in_trouble
from pingpong_client.top_rates import TokenRates
from pingpong_client.top_table import Block, one_line

NARROWEST = 60
"""Narrower screens get lines of this width, cut at their edge."""
_CHAINS_KEPT = 4
"""Live chains that devices do not push off the screen."""
_METER_CELLS = 16
_STATES = {"ready": "bold green", "degraded": "bold yellow", "starting": "bold cyan", "draining": "bold yellow"}


@dataclass(frozen=True)
class Seen:
    """What a screen is drawn from."""

    status: StatusReply
    chains: Sequence[ChainSummary]
    rates: TokenRates


@dataclass
class _Section:
    title: Text
    blocks: list[Block]
    shown: int = 0
    more: str = ""
    """What the others are, where not all are shown."""
    counted: int | None = None
    """So many blocks, the first, are told of where they are not shown; None: all."""

    @property
    def lines(self) -> list[Text]:
        if not self.shown:
            return []
        left = max(0, (len(self.blocks) if self.counted is None else self.counted) - self.shown)
        lines = [line for block in self.blocks[: self.shown] for line in block.lines]
        more = self.more if left != 1 else self.more.removesuffix("s")
        tail = [Text(f"... and {left:,} more {more}", style="dim")] if left and more else []
        return [Text(), self.title, *lines, *tail]

    def grow(self, room: int, most: int | None = None) -> int:
        """Show as many blocks as fit, and return what is left of the room."""
        before = len(self.lines)
        limit = len(self.blocks) if most is None else min(most, len(self.blocks))
        while self.shown < limit:
            self.shown += 1
            if len(self.lines) - before > room:
                self.shown -= 1
                break
        return room - (len(self.lines) - before)


def frame(seen: Seen, width: int, height: int | None = None, *, note: str = "", ascii_only: bool = False) -> list[Text]:
    """The lines of a screen.

    Args:
        width: of the screen, in cells.
        height: lines that there are; None: as many as it takes, but for ended chains.
        note: what is wrong with what is shown, such as that the daemon is away.
    """
    width = max(width, NARROWEST)
    status = seen.status
    head = _head(seen, width, ascii_only=ascii_only)
    if note:
        head.append(one_line(note, width, "bold red"))
    workers = status.workers
    groups_title, groups = group_blocks(workers, seen.rates, width, ascii_only=ascii_only)
    chains_title, chains, live = chain_blocks(seen.chains, width, ascii_only=ascii_only)
    sections = [
        _Section(groups_title, groups, more="groups"),
        _Section(*gpu_blocks(workers, width), more="GPUs"),
        _Section(*host_blocks(workers, width)),
        _Section(chains_title, chains, more="live chains", counted=live),
    ]
    of_groups, of_gpus, of_host, of_chains = sections
    if height is None:
        of_chains.blocks = chains[:live]
        for section in sections:
            section.shown = len(section.blocks)
    else:
        room = max(height - len(head), 4)
        if sum(len(block.lines) for block in groups) + 2 > room:
            # The sick ones first: they are what is looked for.
            order = sorted(range(len(groups)), key=lambda at: not in_trouble(workers[at]))
            of_groups.blocks = [groups[at] for at in order]
        room = of_groups.grow(room)
        room = of_chains.grow(room, min(live, _CHAINS_KEPT))
        room = of_gpus.grow(room)
        room = of_host.grow(room)
        of_chains.grow(room)
    lines = [line for section in sections for line in section.lines]
    return [*head, *lines] if height is None else [*head, *lines][:height]


def _head(seen: Seen, width: int, *, ascii_only: bool) -> list[Text]:
    """Who this is, what it has to do, and what it does itself."""
    status, counts = seen.status, seen.status.chains
    first = Text(no_wrap=True, overflow="crop")
    first.append(clean(f"pingpongd {status.version} {status.instance}", lines=False) + ": ")
    first.append(status.state, style=_STATES[status.state])
    first.append(f", up {duration(status.uptime_s)}")
    total = seen.rates.total
    rate = "" if total is None else f"{total:,.1f} tokens/s"
    if (gap := width - first.cell_len - len(rate)) > 0:
        first.append(" " * gap + rate)
    first.truncate(width)
    chains = ", ".join(f"{counts.get(state, 0):,} {state}" for state in ("running", "queued"))
    ended = ", ".join(
        f"{counts[state]:,} {state}" for state in ("finished", "failed", "cancelled") if counts.get(state)
    )
    slots = f"slots: {status.slots_total - status.slots_free:,} of {number(status.slots_total)} used"
    second = f"chains: {chains}{f'; {ended}' if ended else ''}; {slots}"
    lines = [first, one_line(second, width)]
    if status.store is not None and status.store.error:
        lines.append(one_line(f"the store cannot be written: {status.store.error}", width, "bold red"))
    if (progress := status.progress) is not None:
        done = meter(progress.done / progress.total, _METER_CELLS, ascii_only=ascii_only) if progress.total else ""
        facts = [progress.stage, done, amount(progress)]
        lines.append(one_line("  ".join(fact for fact in facts if fact), width, "cyan"))
    if not status.workers:
        lines.append(one_line("no groups yet", width, "dim"))
    return lines
