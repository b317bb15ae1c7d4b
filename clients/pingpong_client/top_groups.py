"""The groups of a daemon on `top`'s screen: whether their tokens come in time, and why not. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from pingpong_bus.messages import GroupHealth, ItlSummary, Progress, WorkerStatus
from pingpong_client.sparkline import meter, sparkline
from pingpong_client.start_bars import amount
from pingpong_client.table import milliseconds, number
from pingpong_client.top_rates import TokenRates
from pingpong_client.top_table import WIDE, Block, Column, heading, row, widths, wrapped

_HISTORY = "ITL by the second"
COLUMNS = (
    Column("group", 8, wide=14),
    Column("state", 10),
    Column("ITL p50", 7, right=True),
    Column("p99 ms", 6, right=True),
    Column("worst", 6, right=True, from_width=WIDE),
    Column("usual", 6, right=True, from_width=WIDE),
    Column("late", 5, right=True, from_width=WIDE),
    Column(_HISTORY, 8, stretch=True),
    Column("tok/s", 7, right=True),
    Column("run", 3, right=True),
    Column("KV", 4, right=True),
    Column("held", 4, right=True, from_width=70),
    Column("starts", 6, right=True, from_width=120),
)
_MODEL = Column("model", 12, wide=16, from_width=WIDE)
"""Where groups serve several models."""
_METER_CELLS = 16
_SLOW = 1.3
"""From here on a second's median is marked: as the watchdog does."""
_WHY_LINES = 3
_STYLES = {
    "degraded": "bold yellow",
    "recovering": "cyan",
    "failed": "bold red",
    "dead": "red",
    "waiting": "yellow",
    "starting": "cyan",
    "loading": "cyan",
}


def group_blocks(
    workers: Sequence[WorkerStatus], rates: TokenRates, width: int, *, ascii_only: bool = False
) -> tuple[Text, list[Block]]:
    """The heading, and a block for each group, in the configuration's order."""
    several = len({worker.model for worker in workers}) > 1
    columns = (*COLUMNS[:1], _MODEL, *COLUMNS[1:]) if several else COLUMNS
    blocks = [_block(worker, columns, rates, width, ascii_only=ascii_only) for worker in workers]
    return heading(columns, width), blocks


def in_trouble(worker: WorkerStatus) -> bool:
    """Whether a person would want to see it first."""
    return worker.state != "ready" or worker.health.state != "healthy"


def state_of(worker: WorkerStatus) -> str:
    """One word: of one that serves, how it is."""
    if worker.state != "ready":
        return worker.state
    return "serving" if worker.health.state == "healthy" else worker.health.state


def _block(
    worker: WorkerStatus, columns: Sequence[Column], rates: TokenRates, width: int, *, ascii_only: bool
) -> Block:
    state = state_of(worker)
    styled = Text(state, style=_STYLES.get(state, ""))
    if not worker.serves:
        return _absent(worker, columns, styled, width, ascii_only=ascii_only)
    itl, limits = worker.itl, worker.limits
    rate = rates.of(worker.name)
    used = worker.scheduler.kv_usage if worker.scheduler is not None else None
    held = worker.kv_held_tokens / limits.kv_tokens if limits is not None and limits.kv_tokens else None
    room = widths(columns, width)[_HISTORY]
    cells: dict[str, str | Text] = {
        "group": worker.name,
        "model": worker.model or "(default)",
        "state": styled,
        "ITL p50": _ms(itl.p50_ms),
        "p99 ms": _ms(itl.p99_ms),
        "worst": _ms(itl.worst_ms),
        "usual": _ms(itl.usual_ms),
        "late": f"{itl.late / itl.tokens:.1%}" if itl.tokens else "-",
        _HISTORY: _history(itl, room, ascii_only=ascii_only),
        "tok/s": "-" if rate is None else f"{rate:,.1f}" if rate < 1000 else f"{rate:,.0f}",
        "run": number(worker.hops),
        "KV": _share(used),
        "held": _share(held),
        "starts": number(worker.restarts + 1),
    }
    lines = [row(columns, cells, width)]
    if worker.health.state != "healthy":
        lines += wrapped(_episode(worker.health), width, _WHY_LINES, style=_STYLES[worker.health.state])
    return Block(lines)


def _absent(worker: WorkerStatus, columns: Sequence[Column], state: Text, width: int, *, ascii_only: bool) -> Block:
    """One that does not serve: what it does instead, and how far it has come."""
    progress = worker.progress or Progress(stage=worker.stage)
    facts = [progress.stage or worker.stage]
    if progress.total:
        facts.append(meter(progress.done / progress.total, _METER_CELLS, ascii_only=ascii_only))
    facts.append(amount(progress))
    last = next(at for at, column in enumerate(columns) if column.title == "state")
    columns = (*columns[: last + 1], Column("what", 8, stretch=True))
    what = "  ".join(fact for fact in facts if fact)
    cells: dict[str, str | Text] = {"group": worker.name, "model": worker.model or "(default)", "state": state}
    lines = [row(columns, cells | {"what": what}, width)]
    if worker.failure and worker.failure not in what:
        lines += wrapped(f"the last failure: {worker.failure}", width, _WHY_LINES, style="red")
    return Block(lines)


def _episode(health: GroupHealth) -> str:
    for_s = f"for {health.since_s:,.0f} s"
    head = f"{health.slowdown:.1f} times as slow {for_s}" if health.slowdown > 1 else f"{health.state} {for_s}"
    return f"{head}: {health.cause or 'unknown'}{f'; {health.why}' if health.why else ''}"


def _history(itl: ItlSummary, cells: int, *, ascii_only: bool) -> Text:
    """The line of bars; seconds that were slow stand out by their height, and by colour as well."""
    bars = sparkline(itl.history_ms, cells, usual=itl.usual_ms, ascii_only=ascii_only)
    line = Text(bars)
    shown = itl.history_ms[-cells:]
    for at, value in enumerate(shown, cells - len(shown)):
        if itl.usual_ms and value >= _SLOW * itl.usual_ms:
            line.stylize("yellow", at, at + 1)
    return line


def _ms(value: float) -> str:
    return milliseconds(value) if value else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
