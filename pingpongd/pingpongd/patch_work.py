"""Patching the installed vLLM, and taking it back: each file as a whole or not at all, and all files or none.

What a run is about to do stands in `vllm/.pingpongd-patch/state.json` before the first file is replaced, and the files
as they were released stand beside it. So a run that was killed is completed or undone by the next one, and a later
release of pingpongd, with other patches, can still take back what this one did. With the last patch the folder goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec

from pingpong_bus.errors import ConfigError
from pingpong_worker.vllm_abilities import STATE_FILE
from pingpongd.patch_series import Series, digest
from pingpongd.vllm_installation import PACKAGE, Installation, with_record
from pingpongd.whole_files import PatchNotWritten, beside, read_file, replace_file, stage_file, write_file

_STATE = f"{PACKAGE}/{STATE_FILE}"
KEPT = _STATE.rpartition("/")[0]


class KeptFile(msgspec.Struct, frozen=True):
    """A file that we have patched."""

    original: str | None
    """SHA-256 as it was released; None: we have added it."""
    ours: list[str | None]
    """SHA-256 as we leave it; of a run that was killed, also as the one before had left it."""


class KeptState(msgspec.Struct, frozen=True):
    """What stands in `state.json`."""

    made_by: str
    """Version of pingpongd."""
    vllm: str
    patches: list[str]
    """That are applied, or were to be."""
    done: bool
    """Whether the run that was to bring this about came to its end."""
    files: dict[str, KeptFile]


@dataclass(frozen=True)
class Found:
    """What an installation's files are."""

    data: dict[str, bytes | None]
    """Of every file that a patch touches, or has touched."""
    originals: dict[str, bytes | None] = field(default_factory=dict)
    """As released; of files that are not foreign."""
    foreign: tuple[str, ...] = ()
    """Files that are neither as released nor as we leave them."""
    other: tuple[str, ...] = ()
    """Files that another release of pingpongd has patched otherwise."""
    kept: KeptState | None = None

    @property
    def hashes(self) -> dict[str, str | None]:
        """SHA-256 of each file."""
        return {path: digest(data) for path, data in self.data.items()}

    @property
    def lost(self) -> bool:
        """Whether files are patched, and what we keep beside them is gone or damaged."""
        return self.kept is None and any(
            digest(self.data[path]) != digest(original) for path, original in self.originals.items()
        )

    def cut_short(self, series: Series) -> bool:
        """Whether a run was killed before its end."""
        partly = series.begun(self.hashes) - series.applied(self.hashes)
        return bool(partly) or (self.kept is not None and not self.kept.done)


def look(installation: Installation, series: Series) -> Found:
    """Read the files that matter; nothing is changed.

    Raises:
        PatchNotWritten: one cannot be read.
    """
    kept = kept_state(installation)
    files = kept.files if kept is not None else {}
    data: dict[str, bytes | None] = {}
    originals: dict[str, bytes | None] = {}
    foreign: list[str] = []
    other: list[str] = []
    for path in sorted({*series.paths, *files}):
        data[path] = read_file(installation.site / path)
        sha = digest(data[path])
        mine = files.get(path)
        if sha in series.states.get(path, ()):
            originals[path] = series.original(path, data[path])
            continue
        released = series.states[path][0] if path in series.states else mine.original if mine else None
        if mine is not None and sha == mine.original == released:
            originals[path] = data[path]
            continue
        copy = read_file(installation.site / KEPT / path)
        if mine is not None and sha in mine.ours and mine.original == released == digest(copy):
            originals[path] = copy
            other.append(path)
        else:
            foreign.append(path)
    return Found(data, originals, tuple(foreign), tuple(other), kept)


