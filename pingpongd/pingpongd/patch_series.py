"""The patches to one version of vLLM: what each is for, what it needs, and what they make of its files. Pure.

A folder has a `series` (one file name a line, `#` comments), the patch files, and a `manifest.json` with the SHA-256 of
every file before and after each patch. A patch file begins with fields (`Subject`, `Why`, `Upstream`, `Ability`,
`Needs`, each until the next or an empty line), then come the diffs.

Each file has a chain of states: as it was released, after the first patch that touches it, after the second, and so
on. Of a file no patch is applied without those before it that touch it too: so a file's hash alone tells how far it is
patched, and the diffs fit to the line. Patches that share no file are independent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pingpong_bus.errors import ConfigError, UsageError
from pingpongd.unified_diff import FileDiff, parse_diff

SUFFIX = ".patch"
_FIELD = re.compile(r"^([A-Z][A-Za-z]+): *(.*)$")
_STALE = "Take the patches from the release of this pingpongd; after a change run patches/make_manifest.py."


class FileStates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SHA-256 of a file, in hex; None where there is none."""

    before: str | None
    after: str | None


class ManifestPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One patch of a manifest."""

    file: str
    sha256: str
    files: dict[str, FileStates]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A folder's `manifest.json`."""

    vllm: str
    """The version that the patches are for."""
    patches: list[ManifestPatch]


@dataclass(frozen=True)
class Patch:
    """A patch file, read."""

    name: str
    """Its file's, without `.patch`."""
    subject: str
    why: str
    upstream: str
    abilities: tuple[str, ...]
    """What an engine has by it, as in `EngineLimits.abilities`."""
    declared: tuple[str, ...]
    """Names of others that it says it needs."""
    files: tuple[FileDiff, ...]
    sha256: str
    """Of the patch file."""

    @property
    def paths(self) -> frozenset[str]:
        """Of the files that it touches."""
        return frozenset(each.path for each in self.files)


@dataclass(frozen=True)
class Series:
    """All patches to one version, in order.

    Attributes:
        states: for each file its chain: the hash as released, then after each patch of `touching`.
    """

    version: str
    patches: tuple[Patch, ...]
    states: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)

    def touching(self, path: str) -> list[Patch]:
        """The patches that touch a file, in order."""
        return [patch for patch in self.patches if path in patch.paths]

    @property
    def paths(self) -> list[str]:
        """Every file that a patch touches."""
        return sorted(frozenset().union(*(patch.paths for patch in self.patches)))

    def named(self, names: Iterable[str]) -> list[Patch]:
        """The patches of these names, in the order of the series; all of them where none is named.

        Raises:
            UsageError: there is none of a name.
        """
        wanted = {name.removesuffix(SUFFIX) for name in names}
        known = {patch.name for patch in self.patches}
        if unknown := sorted(wanted - known):
            there = ", ".join(patch.name for patch in self.patches) or "none"
            raise UsageError(f"there is no patch {unknown[0]} to vLLM {self.version}.", hint=f"There are: {there}.")
        return [patch for patch in self.patches if not wanted or patch.name in wanted]

    def needed_by(self, patch: Patch) -> set[str]:
        """Names of the patches that have to be applied before one: directly or by others."""
        before: list[Patch] = []
        for each in self.patches:
            if each.name == patch.name:
                break
            before.append(each)
        needed = {each.name for each in before if each.name in patch.declared or each.paths & patch.paths}
        return needed.union(*(self.needed_by(each) for each in before if each.name in needed))

    def with_needed(self, chosen: Iterable[Patch]) -> set[str]:
        """Names of patches and of all that they need."""
        return set().union(*({patch.name} | self.needed_by(patch) for patch in chosen))

    def with_needing(self, chosen: Iterable[Patch]) -> set[str]:
        """Names of patches and of all that cannot do without them."""
        names = {patch.name for patch in chosen}
        return names | {patch.name for patch in self.patches if self.needed_by(patch) & names}

    def applied(self, hashes: Mapping[str, str | None]) -> set[str]:
        """Names of the patches that the files' hashes show as applied in full.

        Args:
            hashes: of every file of `paths`; one that is in no known state counts as unpatched.
        """
        done = {path: set(self._applied_to(path, hashes.get(path))) for path in self.paths}
        return {patch.name for patch in self.patches if all(patch.name in done[path] for path in patch.paths)}

    def begun(self, hashes: Mapping[str, str | None]) -> set[str]:
        """Names of the patches that at least one file has."""
        return set().union(*(self._applied_to(path, hashes.get(path)) for path in self.paths))

    def content(self, path: str, original: bytes | None, names: set[str]) -> bytes | None:
        """What a file is with some patches applied; the names hold all that they need.

        Raises:
            ConfigError: the outcome is not what the manifest says.
        """
        data = original
        at = 0
        for patch in self.touching(path):
            if patch.name not in names:
                break
            data = _diff_of(patch, path).apply(data)
            at += 1
        self._check(path, data, at)
        return data

    def original(self, path: str, data: bytes | None) -> bytes | None:
        """What a file was before it was patched.

        Raises:
            ConfigError: it is in no known state.
        """
        states = self.states[path]
        if digest(data) not in states:
            raise ConfigError(f"{path} is neither as vLLM {self.version} was released nor as our patches leave it.")
        for patch in reversed(self.touching(path)[: states.index(digest(data))]):
            data = _diff_of(patch, path).revert(data)
        self._check(path, data, 0)
        return data

    def _applied_to(self, path: str, found: str | None) -> list[str]:
        states = self.states[path]
        count = states.index(found) if found in states else 0
        return [patch.name for patch in self.touching(path)[:count]]

    def _check(self, path: str, data: bytes | None, at: int) -> None:
        if digest(data) != self.states[path][at]:
            raise ConfigError(f"{path} would not become what the manifest says.", hint=_STALE)


