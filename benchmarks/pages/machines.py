"""What rows were measured on, by their provenance; the page has a part for each."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pages.rows import Results


class Machine(msgspec.Struct, frozen=True, order=True):
    """What the runs ran on."""

    gpus: tuple[str, ...]
    cpu: str
    cores: int

    @property
    def name(self) -> str:
        """As headings call it."""
        if not self.gpus:
            return f"{self.cores} CPU {'core' if self.cores == 1 else 'cores'} ({self.cpu})"
        kinds = list(dict.fromkeys(self.gpus))
        return ", ".join(f"{self.gpus.count(kind)} \N{MULTIPLICATION SIGN} {kind}" for kind in kinds)

    @property
    def slug(self) -> str:
        """For names of files."""
        if not self.gpus:
            return f"cpu{self.cores}"
        return f"{re.sub('[^a-z0-9]+', '-', self.gpus[0].lower().removeprefix('nvidia '))}-x{len(self.gpus)}"


class Setting(msgspec.Struct, frozen=True):
    """A part of the page."""

    machine: Machine
    simulated: bool
    """Whether its engines only kept time; what the processes cost is still the machine's."""

    @property
    def name(self) -> str:
        """As its heading calls it."""
        return f"Simulated engines (processes on {self.machine.name})" if self.simulated else self.machine.name

    @property
    def slug(self) -> str:
        """For names of files."""
        return f"simulated-{self.machine.slug}" if self.simulated else self.machine.slug


def machine(provenance: dict[str, Any]) -> Machine:
    """The machine of a row."""
    known = provenance.get("machine", {})
    gpus = tuple(name.partition(",")[0] for name in known.get("gpus", ()))
    return Machine(gpus, known.get("cpu", "unknown"), known.get("usable_cores", known.get("cores", 0)))


def version(provenance: dict[str, Any]) -> str:
    """The commit that made a row, and whether the files were other than its; empty where it is not known."""
    commit = str(provenance.get("commit") or "")[:12]
    return f"{commit} with changes" if commit and provenance.get("dirty") else commit


def is_simulated(provenance: dict[str, Any]) -> bool:
    """Whether the engines of a row only kept time."""
    return any(str(engine.get("engine", "")).startswith("simulated") for engine in provenance.get("engines") or ())


def by_setting(results: Results) -> dict[Setting, Results]:
    """The rows of each machine; those with most GPUs first, simulated ones last."""
    parts: dict[Setting, Results] = {}
    for name in Results.__struct_fields__:
        for found in getattr(results, name):
            known = found.row.provenance
            setting = Setting(machine(known), is_simulated(known) or getattr(found.row, "simulated", False))
            getattr(parts.setdefault(setting, Results()), name).append(found)
    return {setting: parts[setting] for setting in sorted(parts, key=_order)}


def _order(setting: Setting) -> tuple[bool, int, int, str]:
    return setting.simulated, -len(setting.machine.gpus), -setting.machine.cores, setting.name