def change(installation: Installation, series: Series, names: set[str]) -> list[str]:
    """Bring about that these patches are applied, with all that they need, and no others.

    Args:
        names: none: vLLM is as it was released.

    Returns:
        The files that were changed, by their paths beneath `site`. Where none of vLLM's own were, what else was mended:
        the RECORD, or what we keep.

    Raises:
        ConfigError: a file is foreign; nothing is changed.
        PatchNotWritten: a file cannot be written; nothing is changed.
    """
    with _alone(installation):
        found = look(installation, series)
        if found.foreign:
            raise ConfigError(
                f"{installation.site / found.foreign[0]} is neither as vLLM {installation.version} was released nor as "
                "our patches leave it.",
                hint="Install vLLM anew, then patch it; nothing was changed.",
            )
        wanted = {
            path: series.content(path, original, names) if path in series.states else original
            for path, original in found.originals.items()
        }
        changes = {path: data for path, data in wanted.items() if data != found.data[path]}
        state = _state_of(series, names, wanted, found)
        _check_no_links(installation, changes)
        if not changes and found.kept == state and not _lists_what_is_gone(installation, state):
            _drop_unused(installation.site, state)  # of a run that was killed as it began
            return []
        _check_writable(installation, changes)
        try:
            _carry_out(installation, found, wanted, state)
        except OSError as error:
            raise PatchNotWritten(
                f"{error.filename or installation.package} cannot be written: {error.strerror}.",
                hint="The files are as they were.",
            ) from error
        return sorted(changes) or [_beneath(installation) if state is None else _STATE]


def _state_of(series: Series, names: set[str], wanted: Mapping[str, bytes | None], found: Found) -> KeptState | None:
    """What is to be kept when all is done; None: nothing is patched."""
    files = {
        path: KeptFile(digest(found.originals[path]), [digest(data)])
        for path, data in wanted.items()
        if data != found.originals[path]
    }
    patches = [patch.name for patch in series.patches if patch.name in names]
    return KeptState(version("pingpongd"), series.version, patches, True, files) if files else None


def _carry_out(
    installation: Installation, found: Found, wanted: Mapping[str, bytes | None], state: KeptState | None
) -> None:
    site = installation.site
    changes = {path: data for path, data in wanted.items() if data != found.data[path]}
    record = None if installation.record is None else installation.record.read_bytes()
    touched = {**(found.kept.files if found.kept else {}), **(state.files if state else {})}
    underway = KeptState(
        version("pingpongd"),
        installation.version,
        [] if state is None else state.patches,
        False,
        {
            path: KeptFile(digest(found.originals[path]), [digest(found.data[path]), digest(changes.get(path))])
            if path in changes
            else KeptFile(digest(found.originals[path]), [digest(found.data[path])])
            for path in {*touched, *changes}
        },
    )
    replaced: list[str] = []
    try:
        for path in touched:  # also of those that are unpatched now: a run that is killed must find them
            original = found.originals[path]
            if original is not None and read_file(site / KEPT / path) != original:
                write_file(site / KEPT / path, original)
        write_file(site / _STATE, msgspec.json.encode(underway))
        for path, data in changes.items():  # what there is no room for is found out before anything is replaced
            if data is not None:
                stage_file(site / path, data)
        for path, data in changes.items():
            replaced.append(path)
            replace_file(site / path, data)
        if record is not None and installation.record is not None:
            write_file(installation.record, _new_record(record, found, wanted, state))
        if state is not None:
            write_file(site / _STATE, msgspec.json.encode(state))
        _drop_unused(site, state)
    except BaseException:
        _put_back(installation, found, replaced, record)
        raise
    finally:
        for path in wanted:
            beside(site / path).unlink(missing_ok=True)


def _put_back(installation: Installation, found: Found, replaced: Sequence[str], record: bytes | None) -> None:
    """Make everything what it was before the run.

    Raises:
        PatchNotWritten: that fails, too.
    """
    try:
        for path in replaced:
            write_file(installation.site / path, found.data[path])
        if record is not None and installation.record is not None:
            write_file(installation.record, record)
        if found.kept is not None:
            write_file(installation.site / _STATE, msgspec.json.encode(found.kept))
        else:
            shutil.rmtree(installation.site / KEPT, ignore_errors=True)
    except OSError as error:
        raise PatchNotWritten(
            f"{error.filename or installation.package} cannot be written: {error.strerror}; vLLM is patched in part.",
            hint="See to it, then run `pingpongd patch revert`.",
        ) from error