def read_series(text: str) -> list[str]:
    """The names of the files in a `series`."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def read_patch(file: str, data: bytes) -> Patch:
    """Read a patch file.

    Raises:
        ConfigError: it is not one.
    """
    head, files = parse_diff(data, file)
    fields: dict[str, str] = {}
    key = ""
    for line in head.decode(errors="replace").splitlines():
        if match := _FIELD.match(line):
            key = match[1]
            fields[key] = match[2]
        elif not line.strip():
            key = ""
        elif key:
            fields[key] = f"{fields[key]} {line.strip()}".strip()
    if not fields.get("Subject"):
        raise ConfigError(f"{file} has no Subject.", hint="Begin it with Subject, Why, Upstream and Ability.")
    return Patch(
        name=file.removesuffix(SUFFIX),
        subject=fields["Subject"],
        why=fields.get("Why", ""),
        upstream=fields.get("Upstream", ""),
        abilities=_listed(fields.get("Ability", "")),
        declared=tuple(name.removesuffix(SUFFIX) for name in _listed(fields.get("Needs", ""))),
        files=files,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def make_manifest(version: str, patches: Sequence[Patch], originals: Mapping[str, bytes | None]) -> Manifest:
    """The manifest of patches, from the files as they were released.

    Raises:
        ConfigError: a patch does not fit.
    """
    now = dict(originals)
    listed: list[ManifestPatch] = []
    for patch in patches:
        files: dict[str, FileStates] = {}
        for each in patch.files:
            before = now[each.path]
            now[each.path] = each.apply(before)
            files[each.path] = FileStates(digest(before), digest(now[each.path]))
        listed.append(ManifestPatch(patch.name + SUFFIX, patch.sha256, files))
    return Manifest(version, listed)


def joined(manifest: Manifest, patches: Sequence[Patch]) -> Series:
    """Patches with their manifest.

    Raises:
        ConfigError: they do not belong together.
    """
    if [patch.name + SUFFIX for patch in patches] != [entry.file for entry in manifest.patches]:
        raise ConfigError(f"series and manifest of the patches to vLLM {manifest.vllm} list others.", hint=_STALE)
    states: dict[str, list[str | None]] = {}
    for patch, entry in zip(patches, manifest.patches, strict=True):
        if patch.sha256 != entry.sha256 or patch.paths != set(entry.files):
            raise ConfigError(f"{entry.file} is not the one that the manifest was made of.", hint=_STALE)
        for path, each in entry.files.items():
            chain = states.setdefault(path, [each.before])
            if chain[-1] != each.before or each.after in chain:
                raise ConfigError(f"the manifest does not say what {path} is before {entry.file}.", hint=_STALE)
            chain.append(each.after)
    names = [patch.name for patch in patches]
    for at, patch in enumerate(patches):
        if late := [name for name in patch.declared if name not in names[:at]]:
            raise ConfigError(f"{patch.name} needs {late[0]}, which does not come before it.", hint=_STALE)
    return Series(manifest.vllm, tuple(patches), {path: tuple(chain) for path, chain in states.items()})


def digest(data: bytes | None) -> str | None:
    """SHA-256 of a file's content, in hex; None of none."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def _diff_of(patch: Patch, path: str) -> FileDiff:
    return next(each for each in patch.files if each.path == path)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[,\s]+", text) if part)
