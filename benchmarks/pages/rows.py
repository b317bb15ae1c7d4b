"""The rows of all results files, by kind, each with the file and line that it stands in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from decode_first_report import Measurement
from exactness import ChainPair
from load_rows import Round
from mixed_rows import LoneRow, MixedStep, StepProfile
from overhead import OverheadRun
from pages.views import FinalizeRun, GroupsRow
from pingpong_bus.errors import DataError
from runs import Run

T = TypeVar("T")


class Origin(msgspec.Struct, frozen=True, order=True):
    """Where a row stands."""

    file: str
    """Relative to the repository, with slashes."""
    line: int
    """The first is 1."""


class Found(msgspec.Struct, Generic[T], frozen=True):
    """A row and where it stands."""

    origin: Origin
    row: T


class Results(msgspec.Struct, frozen=True):
    """All rows that the page shows, in the order of the files' names and lines."""

    runs: list[Found[Run]] = []
    """Without those that warmed up."""
    overhead: list[Found[OverheadRun]] = []
    decode_first: list[Found[Measurement]] = []
    pairs: list[Found[ChainPair]] = []
    rounds: list[Found[Round]] = []
    steps: list[Found[MixedStep]] = []
    profiles: list[Found[StepProfile]] = []
    lone: list[Found[LoneRow]] = []
    finalizes: list[Found[FinalizeRun]] = []
    groups: list[Found[GroupsRow]] = []


class _Kind(msgspec.Struct, frozen=True):
    """How rows of one kind are known and kept."""

    list_name: str
    """Of `Results`."""
    keys: frozenset[str]
    """That only rows of this kind have together."""
    row: Any


_KINDS = (
    _Kind("runs", frozenset({"profile", "mode", "cache", "result"}), Run),
    _Kind("overhead", frozenset({"system", "outputs", "idle_share"}), OverheadRun),
    _Kind("decode_first", frozenset({"engine", "appends", "target", "gaps_ms"}), Measurement),
    _Kind("pairs", frozenset({"chain", "certificate"}), ChainPair),
    _Kind("rounds", frozenset({"side", "how", "makespan_ms", "chains"}), Round),
    _Kind("steps", frozenset({"setup", "context", "tokens", "append_ms"}), MixedStep),
    _Kind("profiles", frozenset({"setup", "context", "tokens", "steps", "top"}), StepProfile),
    _Kind("lone", frozenset({"alone"}), LoneRow),
    _Kind("finalizes", frozenset({"mode", "stages", "ttft_ms", "step_ms"}), FinalizeRun),
    _Kind("groups", frozenset({"groups", "cpu_ms_per_chain", "real_time_groups"}), GroupsRow),
)


def read_results(folder: Path, root: Path) -> Results:
    """The rows of all JSONL files of a folder; rows of other benchmarks are left out.

    Args:
        root: origins are named relative to it.

    Raises:
        DataError: a file cannot be read, a line is no JSON object, or lacks what its kind needs.
    """
    results = Results()
    for path in sorted(folder.glob("*.jsonl")):
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise DataError(f"{path.name} cannot be read: {error.strerror}.") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                _add(results, Origin(path.relative_to(root).as_posix(), number), line)
    return results


def _add(results: Results, origin: Origin, line: bytes) -> None:
    try:
        document = msgspec.json.decode(line, type=dict[str, Any])
        kind = next((kind for kind in _KINDS if kind.keys <= document.keys()), None)
        if kind is None or document.get("warmup"):
            return
        row = msgspec.json.decode(line, type=kind.row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{origin.file}, line {origin.line}: {error}.") from None
    getattr(results, kind.list_name).append(Found(origin, row))


def origins(found: Iterable[Found[Any]]) -> list[Origin]:
    """Where rows stand, in order, each once."""
    return sorted({one.origin for one in found})


def rows(found: Iterable[Found[T]]) -> list[T]:
    """The rows themselves."""
    return [one.row for one in found]


def by_key(found: Sequence[T], key: Any) -> dict[Any, list[T]]:
    """In groups of equal key, groups in the order of their first member."""
    groups: dict[Any, list[T]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return groups