def _new_record(record: bytes, found: Found, wanted: Mapping[str, bytes | None], state: KeptState | None) -> bytes:
    """The package's RECORD, true of every file that we touch and of what we keep."""
    files = dict(wanted)
    files.update(dict.fromkeys(_kept_lines(record)))  # all that it lists, also where what we kept was lost
    files[_STATE] = None if state is None else msgspec.json.encode(state)
    if state is not None:
        files.update({f"{KEPT}/{path}": found.originals[path] for path in state.files})
    added = {path: path.startswith(f"{KEPT}/") or found.originals[path] is None for path in files}
    return with_record(record, files, added=added)


def _drop_unused(site: Path, state: KeptState | None) -> None:
    """Remove copies of files that are as they were released again, and what killed runs have left."""
    used = set() if state is None else {site / KEPT / path for path in state.files} | {site / _STATE}
    for folder, _, names in os.walk(site / KEPT, topdown=False):
        for name in names:
            if Path(folder) / name not in used:
                (Path(folder) / name).unlink()
        with contextlib.suppress(OSError):  # it is not empty
            Path(folder).rmdir()


def _kept_lines(record: bytes) -> list[str]:
    """What a RECORD lists of what we keep."""
    paths = [os.fsdecode(line.split(b",")[0]) for line in record.splitlines()]
    return [path for path in paths if path.startswith(f"{KEPT}/")]


def _lists_what_is_gone(installation: Installation, state: KeptState | None) -> bool:
    """Whether the RECORD lists files of ours that are not to be there."""
    if installation.record is None:
        return False
    there = set() if state is None else {_STATE, *(f"{KEPT}/{path}" for path in state.files)}
    return not there.issuperset(_kept_lines(read_file(installation.record) or b""))


def _beneath(installation: Installation) -> str:
    """What was mended where vLLM is as it was released: the RECORD, by its path beneath `site`, else what we kept."""
    return KEPT if installation.record is None else str(installation.record.relative_to(installation.site))


def _check_no_links(installation: Installation, changes: Mapping[str, bytes | None]) -> None:
    """Refuse to write anywhere but where the paths say, also within `site`."""
    root = Path(os.path.realpath(installation.site))
    kept = installation.site / KEPT
    folders = _folders(installation, changes) | {kept} | {(kept / path).parent for path in changes}
    for folder in sorted(folders):
        real = os.path.realpath(folder)
        if real != str(root / folder.relative_to(installation.site)):
            raise PatchNotWritten(
                f"{folder} is, or lies in, a link: it is {real}.",
                hint="Put the folder itself there, or name the vLLM that the link leads into with --vllm.",
            )


def _check_writable(installation: Installation, changes: Mapping[str, bytes | None]) -> None:
    for folder in sorted(_folders(installation, changes)):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PatchNotWritten(
                f"{folder} cannot be written by this user.",
                hint="Patch as the user who owns it, where the image is built, or a copy of your own (--vllm DIR).",
            )


def _folders(installation: Installation, changes: Mapping[str, bytes | None]) -> set[Path]:
    """Where files are replaced."""
    folders = {(installation.site / path).parent for path in changes} | {installation.package}
    return folders if installation.record is None else folders | {installation.record.parent}


@contextlib.contextmanager
def _alone(installation: Installation) -> Iterator[None]:
    """One run at a time; the lock goes with the process."""
    try:
        lock = os.open(installation.package, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PatchNotWritten(f"{installation.package} cannot be opened: {error.strerror}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise PatchNotWritten(
            "another `pingpongd patch` is at work on this vLLM.", hint="Wait for its end; nothing was changed."
        ) from None
    finally:
        os.close(lock)


def kept_state(installation: Installation) -> KeptState | None:
    """What an earlier run has left; None where nothing is patched, or vLLM was installed anew since."""
    data = read_file(installation.site / _STATE)
    if data is None:
        return None
    try:
        state = msgspec.json.decode(data, type=KeptState)
    except msgspec.MsgspecError:
        return None
    return state if state.vllm == installation.version else None
