"""The ways in which a chain is run: a mode, and for some modes the one group that it is held to. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pingpong_bus.errors import UsageError
from runs import GROUPED_MODES, RUN_MODES, RunMode, row_name


class Way(msgspec.Struct, frozen=True):
    """A mode, and the group that it is held to; empty: it chooses."""

    mode: RunMode
    group: str = ""

    @property
    def name(self) -> str:
        """As the command line has it: "serial", "overlap@gpu0"."""
        return row_name("", self.mode, self.group)


def parse_way(text: str, flag: str = "--modes") -> Way:
    """The way that "MODE" or "MODE@GROUP" names.

    Raises:
        UsageError: there is no such mode, or it takes no group.
    """
    name, _, group = text.partition("@")
    mode = next((known for known in RUN_MODES if known == name), None)
    if mode is None:
        raise UsageError(f"{flag}: there is no mode {name!r}.", hint=f"Choose from {', '.join(RUN_MODES)}.")
    if group and mode not in GROUPED_MODES:
        raise UsageError(f"{flag}: {mode} cannot be held to a group.", hint=f"{', '.join(GROUPED_MODES)} can.")
    return Way(mode, group)


def baseline_of(way: Way, ways: Sequence[Way]) -> Way:
    """The series that a way is compared with: on its own group, else wherever the daemon chose, else the first one.

    A way without any series beside it is its own.
    """
    series = [other for other in ways if other.mode == "serial"]
    if way.mode == "serial" and way in series:
        return way
    on_its_group = [other for other in series if way.group and other.group == way.group]
    chosen_freely = [other for other in series if not other.group]
    return next(iter([*on_its_group, *chosen_freely, *series]), way)
