"""A suite as its TOML file has it, and which of its cells is run next. Pure.

config = "h200.toml"                # what all daemons have in common; beside the suite's file

[daemons.pair]
changes = { calibrate = true }      # over the configuration; tables are merged
after = ["stock"]                   # started when that one serves

[[cells]]
name = "4k"
priority = 1                        # the lowest first
profile = "gpu-4k"
rows = ["pair serial@gpu0", "pair ping-pong", "capped overlap@gpu0 against pair serial@gpu0"]
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from load_rows import How, Load
from load_sides import HOWS
from pingpong_bus.chain import Exactness
from pingpong_bus.errors import ConfigError, UsageError
from profiles import PROFILES, Document, Profile, Shape, reshaped
from runs import row_name
from ways import Way, baseline_of, parse_way


class DaemonSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the daemons that are up together."""

    changes: dict[str, Any] = {}
    """Of the configuration; tables are merged, everything else is replaced."""
    after: list[str] = []
    """Daemons that must serve before this one is started: for their compile cache, and so that nothing else loads
    while this one measures its engines."""
    delay_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """So much later than the others it is started: where time is short, in place of `after`, so that it measures its
    engines when the others have just come up."""


class Pace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is expected of an engine, to tell whether a cell still fits the time; what was seen counts later."""

    decode_ms: float = 10.0
    """A token."""
    prefill_ms: float = 0.1
    """A token."""
    overhead_s: float = 0.5
    """Of each run: caches to empty, messages."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs that are compared: one chain, or many at once, in rows of daemon and way."""

    name: str
    priority: float
    """Cells of the lowest come first."""
    again: float = 100.0
    """By how much the priority grows with each round that the cell has had."""
    runs: Annotated[int, msgspec.Meta(ge=1)] = 3
    """Rounds at most."""
    rows: Annotated[list[str], msgspec.Meta(min_length=1)]
    """"DAEMON WAY", or "DAEMON WAY against DAEMON WAY" to name the baseline; for many chains, a way is also
    "round-robin"."""
    cache: Literal["cold", "warm"] = "cold"
    exactness: Exactness | None = None
    profile: str | None = None
    """One of `profiles.py`; the fields below change it."""
    prefix: int | None = None
    output: int | None = None
    """Tokens that each agent writes, the last one a quarter of them."""
    agents: int | None = None
    shape: Shape = "line"
    document: Document = "none"
    at_once: int | None = None
    """So many chains together; None: one chain at a time."""

    def chain_profile(self) -> Profile:
        """The shape of its chains.

        Raises:
            UsageError: there is no such profile.
        """
        if self.profile is not None and self.profile not in PROFILES:
            raise UsageError(f"cell {self.name}: there is no profile {self.profile}.", hint=", ".join(PROFILES))
        return reshaped(
            PROFILES[self.profile or "cpu"],
            prefix=self.prefix,
            output=self.output,
            agents=self.agents,
            shape=self.shape,
            document=self.document,
        )

    @property
    def load(self) -> Load:
        """Of a cell of many chains."""
        return Load(at_once=self.at_once)


class Row(msgspec.Struct, frozen=True):
    """A row of a cell of one chain."""

    daemon: str
    way: Way
    baseline: str

    @property
    def name(self) -> str:
        """As in results."""
        return row_name(self.daemon, self.way.mode, self.way.group)


class Suite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    config: str
    daemons: dict[str, DaemonSpec]
    cells: list[Cell]
    pace: Pace = Pace()


def load_suite(path: Path) -> Suite:
    """Read a suite and check that its parts know each other.

    Raises:
        ConfigError: the file cannot be read or is off. UsageError: a row or profile is unknown.
    """
    try:
        suite = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Suite)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}.") from None
    names = [cell.name for cell in suite.cells]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: two cells have the same name.")
    for cell in suite.cells:
        profile = cell.chain_profile()
        if cell.at_once and (profile.shape, profile.document) != ("line", "none"):
            raise ConfigError(f"{path}: cell {cell.name} has many chains, which can only be lines without a document.")
        for daemon in daemons_of(cell):
            if daemon not in suite.daemons:
                raise ConfigError(f"{path}: cell {cell.name} wants a daemon {daemon}, which there is not.")
    for name, spec in suite.daemons.items():
        if unknown := [other for other in spec.after if other not in suite.daemons]:
            raise ConfigError(f"{path}: {name} starts after {unknown[0]}, which there is not.")
    return suite


def rows_of(cell: Cell, up: Sequence[str] | None = None) -> list[Row]:
    """The rows of a cell of one chain, each with its baseline.

    Where none is named it is the series of the same daemon: on the row's group, or the first one; and where that daemon
    has none, the cell's first series.

    Args:
        up: the daemons that serve; rows of others are left out. None: all.

    Raises:
        UsageError: a row makes no sense.
    """
    parsed: list[tuple[str, Way, str]] = []
    for text in cell.rows:
        place, _, against = text.partition(" against ")
        daemon, _, word = place.strip().partition(" ")
        parsed.append((daemon, parse_way(word.strip(), f"cell {cell.name}"), against.strip()))
    parsed = [row for row in parsed if up is None or row[0] in up]
    series = [(daemon, way) for daemon, way, _ in parsed if way.mode == "serial"]
    rows = []
    for daemon, way, against in parsed:
        of_daemon = [other for place, other, _ in parsed if place == daemon]
        own = baseline_of(way, of_daemon)
        baseline = row_name(daemon, own.mode, own.group)
        if own.mode != "serial" and series:
            baseline = row_name(series[0][0], series[0][1].mode, series[0][1].group)
        rows.append(Row(daemon, way, against or baseline))
    return rows


def sides_of(cell: Cell, up: Sequence[str] | None = None) -> list[tuple[str, How]]:
    """Daemon and way of each row of a cell of many chains.

    Raises:
        UsageError: a row makes no sense.
    """
    sides = []
    for text in cell.rows:
        daemon, _, word = text.partition(" ")
        how = next((known for known in HOWS if known == word.strip()), None)
        if how is None:
            raise UsageError(f"cell {cell.name}: {text!r} is no side.", hint=f"A way is one of {', '.join(HOWS)}.")
        if up is None or daemon in up:
            sides.append((daemon, how))
    return sides


def daemons_of(cell: Cell) -> list[str]:
    """The daemons that a cell wants."""
    pairs = sides_of(cell) if cell.at_once else [(row.daemon, row.way) for row in rows_of(cell)]
    return list(dict.fromkeys(daemon for daemon, _ in pairs))


def chosen_cells(suite: Suite, text: str | None) -> list[Cell]:
    """The cells of a comma-separated list of names; in a name * stands for anything.

    Raises:
        UsageError: there is none of a name.
    """
    if text is None:
        return list(suite.cells)
    chosen: list[Cell] = []
    for name in text.split(","):
        found = [
            cell for cell in suite.cells if cell.name == name or (name[-1:] == "*" and cell.name.startswith(name[:-1]))
        ]
        if not found:
            known = ", ".join(cell.name for cell in suite.cells)
            raise UsageError(f"--cells: there is no cell {name!r}.", hint=f"Cells: {known}.")
        chosen += [cell for cell in found if cell not in chosen]
    return chosen


def wanted_daemons(suite: Suite, cells: Sequence[Cell]) -> list[str]:
    """Daemons that the cells want, in an order in which each comes after those it is started after."""
    wanted = {daemon for cell in cells for daemon in daemons_of(cell)}
    order: list[str] = []
    while len(order) < len(wanted):
        free = [
            name
            for name in suite.daemons
            if name in wanted and name not in order and not (set(suite.daemons[name].after) & wanted) - set(order)
        ]
        if not free:
            raise ConfigError("daemons are each to be started after the other.")
        order += free
    return order


def estimated_s(cell: Cell, pace: Pace) -> float:
    """Seconds that a round of the cell should take.

    Every row is taken to be as long as cold series, which is the longest; many chains share what there is of two groups
    about as well as twice as many at once would.
    """
    profile = cell.chain_profile()
    written = (profile.agents - 1) * profile.output + profile.last_output
    read = profile.agents * profile.prefix
    chain_s = (read * pace.prefill_ms + written * pace.decode_ms) / 1e3
    if cell.at_once:
        chain_s = written * pace.decode_ms * 1.2 / 1e3 + read * pace.prefill_ms / 1e3 * cell.at_once / 2
    warm_s = read * pace.prefill_ms / 1e3 if cell.cache == "warm" else 0.0
    return len(cell.rows) * (chain_s + warm_s + pace.overhead_s)


def next_cell(
    cells: Sequence[Cell], rounds: Mapping[str, int], costs_s: Mapping[str, float], left_s: float
) -> Cell | None:
    """Which cell gets its next round; None where nothing fits any more.

    The lowest of priority + again * (rounds that it has had), among those that have rounds to come and fit the time.

    Args:
        rounds: that each cell has had; those not named, none.
        costs_s: seconds that a round of each should take.
        left_s: of the time for measuring.
    """
    fitting = [cell for cell in cells if rounds.get(cell.name, 0) < cell.runs and costs_s[cell.name] <= left_s]
    return min(fitting, key=lambda cell: cell.priority + cell.again * rounds.get(cell.name, 0), default=None)


def merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A document with the changes: tables are merged, everything else is replaced."""
    result = dict(document)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def as_toml(document: Mapping[str, Any]) -> str:
    """A document of strings, numbers, booleans, lists and tables as TOML, a line for each key at the top."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in document.items())


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{msgspec.json.encode(key).decode()} = {_value(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return msgspec.json.encode(value).decode()  # JSON's strings, numbers and booleans are TOML's, too
